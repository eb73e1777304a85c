"""Reads from a JAX profile what an accelerator did: kernels, copies, and the time between them.

Everything comes from the profile, and nothing is inferred from the host's timing. If the profile
has no streams of an accelerator, the result is None. So that the host's spans can be aligned with
the profile, `record` adds marks to it whose names contain the time of the host's clock.
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

from jaxcross.report.intervals import Interval, intersect, measure, merge_intervals, subtract

NO_STREAMS = "the profile has no stream of an accelerator"
MARK = "jaxcross-clock "
TARGET_BUBBLES = 0.01


class Activity(NamedTuple):
    """An activity on one of the device's streams.

    `module` names a kernel's executable, if the profile contains it.
    """

    start_ns: float
    end_ns: float
    kind: Literal["kernel", "to_host", "to_device", "other"]
    module: str = ""


class Recording(NamedTuple):
    """One profile, on the clock of the host's `time.monotonic_ns`."""

    activities: tuple[Activity, ...]

    def times(self, *kinds: str) -> list[Interval]:
        return merge_intervals(
            (round(a.start_ns), round(a.end_ns)) for a in self.activities if a.kind in kinds
        )

    @property
    def window(self) -> Interval:
        """From the start of the first kernel to the end of the last one."""
        kernels = self.times("kernel")
        return kernels[0][0], kernels[-1][1]


def record(work: Callable[[], Any]) -> Recording | None:
    """Runs `work` under the profiler, and waits for it.

    Returns None if the profile has no accelerator kernels.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the tracer would slow down the dispatching threads
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(3):  # the first marks are slow
                _mark()
            jax.block_until_ready(work())
            _mark()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return read(ProfileData.from_file(str(path)))


def read(data: Any) -> Recording | None:
    """Returns the activities on the first accelerator in a `ProfileData` that ran a kernel."""
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
    """Returns the difference to add to a profile's times to get the host's clock.

    Raises:
        ValueError: The profile has no mark.
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
            f"the profile has no mark `{MARK}...`, so its clock is unknown. Make it with `record`."
        )
    return max(shifts)  # a mark starts after its name was made, so the quickest is the best


def overlap(recording: Recording) -> dict[str, float]:
    """Returns the seconds of copies, and how much of them overlapped with a kernel."""
    kernels = recording.times("kernel")
    result = {"kernels_s": measure(kernels) / 1e9}
    for kind in ("to_host", "to_device"):
        copies = recording.times(kind)
        result[f"{kind}_s"] = measure(copies) / 1e9
        result[f"{kind}_beside_kernels_s"] = measure(intersect(copies, kernels)) / 1e9
    return result


def idleness(recording: Recording, ready: Iterable[Interval] = ()) -> dict[str, Any]:
    """Returns how much of the time between the first and the last kernel no kernel ran.

    `idle_inside_segments_share` is between two kernels of the same executable, so plain `jax.jit`
    has it as well. `idle_between_ready_segments_share` is the rest of the idle time during which
    some segment was ready: a bubble. If the profile doesn't name the executables of kernels, they
    count as different, so this share is an upper bound. `met` says whether the share is below its
    target, TARGET_BUBBLES, or is None if `ready` is empty.

    Args:
        recording: The profile.
        ready: When some compute segment was ready or running, by the host's clock. This is an upper
            bound, because the host learns of a segment's end slightly late.
    """
    window, ready = recording.window, list(ready)
    length = (window[1] - window[0]) or 1
    idle = subtract([window], recording.times("kernel"))
    inside = intersect(idle, _inside(recording))
    bubbles = measure(intersect(subtract(idle, inside), merge_intervals(ready))) / length
    return {
        "window_s": length / 1e9,
        "idle_share": measure(idle) / length,
        "idle_inside_segments_share": measure(inside) / length,
        "idle_between_ready_segments_share": bubbles,
        "met": bubbles < TARGET_BUBBLES if ready else None,
    }


def _inside(recording: Recording) -> list[Interval]:
    kernels = [a for a in recording.activities if a.kind == "kernel"]
    return merge_intervals(
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
