"""Text as a notebook shows it, for `_repr_html_`."""

from html import escape

PREFORMATTED = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">'
    "{code}</pre>"
)
"""The frame for text whose columns must stay aligned; `code` is HTML."""


def preformatted(text: str) -> str:
    """Returns plain text as HTML that keeps its lines and spaces."""
    return PREFORMATTED.format(code=escape(text))
