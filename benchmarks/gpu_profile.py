"""What an accelerator did while some work ran, read from a JAX profile: kernels, copies, and the
time between them.

Nothing is inferred from host times: a profile without the accelerator's streams gives None. Host
spans are laid beside it through marks in the profile whose names tell the host's clock.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.profiler import ProfileData

from jaxcross.report.intervals import Interval, intersect, measure, subtract, union

NO_STREAMS = "the profile has no stream of an accelerator"
MARK = "jaxcross-clock "
TARGET_BUBBLES = 0.01


class Activity(NamedTuple):
    """Something on a stream of the device. `module` names the executable of a kernel where the
    profile tells it.
    """

    start_ns: float
    end_ns: float
    kind: Literal["kernel", "to_host", "to_device", "other"]
    module: str = ""


class Recording(NamedTuple):
    """One profile, on the host's `time.monotonic_ns`."""

    activities: tuple[Activity, ...]

    def times(self, *kinds: str) -> list[Interval]:
        return union(
            (round(a.start_ns), round(a.end_ns)) for a in self.activities if a.kind in kinds
        )

    @property
    def window(self) -> Interval:
        """From the first kernel to the end of the last."""
        kernels = self.times("kernel")
        return kernels[0][0], kernels[-1][1]


def record(work: Callable[[], Any]) -> Recording | None:
    """Runs `work` under the profiler. None where the profile holds no kernel of an accelerator.
    Waits.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # would slow down the threads that dispatch
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(3):  # the first ones are slow
                _mark()
            jax.block_until_ready(work())
            _mark()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return read(ProfileData.from_file(str(path)))


def read(data: Any) -> Recording | None:
    """A `ProfileData` -> what ran on the first accelerator that ran a kernel."""
    shift = clock_shift_ns(data)
    for plane in data.planes:
        if not plane.name.startswith("/device:"):
            continue
        found = [
            Activity(e.start_ns + shift, e.end_ns + shift, _kind(e.name), _module(e))
            for line in plane.lines
            if line.name.startswith(
                "Stream #"
            )  # other lines repeat these events by operation, module and step
            for e in line.events
        ]
        if any(a.kind == "kernel" for a in found):
            return Recording(tuple(sorted(found)))
    return None


def clock_shift_ns(data: Any) -> float:
    """What to add to a profile's times to get the host's clock.

    Raises:
        ValueError: There is no mark in it.
    """
    shifts = [
        int(event.name.removeprefix(MARK)) - event.start_ns
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith(MARK)
    ]
    if not shifts:
        raise ValueError(
            f"the profile has no mark `{MARK}...`, so its clock cannot be told. Make it with "
            "`record`."
        )
    return max(shifts)  # a mark begins after its name was made: the quickest one is the truest


def overlap(recording: Recording) -> dict[str, float]:
    """Seconds of copies, and how much of them passed while a kernel ran."""
    kernels = recording.times("kernel")
    result = {"kernels_s": measure(kernels) / 1e9}
    for kind in ("to_host", "to_device"):
        copies = recording.times(kind)
        result[f"{kind}_s"] = measure(copies) / 1e9
        result[f"{kind}_beside_kernels_s"] = measure(intersect(copies, kernels)) / 1e9
    return result


def idleness(recording: Recording, ready: Iterable[Interval] = ()) -> dict[str, Any]:
    """Shares of the time between the first kernel and the last in which no kernel ran.

    `idle_inside_segments_share` lies between two kernels of one executable, which a plain `jax.jit`
    has as well. `idle_between_ready_segments_share` is the rest of what passed while some segment
    was ready: a bubble. Kernels whose executable the profile does not name count as of different
    ones, so that it errs upwards. `met`: whether it is below its target, TARGET_BUBBLES; None where
    nothing is told to have been ready.

    Args:
        recording: The profile.
        ready: When some compute segment was ready or running, by the host's clock (an upper bound:
            the host learns of an end a little late).
    """
    window, ready = recording.window, list(ready)
    length = (window[1] - window[0]) or 1
    idle = subtract([window], recording.times("kernel"))
    inside = intersect(idle, _inside(recording))
    bubbles = measure(intersect(subtract(idle, inside), union(ready))) / length
    return {
        "window_s": length / 1e9,
        "idle_share": measure(idle) / length,
        "idle_inside_segments_share": measure(inside) / length,
        "idle_between_ready_segments_share": bubbles,
        "met": bubbles < TARGET_BUBBLES if ready else None,
    }


def _inside(recording: Recording) -> list[Interval]:
    kernels = [a for a in recording.activities if a.kind == "kernel"]
    return union(
        (round(a.start_ns), round(b.end_ns))
        for a, b in pairwise(kernels)
        if a.module and a.module == b.module
    )


def _mark() -> None:
    with jax.profiler.TraceAnnotation(f"{MARK}{time.monotonic_ns()}"):
        pass


def _kind(name: str) -> Literal["kernel", "to_host", "to_device", "other"]:
    lower = name.lower()
    if "memcpyd2h" in lower:
        return "to_host"
    if "memcpyh2d" in lower:
        return "to_device"
    return "other" if lower.startswith(("memcpy", "memset")) else "kernel"


def _module(event: Any) -> str:
    stats = {key: value for key, value in event.stats if key in ("hlo_module", "program_id")}
    return str(stats.get("hlo_module") or stats.get("program_id") or "")
