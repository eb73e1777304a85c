"""Formats text for notebooks, as used by `_repr_html_` methods."""

from html import escape

PREFORMATTED = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">'
    "{code}</pre>"
)
"""A template for text whose columns should stay aligned. Fill in HTML as `code`."""


def preformatted(text: str) -> str:
    """Converts plain text to HTML that preserves line breaks and spaces."""
    return PREFORMATTED.format(code=escape(text))
