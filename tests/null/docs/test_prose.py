"""What can be counted of the documents: their length, and words that make them hard to read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
# Clipped or foreign-sounding words that plain technical English does without.
AVOID = re.compile(
    r"\b(beside|nobody|somebody|whoever|anew|unlike|meanwhile|is told|are told|is none of|who waits|hears?)\b"
)


def prose(page: Path) -> str:
    """The page without code, tables and comments."""
    return re.sub(r"```.*?```|^\|[^\n]*\|$|<!--.*?-->", "", page.read_text(), flags=re.S | re.M)


def test_words_to_avoid_are_rare():
    found = [f"{page.relative_to(ROOT)}: {hit}" for page in PAGES for hit in AVOID.findall(prose(page))]
    assert len(found) <= 5, found


@pytest.mark.parametrize(
    ("pages", "most"),
    [("README.md", 600), ("docs/tutorial/*.md", 800), ("docs/howto/*.md", 600), ("docs/explanation/*.md", 950)],
)
def test_pages_stay_short(pages, most):
    lengths = {page.name: len(prose(page).split()) for page in ROOT.glob(pages)}
    assert lengths and max(lengths.values()) <= most, lengths
