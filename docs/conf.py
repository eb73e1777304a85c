"""Sphinx: `uv run --group docs sphinx-build -W docs docs/_build`."""

import re
import sys
from pathlib import Path

import jaxcross

sys.path.append(str(Path(__file__).parent / "extensions"))

project = "jaxcross"
author = "The jaxcross authors"
project_copyright = author
version = release = jaxcross.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_codeautolink",
    "api_links",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "jaxcross"
html_static_path = ["_static"]
html_css_files = ["site.css"]
default_role = "code"

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

# A button copies code without prompts. Of a console block, it copies only the commands, not their
# output. Blocks that consist of output have no button.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"
copybutton_selector = "div.notranslate:not(.highlight-text):not(.highlight-none) pre"

# Names in code blocks become links. The blocks of a page are one program.
codeautolink_concat_default = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def mark_code(app, what, name, obj, options, lines):
    """Turns the fenced code blocks of a docstring into reStructuredText code blocks.

    Otherwise, reStructuredText would take the fences for inline literals. Also removes the flags of
    doctests, which Sphinx would only remove when codeautolink has already read the block.
    """
    marked, code = [], False
    for line in lines:
        line = re.sub(r" *# doctest: .*", "", line)
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
