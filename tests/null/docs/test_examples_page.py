"""Tests that the page of examples contains every script of `examples/`, with its docstring.

A script whose docstring shows how to run it has a section of its own on the page, with the text and
the commands of its docstring, followed by its output or a picture. If a file is only imported by
such a script, the page names it.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "examples.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def parts(example: Path) -> tuple[list[str], str]:
    """Returns the paragraphs of an example's docstring, and its commands."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    paragraphs = docstring.split("\n\n")
    commands = [text for text in paragraphs if text.startswith("    ")]
    return [text for text in paragraphs if text not in commands], "\n".join(commands)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_example_is_on_the_page(example):
    paragraphs, commands = parts(example)
    if not commands:
        assert f"`examples/{example.name}`" in PAGE
        return
    assert example.name in SECTIONS, f"docs/examples.md needs a section `## {example.name}`"
    section = SECTIONS[example.name]
    missing = [text for text in paragraphs if words(text) not in words(section)]
    assert missing == [], "the section differs from the docstring"
    shown = re.search(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert words(shown[1].replace("$ ", "")) == words(commands)
    after = section[shown.end() :]
    assert "```text\n" in after or "```{image}" in after, "the section needs the example's output"


def test_page_has_no_section_of_a_missing_example():
    names = {example.name for example in EXAMPLES}
    assert {title for title in SECTIONS if title.endswith(".py")} <= names
