"""The page of errors quotes messages verbatim, and messages link to sections that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
QUOTED = [
    row.split(" | ")[0].removeprefix("| ")
    for row in PAGE.splitlines()
    if re.match(r"\| (?!Words|---)", row)
]


@pytest.fixture(scope="module")
def texts():
    trees = (ast.parse(path.read_text()) for path in (ROOT / "jaxcross").rglob("*.py"))
    return [
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    ]


@pytest.mark.mostly_integration(
    "not installed here",
    "MPI does not allow calls from several threads",
    "want to run different things",
    "The state differs between ranks",
    "`nonfinite` was set after its first step",
)
@pytest.mark.parametrize("quoted", QUOTED)
def test_quoted_text_is_in_a_message(quoted, texts):
    assert any(isinstance(text, str) and quoted in text for text in texts)


def test_sections_that_messages_link_to_exist(texts):
    linked = {
        link
        for text in texts
        if isinstance(text, str)
        for link in re.findall(r"See (docs/[\w/-]+\.md#[\w-]+)\.", text)
    }
    assert len(linked) >= 10
    for link in linked:
        page, anchor = link.split("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
        assert anchor in anchors, link
