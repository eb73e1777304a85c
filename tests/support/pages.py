"""The README, the changelog and the docs, and their fenced code blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCED = re.compile(r"^(`{3,})([^`\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language and options, the line number of its fence, and its text."""

    info: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, f"{page}: a fence isn't closed"
    return [
        Block(found[2].strip(), text.count("\n", 0, found.start(3)), found[3])
        for found in FENCED.finditer(text)
    ]
