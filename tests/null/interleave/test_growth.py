"""Tests that the interleaver's cost per step grows no faster than the number of segments.

We count calls rather than measure time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxcross.interleave.local_state import LocalCall
from jaxcross.interleave.policy import RoundRobin
from jaxcross.interleave.simulator import Call, Simulation
from jaxcross.interleave.step_graph import StepGraph
from tests.support.calls import count_calls


def chain(segments: int) -> StepGraph:
    """Returns a step in which every segment needs the one before it."""
    return StepGraph(
        kinds=tuple("collective" if n % 2 else "compute" for n in range(segments)),
        needs=tuple((n - 1,) if n else () for n in range(segments)),
        after_commit=frozenset({segments - 1}),
        signature=1,
    )


def backward_pass(segments: int) -> StepGraph:
    """Returns a chain of compute segments, each followed by its exchange, and a last segment that
    needs all others.
    """
    last = segments - 1
    return StepGraph(
        kinds=(*("collective" if n % 2 else "compute" for n in range(last)), "compute"),
        needs=(
            *((n - 1,) if n % 2 else ((n - 2,) if n else ()) for n in range(last)),
            tuple(range(last)),
        ),
        after_commit=frozenset({last}),
        signature=1,
    )


def calls_a_segment(graph: StepGraph, jobs: int, steps: int) -> float:
    """Returns the number of function calls and generator iterations that a segment costs."""
    segments = len(graph.kinds)

    def script() -> Iterator[Any]:
        for _ in range(steps):
            yield Call(graph, (1e-3,) * segments)

    simulation = Simulation(
        [[script() for _ in range(jobs)] for _ in range(2)],
        policy=RoundRobin(),
        check=False,
        exchange_s=lambda *slot: 1e-3,
    )
    return count_calls(lambda: simulation.run(10**9)) / (segments * jobs * steps)


@pytest.mark.integration
@pytest.mark.parametrize("graph", [chain, backward_pass])
def test_a_segment_costs_the_same_in_a_long_step(graph: Any) -> None:
    short, long = (calls_a_segment(graph(n), jobs=2, steps=2) for n in (51, 801))
    assert long <= 1.1 * short


@pytest.mark.integration
@pytest.mark.parametrize(
    ("graph", "steps", "most"), [(chain(31), 3, 1.5), (backward_pass(3), 6, 1.2)]
)
def test_segment_cost_is_similar_beside_many_jobs(
    graph: StepGraph, steps: int, most: float
) -> None:
    few, many = (calls_a_segment(graph, jobs=k, steps=steps) for k in (4, 64))
    assert many <= most * few


def test_segments_behind_the_commit_let_others_pass() -> None:
    call = LocalCall(
        1,
        StepGraph(
            kinds=("compute", "compute", "compute", "collective"),
            needs=((), (0,), (0,), (2,)),
            after_commit=frozenset({1}),
        ),
    )
    order = []
    while (segment := call.ready()) is not None:
        call.issue(segment)
        order.append(segment)
    assert order == [0, 2]
    call.exchange_done(3, finite=True)
    assert call.ready() is None
    call.committed = True
    assert call.ready() == 1
