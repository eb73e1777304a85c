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


def mark_code(app, what, name, obj, options, lines):
    """Turns the fenced code blocks of a docstring into reStructuredText code blocks.

    Otherwise, reStructuredText would take the fences for inline literals.
    """
    marked, code = [], False
    for line in lines:
        text = line.lstrip()
        indent = line[: len(line) - len(text)]
        if text.startswith("```"):
            code = not code
            marked += [f"{indent}.. code-block:: {text[3:] or 'text'}", ""] if code else [""]
        else:
            marked.append(f"   {line}" if code and text else line)
    lines[:] = marked


def setup(app):
    # Runs before napoleon, which has priority 500.
    app.connect("autodoc-process-docstring", mark_code, priority=400)
