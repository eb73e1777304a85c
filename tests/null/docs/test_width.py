"""Tests that no block of code or output on a page is wider than the page.

`docs/_static/site.css` makes room for lines of 120 characters in a window of 1280 pixels, because a
comparison of two runs, which pages quote literally, may be that wide. In a wider block, readers
would have to scroll sideways to see the end of each line.
"""

import pytest

from tests.support.pages import PAGES, blocks

WIDTH = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_fit_the_page(page):
    wide = [
        f"line {block.line + n}: {len(line)} characters"
        for block in blocks(page)
        if not block.info.startswith("{")  # directives, such as images and lists of pages
        for n, line in enumerate(block.text.splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert wide == []
