"""Text as a notebook shows it, from `_repr_html_`."""

from html import escape

PREFORMATTED = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">'
    "{code}</pre>"
)
"""Frame of text whose columns must stay below each other; `code` is HTML."""


def preformatted(text: str) -> str:
    """Returns plain text as HTML, with its lines and spaces."""
    return PREFORMATTED.format(code=escape(text))
