"""Tests what a notebook shows for a printed table."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxcross.report.html_table import as_html


@dataclass
class Element:
    tag: str
    style: str = ""
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def all(self, tag: str) -> list["Element"]:
        return [
            found
            for child in self.children
            for found in ([child] if child.tag == tag else []) + child.all(tag)
        ]

    def rows(self) -> list[list[str]]:
        return [[cell.text for cell in row.children] for row in self.all("tr")]


class Page(HTMLParser):
    """Parses HTML into a tree, and checks that every tag is closed in the right place.

    The `text` of an element includes that of the elements inside it.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.root = Element("page")
        self._open = [self.root]
        self.feed(html)
        self.close()
        assert self._open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs).get("style") or "")
        self._open[-1].children.append(element)
        self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data


def page(*blocks: RenderableType) -> Element:
    return Page(as_html(Group(*blocks))).root


def trials() -> Table:
    table = Table(show_footer=True)
    table.add_column("trial", footer="all 2")
    table.add_column("error", footer="0.30", justify="right")
    table.add_row(Text("a"), "0.1", style="bold", end_section=True)
    table.add_row(Text("b"), "0.2")
    return table


def test_a_table_has_a_title_a_header_rows_a_footer_and_notes():
    shown = page(Text("two trials"), trials(), Text("error: of the last step\n  in per cent"))
    (table,) = shown.all("table")
    (caption,) = table.all("caption")
    assert caption.text == "two trials"
    (head,), (body,), (foot,) = (table.all(tag) for tag in ("thead", "tbody", "tfoot"))
    assert head.rows() == [["trial", "error"]]
    assert [cell.tag for cell in head.all("tr")[0].children] == ["th", "th"]
    assert body.rows() == [["a", "0.1"], ["b", "0.2"]]
    assert foot.rows() == [["all 2", "0.30"]]
    notes = shown.children[-1]
    assert (notes.tag, notes.text) == ("div", "error: of the last step\n  in per cent")
    assert "white-space:pre-wrap" in notes.style


def test_numbers_are_aligned_to_the_right_and_not_wrapped():
    for row in page(trials()).all("tr"):
        text, number = row.children
        assert "text-align:left;white-space:pre-wrap" in text.style
        assert "text-align:right;white-space:nowrap" in number.style


def test_styles_and_sections_are_kept():
    shown = page(Text("title", style="bold"), trials(), Text.from_markup("a [italic]b[/italic] c"))
    (caption,) = shown.all("caption")
    assert [(part.text, part.style) for part in caption.children] == [("title", "font-weight:bold")]
    (body,) = shown.all("tbody")
    first, second = body.all("tr")
    assert first.style == "font-weight:bold;border-bottom:1px solid"
    assert second.style == ""
    assert shown.all("tfoot")[0].all("tr")[0].style == "font-weight:bold"
    notes = shown.children[-1]
    assert notes.text == "a b c"
    assert [(part.text, part.style) for part in notes.children] == [("b", "font-style:italic")]


def test_no_colours_are_set_so_that_the_theme_of_a_notebook_applies():
    table = Table("job", header_style="red on blue")
    table.add_row(Text("failed", style="bold red"), style="on yellow")
    table.add_row(Text("left", style="dim"))
    html = as_html(Group(Text("title", style="green"), table, Text("notes", style="reverse")))
    assert "#" not in html and "background" not in html
    assert html.replace("color:inherit", "").count("color") == 0
    assert '<span style="font-weight:bold">failed</span>' in html


def test_text_is_escaped_and_markup_is_only_read_where_print_reads_it():
    table = Table()
    table.add_column(Text("<i>[red]"))
    table.add_row(Text('<script>"&[bold]x'))
    table.add_row("[bold]<b>x[/bold]")
    html = as_html(Group(Text("<b>[red]"), table, Text("</div>[red]")))
    assert all(tag not in html for tag in ("<i>", "<b>", "<script>", "</div>["))
    shown = Page(html).root
    assert shown.all("caption")[0].text == "<b>[red]"
    assert shown.all("table")[0].rows() == [["<i>[red]"], ['<script>"&[bold]x'], ["<b>x"]]
    assert shown.children[-1].text == "</div>[red]"


def test_tables_after_the_first_have_no_title():
    shown = page(Text("title"), trials(), Text("notes"), trials())
    assert [len(table.all("caption")) for table in shown.all("table")] == [1, 0]
    assert "notes" in [each.text for each in shown.children]


def test_a_table_without_header_footer_rows_or_notes_has_none():
    shown = page(Table("job", show_header=False), Text(""))
    assert [each.tag for each in shown.all("table")[0].children] == ["tbody"]
    assert len(shown.children) == 1
    assert page(Text("only a text")).text == "only a text"


def test_other_renderables_are_shown_as_printed():
    table = Table("job")
    table.add_row(Panel("<inside>", expand=False))
    shown = page(table, Panel("<below>", expand=False))
    inside, below = shown.all("pre")
    assert "│ <inside> │\n" in inside.text
    assert "│ <below> │\n" in below.text
