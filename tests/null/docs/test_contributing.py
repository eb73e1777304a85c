"""Tests that the folders and files named by CONTRIBUTING.md and its picture exist."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "jaxcross"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = {
    path.parent.name
    for path in PACKAGE.glob("*/__init__.py")
    if not path.parent.name.startswith("_")
}
# Matches `lower/case.py`, with or without its folder.
FILES = sorted(set(re.findall(r"[`(]((?:\.?[a-z_]+/)+[a-z_0-9]+(?:\.[a-z]+)?)[`)]", PAGE)))


def test_picture_shows_every_folder(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "pictures")
    assert set(runpy.run_path(str(ROOT / "docs/pictures/streets.py"))["FOLDERS"]) == FOLDERS


def test_table_lists_every_folder():
    assert set(re.findall(r"^\| `([a-z]+)/` \|", PAGE, flags=re.M)) == FOLDERS


def test_page_names_enough_files():
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES)
def test_named_file_exists(file):
    assert (ROOT / file).exists() or (PACKAGE / file).exists()


def docstring(folder):
    return ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text()))


def test_every_folder_says_what_its_files_hold():
    missing = [
        path.relative_to(PACKAGE)
        for folder in FOLDERS - {"commands", "data", "exchange", "tensor"}
        for path in (PACKAGE / folder).glob("*.py")
        if path.stem not in ("__init__", "__main__") and path.stem not in docstring(folder)
    ]
    assert missing == []
