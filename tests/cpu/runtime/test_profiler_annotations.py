"""A trace by `jax.profiler` has the same segments as a run's own trace, at the same times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

import jaxcross
from jaxcross.report.chrome import trace_events

DISPATCH = ", dispatch"


class Annotation(NamedTuple):
    name: str
    step: int
    start_ns: float
    end_ns: float


def annotations(folder: Path) -> Iterator[list[Annotation]]:
    """Yields our annotations in a profile, one list for each thread."""
    (path,) = folder.rglob("*.xplane.pb")
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            found = []
            for event in line.events:
                stats = dict(event.stats)
                if "segment" in stats:
                    end_ns = event.start_ns + event.duration_ns
                    found.append(Annotation(event.name, stats["step"], event.start_ns, end_ns))
            if found:
                yield sorted(found, key=lambda each: each.start_ns)


@pytest.mark.integration
def test_both_traces_have_the_same_segments_at_the_same_times(tmp_path: Path) -> None:
    """An annotation lies within its span, if the clocks' unknown difference is taken off both.

    A span's times are taken just before and after its annotation's, so if spans and annotations
    belong together, there's a difference for which this is true for all of them.
    """
    jaxcross.initialize()

    @jaxcross.crossover(axes="batch", cut=2)
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.lax.pmean(jnp.tanh(w @ x), "batch"), {"loss": jnp.mean(w)}

    ones = jnp.ones((8, 8))
    with jax.profiler.trace(str(tmp_path)):
        report = jaxcross.run(
            [jaxcross.Job(name, step, ones, [ones] * 3) for name in "ab"], progress=False
        )
    ours: dict[str, list[Annotation]] = {"compute": [], "collective": []}
    for event in trace_events(report)["traceEvents"]:
        if event.get("cat") in ours:
            start_ns = event["ts"] * 1e3
            end_ns = start_ns + event["dur"] * 1e3
            args = event["args"]
            ours[event["cat"]].append(Annotation(event["name"], args["step"], start_ns, end_ns))
    for spans in ours.values():
        spans.sort(key=lambda each: each.start_ns)
    assert {name for name, *_ in ours["compute"]} >= {"a compute 0", "b compute 0"}

    threads = [*annotations(tmp_path)]
    (dispatches,) = (found for found in threads if found[0].name.endswith(DISPATCH))
    (exchanges,) = (found for found in threads if " exchange " in found[0].name)
    (waits,) = (found for found in threads if found is not dispatches and found is not exchanges)

    def names(found: list[Annotation]) -> list[tuple[str, int]]:
        return [(each.name.removesuffix(DISPATCH), each.step) for each in found]

    assert names(exchanges) == names(ours["collective"])
    assert names(waits) == names(dispatches) == names(ours["compute"])
    for dispatch, wait in zip(dispatches, waits, strict=True):
        assert dispatch.end_ns <= wait.start_ns
    pairs = [
        *zip(ours["compute"], waits, strict=True),
        *zip(ours["collective"], exchanges, strict=True),
    ]
    least = max(span.start_ns - found.start_ns for span, found in pairs)
    most = min(span.end_ns - found.end_ns for span, found in pairs)
    assert least <= most
