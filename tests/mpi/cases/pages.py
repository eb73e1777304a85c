"""Runs the Python blocks of pages: `pages.py FOLDER PAGE ...`, each page in its own subfolder.

If a `text` block follows a Python block, the first rank must have printed exactly that text.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

from tests.support.pages import ROOT, blocks

FIRST = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0"


def lines(text):
    return [line.rstrip() for line in text.strip("\n").splitlines()]


folder, *pages = map(Path, sys.argv[1:])
for page in pages:
    place = folder / page.relative_to(ROOT)
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    names = {"__name__": "__main__"}
    printed = None
    for block in blocks(page):
        if block.info == "text" and printed is not None and FIRST:
            assert lines(printed) == lines(block.text), (
                f"{page}, line {block.line}: the block prints\n{printed}"
            )
        printed = None
        if block.info == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile("\n" * block.line + block.text, page, "exec"), names)
            printed = output.getvalue()
