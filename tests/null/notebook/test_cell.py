"""Tests what a notebook says about a cell: whose output it shows, and how it reports a failure."""

import pytest

from jaxcross.notebook.cell import Outcome, named
from jaxcross.notebook.cell_rank import executed

ERROR = {"error": "ValueError", "traceback": "line 2\nValueError: x"}
OTHER = {"error": "KeyError", "traceback": "line 3\nKeyError: y"}


def outcome(size=2, gone=(), written=(), **returned):
    made = Outcome(size)
    made.returned.update({int(rank[1:]): error for rank, error in returned.items()})
    made.gone.extend(gone)
    for rank, stream, text in written:
        made.written[rank, stream].append(text)
    return made


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([0, 1, 2, 3], "all 4 ranks"),
    ],
)
def test_ranks_are_named(ranks, text):
    assert named(ranks, 4) == text


def test_a_single_rank_is_not_all_ranks():
    assert named([0], 1) == "rank 0"


def test_output_that_equals_rank_0s_is_left_out():
    same = [(rank, "out", text) for rank in range(3) for text in ("a\n", "b\n")]
    assert list(outcome(3, written=same).other_output()) == []


def test_output_is_compared_as_a_whole_and_prefixed():
    written = [(0, "out", "a\nb\n"), (1, "out", "a\n"), (1, "out", "c"), (2, "out", "a\nb\n")]
    written += [(2, "err", "warning\n")]
    assert list(outcome(3, written=written).other_output()) == [
        ("out", "[rank 1] a\n[rank 1] c\n"),
        ("err", "[rank 2] warning\n"),
    ]


def test_output_after_an_incomplete_line_begins_on_a_line_of_its_own():
    written = [(0, "out", "a"), (1, "out", "b"), (2, "out", "c\n"), (1, "err", "d")]
    assert list(outcome(3, written=written).other_output()) == [
        ("out", "\n[rank 1] b\n"),
        ("out", "[rank 2] c\n"),
        ("err", "[rank 1] d\n"),
    ]


def test_only_the_last_state_of_a_progress_bar_is_shown():
    written = [(1, "err", "\r10%"), (1, "err", "\r20%\nend\r\n\nlast\r")]
    assert list(outcome(written=written).other_output()) == [
        ("err", "[rank 1] 20%\n[rank 1] end\n[rank 1] \n[rank 1] last\n")
    ]


@pytest.mark.parametrize("cell", ["class A:\n    x: int", "class A:\n    x: int\nA"])
def test_annotations_in_a_cell_are_objects(cell):
    namespace = {}
    assert executed({"cell": cell, "name": "<In[1]>"}, namespace, lambda _: None) is None
    assert namespace["A"].__annotations__ == {"x": int}


def test_a_cell_that_succeeds_has_no_summary():
    made = outcome(r0=None, r1=None)
    assert (made.summary(), made.waiting, made.failed, made.tracebacks()) == ("", [], [], [])


def test_equal_tracebacks_are_shown_once():
    made = outcome(3, r2=OTHER, r0=ERROR, r1=ERROR)
    assert made.tracebacks() == [
        "On ranks 0 and 1:\nline 2\nValueError: x\n",
        "On rank 2:\nline 3\nKeyError: y\n",
    ]
    assert made.summary() == "the cell failed with KeyError, ValueError on all 3 ranks."


def test_ranks_without_the_error_are_named():
    assert outcome(r0=None, r1=ERROR).summary() == (
        "the cell failed with ValueError on rank 1, but not on rank 0, so values may now differ "
        "between ranks."
    )


def test_ranks_that_have_not_returned_are_named():
    made = outcome(3, r1=ERROR)
    assert made.waiting == [0, 2]
    assert made.summary() == (
        "the cell failed with ValueError on rank 1, and 5 s later, ranks 0 and 2 have not "
        "returned, probably because of an exchange that needs all ranks."
    )


def test_a_rank_that_is_gone_comes_first():
    assert outcome(r0=ERROR, gone=[1]).summary() == (
        "rank 1 has ended during the cell, e.g. by `os._exit`, a crash, `kill` or an abort."
    )
