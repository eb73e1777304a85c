"""Tests the README as a package index shows it: no dead links, and nothing but links is lost."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")


def test_the_wheels_readme_has_no_relative_link():
    line = [sys.executable, "-m", "hatch_fancy_pypi_readme", str(ROOT / "pyproject.toml")]
    shown = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    source = (ROOT / "README.md").read_text()
    assert any(not target.startswith("http") for _, target in LINK.findall(source))
    assert [
        target
        for _, target in LINK.findall(shown)
        if not target.startswith(("http://", "https://"))
    ] == []
    assert "![" not in shown
    words = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", source)
    assert LINK.sub(r"\1", words).split() == LINK.sub(r"\1", shown).split()
