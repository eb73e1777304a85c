"""Formats text for notebooks, as used by `_repr_html_` methods."""

from html import escape


def preformatted(text: str) -> str:
    """Converts plain text to HTML that preserves line breaks, spaces and aligned columns."""
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace"
    return f'<pre style="{style}">{escape(text)}</pre>'
