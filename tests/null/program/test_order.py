"""Tests the order of a program's segments, and what they may overwrite. Needs no arrays."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxcross.program.ir import Aval, Exchange, Kind, Program, Segment

VECTOR = Aval(shape=(4,), dtype="float32")
STATE, BATCH = 0, 1
"""Values that the programs get; they may overwrite the state."""


def program(*segments: tuple[Kind, tuple[int, ...]]) -> Program:
    """Makes a program from a kind and the values to read for each segment.

    Values 0 and 1 are the inputs, segment n makes value n + 2, and the program returns the value of
    its last segment.
    """
    last_reader = {v: n for n, (_, inputs) in enumerate(segments) for v in inputs}
    total = Exchange(op="psum", axes=("batch",), dtype="float32", shape=(4,))
    return Program(
        name="step",
        axes=(("batch", 2),),
        values=(VECTOR,) * (len(segments) + 2),
        inputs=(STATE, BATCH),
        outputs=(len(segments) + 1,),
        donated=frozenset({STATE}),
        segments=tuple(
            Segment(
                index=n,
                kind=kind,
                inputs=inputs,
                outputs=(n + 2,),
                last_uses=tuple(v for v in inputs if last_reader[v] == n),
                exchanges=(total,) if kind == "collective" else (),
            )
            for n, (kind, inputs) in enumerate(segments)
        ),
    )


USUAL = program(("compute", (STATE, BATCH)), ("collective", (2,)), ("compute", (STATE, 3)))
DELAYED = program(("compute", (STATE, BATCH)), ("collective", (BATCH,)), ("compute", (STATE, 3)))


def test_state_is_donated_only_after_the_last_exchange():
    assert USUAL.order.donates == (set(), set(), {STATE, 3})
    assert USUAL.order.after_commit == {2} and USUAL.order.after == (0b000, 0b001, 0b011)
    early = program(("compute", (STATE, BATCH)), ("collective", (2,)), ("compute", (3,)))
    assert early.order.donates[0] == frozenset(), (
        "state that dies before the exchange survives a failure"
    )


def test_an_update_waits_for_all_exchanges():
    """Including an exchange whose result the update doesn't read."""
    unread = program(("collective", (BATCH,)), ("compute", (STATE,)))
    assert unread.order.needs == ((), ()) and unread.order.after == (0, 0b1)


def test_an_update_waits_for_what_reads_the_state_that_it_overwrites():
    assert DELAYED.order.needs == ((), (), (0, 1))
    assert DELAYED.order.donates[2] == {STATE, 3}
    before = program(
        ("compute", (STATE,)), ("compute", (STATE,)), ("collective", (3,)), ("compute", (2, 4))
    )
    assert before.order.needs[1] == (), "before the commit nothing is overwritten"
    kept = replace(DELAYED, donated=frozenset())
    assert kept.order.needs == ((), (), (1,)), "nothing is overwritten"
    assert kept.order.donates[2] == {3}


@pytest.mark.parametrize(
    ("segments", "carried"),
    [
        ([("compute", (STATE, BATCH)), ("collective", (BATCH,)), ("compute", (STATE, 3))], {1}),
        (
            [
                ("collective", (STATE,)),
                ("compute", (BATCH,)),
                ("collective", (3,)),
                ("compute", (2, 4)),
            ],
            {0},
        ),
        ([("compute", (STATE, BATCH)), ("collective", (2,)), ("compute", (STATE, 3))], set()),
        ([("collective", (STATE,)), ("compute", (2,))], set()),
        # The first exchange isn't carried, and all computation comes after the commit.
        (
            [
                ("compute", (BATCH,)),
                ("collective", (2,)),
                ("collective", (STATE,)),
                ("compute", (3, 4)),
            ],
            set(),
        ),
        ([("collective", (STATE,)), ("compute", (BATCH,))], set()),
    ],
)
def test_exchanges_of_what_the_step_got_are_carried(segments, carried):
    made = program(*segments)
    assert made.order.carried == carried
    assert not replace(made, axes=(("batch", 1),)).order.carried, "there is no other rank"


def test_what_waits_for_an_exchange_without_peers_is_not_carried():
    """A plain loop runs such an exchange along with its computation."""
    made = program(
        ("compute", (BATCH,)), ("collective", (STATE,)), ("collective", (3,)), ("compute", (2, 4))
    )
    assert made.order.carried == {1, 2}
    work, first, *others = made.segments
    first = replace(first, exchanges=(replace(first.exchanges[0], axes=("one",)),))
    behind = replace(made, axes=(("batch", 2), ("one", 1)), segments=(work, first, *others))
    assert not behind.order.carried


def test_segments_that_cannot_run_have_needs_but_no_order():
    broken = program(("compute", (3,)), ("compute", (2,)), ("collective", (3,)))
    shifted = replace(USUAL, segments=(*USUAL.segments[:2], replace(USUAL.segments[2], index=3)))
    assert broken.order.needs == ((1,), (0,), (1,))
    for each in (broken, shifted):
        assert each.order.after == each.order.donates == () and not each.order.carried


@st.composite
def programs(draw: st.DrawFn) -> Program:
    segments: list[tuple[Kind, tuple[int, ...]]] = []
    for n in range(draw(st.integers(1, 6))):
        kind: Kind = draw(st.sampled_from(("compute", "collective")))
        known = st.integers(0, n + 1)
        segments.append((kind, tuple(sorted(draw(st.sets(known, min_size=1, max_size=3))))))
    return program(*segments)


@given(programs(), st.randoms(use_true_random=False))
def test_in_no_order_is_a_value_read_that_was_overwritten(made, random):
    """Tries a random order among those that `needs` and the commit allow."""
    order, overwritten = made.order, set()
    to_run = list(made.segments)
    while to_run:
        ran = {s.index for s in made.segments} - {s.index for s in to_run}
        committed = ran.issuperset(s.index for s in made.collectives)
        segment = random.choice(
            [
                s
                for s in to_run
                if ran.issuperset(order.needs[s.index])
                and (committed or s.index not in order.after_commit)
            ]
        )
        assert overwritten.isdisjoint(segment.inputs)
        donated = order.donates[segment.index]
        assert donated.isdisjoint({STATE, BATCH} if made.collectives and not committed else {BATCH})
        overwritten |= donated
        to_run.remove(segment)


@given(programs())
def test_what_ran_before_follows_from_needs_and_the_commit(made):
    order = made.order
    for n in range(len(made.segments)):
        first = {*order.needs[n], *(s.index for s in made.collectives if n in order.after_commit)}
        before = first.union(
            *({m for m in range(each) if order.after[each] >> m & 1} for each in first)
        )
        assert {m for m in range(n) if order.after[n] >> m & 1} == before
