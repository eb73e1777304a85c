"""The page about notebooks, and the tutorial as a notebook: cells run and print what is shown."""

import pytest

pytest.importorskip("IPython")

from tests.support import notebooks
from tests.support.pages import ROOT, blocks

TUTORIAL = ("your-step", "several-jobs", "sweep")


@pytest.fixture
def notebook(monkeypatch, tmp_path, quick_compiler):
    for name, value in quick_compiler.items():
        monkeypatch.setenv(name, value)
    with notebooks.opened(monkeypatch, tmp_path) as opened:
        yield opened


def lines(text):
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.mark.integration
def test_the_page_about_notebooks(notebook):
    ran = None
    displayed = []
    for block in blocks(ROOT / "docs" / "howto" / "notebook.md"):
        if block.info == "ipython3":
            ran = notebook.run(block.text)
            displayed += ran.displayed
        elif block.text.startswith("CellError: "):
            assert lines(f"CellError: {ran.error}") == lines(block.text)
            ran = None
        else:
            assert lines(ran.check().out) == lines(block.text)
    assert ran.error is None
    assert ["text/html" in data for data in displayed] == [True]


@pytest.mark.integration
@pytest.mark.parametrize("page", TUTORIAL)
def test_the_tutorial_as_a_notebook(notebook, page):
    ran = None
    for block in blocks(ROOT / "docs" / "tutorial" / f"{page}.md"):
        if block.info == "python":
            ran = notebook.on_ranks(block.text).check()
        elif block.info == "text" and ran is not None:
            own = [line for line in lines(ran.out) if not line.startswith("[rank 1] ")]
            assert own == lines(block.text), f"{page}, line {block.line}"
            ran = None
    notebook.run("%ranks_stop").check()
