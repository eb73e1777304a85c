"""The Python blocks of the README and the docs run, and print what the pages show.

We run the blocks of a page in order, on one rank or on the number of ranks that the page requests
(`<!-- ranks: 2 -->`). Starting processes takes long, so all pages with the same number of ranks run
one after the other in the same processes. Each page has its own namespace and its own folder.
"""

import re

import pytest

from tests.support.pages import PAGES, blocks

# `PLAIN` are the pages that the plain test run includes. `LONG` are those whose four ranks compile
# for a minute; instead of these, the integration tests run examples/gpt.py on two ranks.
PLAIN, LONG = {"README.md", "limits-steps.md", "your-step.md"}, {"tensor-parallelism.md"}


def code_of(page):
    return "\n".join(block.text for block in blocks(page) if block.info == "python")


def uses_jax_too_early(code):
    """Whether a page uses JAX before `initialize`.

    If pages share a process, only the first page would fail, so this checks the text.
    """
    before, start, _ = code.partition("world = jaxcross.initialize(")
    if not start:
        return "initialize(" in code
    return any(
        "jax" in line for line in before.splitlines() if not line.startswith(("import ", "from "))
    )


def together():
    """Pages with code, by tier and number of ranks. Pages that start no world come first."""
    marks = {
        "plain": (),
        "integration": pytest.mark.integration,
        "exhaustive": pytest.mark.exhaustive,
    }
    groups = {}
    for page in sorted(filter(code_of, PAGES), key=lambda page: "initialize(" in code_of(page)):
        tier = (
            "plain" if page.name in PLAIN else "exhaustive" if page.name in LONG else "integration"
        )
        ranks = re.search(r"<!-- ranks: (\d+) -->", page.read_text())
        groups.setdefault((tier, int(ranks[1]) if ranks else 1), []).append(page)
    return [
        pytest.param(n, pages, marks=marks[tier], id=f"{tier}-{n}")
        for (tier, n), pages in groups.items()
    ]


@pytest.mark.parametrize(("ranks", "pages"), together())
def test_page_code_runs_and_prints_what_it_shows(ranks, pages, mpirun, tmp_path, quick_compiler):
    assert [page.name for page in pages if uses_jax_too_early(code_of(page))] == []
    mpirun(ranks, "pages.py", str(tmp_path), *map(str, pages), env=quick_compiler).check()
