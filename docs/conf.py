"""Sphinx: `uv run --group docs sphinx-build -W docs docs/_build`."""

import jaxcross

project = "jaxcross"
author = "The jaxcross authors"
project_copyright = author
version = release = jaxcross.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jaxcross"
default_role = "code"

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
