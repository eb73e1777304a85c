"""Converts printed tables to HTML tables, which notebooks show.

The same `rich` objects are printed in a terminal and shown in a notebook. We don't set any colours,
so that a table takes on those of the notebook's theme, whether it's light or dark.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from html import escape

from rich.console import Console, Group, RenderableType
from rich.style import Style, StyleType
from rich.table import Column, Table
from rich.text import Text

from jaxcross._html import preformatted

_PADDING = "padding:0.2em 0.6em"
# Notebooks bring their own styles for tables. JupyterLab, for example, aligns all cells to the
# right. Only a `style` attribute takes precedence over that.
_TABLE = (
    '<div style="overflow-x:auto">'
    '<table style="border-collapse:collapse;line-height:normal;margin:0">{}</table></div>'
)
_CAPTION = (
    f'<caption style="caption-side:top;text-align:left;color:inherit;{_PADDING}">{{}}</caption>'
)
_NOTES = f'<div style="white-space:pre-wrap;line-height:normal;{_PADDING}">{{}}</div>'
_LINE = "1px solid"  # without a colour, so the line has that of the text
_COLOURLESS = Style(dim=False)  # rich would turn `dim` into a colour


def as_html(group: Group) -> str:
    """Returns the HTML of a table, of its title and of the notes below it. Wide tables can scroll.

    If a group begins with a text and a table, the text becomes the table's caption. Anything that's
    neither a table nor a text is shown as printed. All text is escaped.
    """
    console = Console(
        file=io.StringIO(), color_system=None, force_terminal=False, force_jupyter=False
    )
    blocks = [*group.renderables]
    caption = ""
    match blocks:
        case [Text() as title, Table(), *_]:
            caption = _CAPTION.format(_inline(console, title))
            del blocks[0]
    html = []
    for block in blocks:
        if isinstance(block, Table):
            html.append(_TABLE.format(caption + _sections(console, block)))
            caption = ""
        elif isinstance(block, Text):
            html.append(_NOTES.format(_inline(console, block)) if block else "")
        else:
            html.append(preformatted(_printed(console, block)))
    return "".join(html)


def _sections(console: Console, table: Table) -> str:
    """Returns the header, the rows and the footer of a table."""
    columns = table.columns
    rows = [
        _row(console, columns, cells, style=row.style, line=row.end_section)
        for row, *cells in zip(table.rows, *(c.cells for c in columns), strict=True)
    ]
    html = f"<tbody>{''.join(rows)}</tbody>"
    if table.show_header:
        header = _row(console, columns, [c.header for c in columns], "th", line=True)
        html = f"<thead>{header}</thead>{html}"
    if table.show_footer:
        footer = _row(console, columns, [c.footer for c in columns], style=table.footer_style)
        html += f'<tfoot style="border-top:{_LINE}">{footer}</tfoot>'
    return html


def _row(
    console: Console,
    columns: Iterable[Column],
    cells: Iterable[RenderableType],
    tag: str = "td",
    *,
    style: StyleType | None = None,
    line: bool = False,
) -> str:
    html = []
    for column, cell in zip(columns, cells, strict=True):
        right = column.justify == "right"
        align = "right" if right else "left"
        # Numbers are never wrapped, and other texts keep their line breaks.
        space = "nowrap" if right or column.no_wrap else "pre-wrap"
        scope = ' scope="col"' * (tag == "th")
        html.append(
            f'<{tag}{scope} style="text-align:{align};white-space:{space};{_PADDING}">'
            f"{_inline(console, cell)}</{tag}>"
        )
    css = _css(console.get_style(style or "")), f"border-bottom:{_LINE}" * line
    return f'<tr style="{";".join(filter(None, css))}">{"".join(html)}</tr>'


def _inline(console: Console, cell: RenderableType) -> str:
    """Returns the HTML of a text, or of anything else that can be printed in a cell."""
    if isinstance(cell, str):
        cell = console.render_str(cell, highlight=False)
    if not isinstance(cell, Text):
        return preformatted(_printed(console, cell))
    html = []
    for text, style, _ in cell.render(console):
        css = _css(style or console.get_style(cell.style))
        html.append(f'<span style="{css}">{escape(text)}</span>' if css else escape(text))
    return "".join(html)


def _css(style: Style) -> str:
    return (style.without_color + _COLOURLESS).get_html_style().replace(" ", "")


def _printed(console: Console, block: RenderableType) -> str:
    with console.capture() as printed:
        console.print(block)
    return printed.get()
