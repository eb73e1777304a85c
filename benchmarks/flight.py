"""What does the flight recorder cost per event, and the watchdog with heartbeat per second?

    mpirun -n 2 python benchmarks/flight.py [--json FILE] [--smoke]

An event is one line in a rank's event file, written when an activity starts or ends. We time many
short runs. The best of them shows what an event costs by itself, and the median shows what it costs
on this machine as it is right now. For the thread of the watchdog and the heartbeat, we report the
CPU time that the kernel has counted.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from workloads import parser, spread, write_json

import jaxcross
from jaxcross.health.activity import Activity
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.process import this_process


def per_event_us(flight: FlightRecorder, runs: int, pairs: int = 200) -> list[float]:
    """Returns the microseconds per event in each of several runs."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        for step in range(pairs):
            flight.end(flight.begin(Activity.now("compute", job="a", step=step, segment=3)))
        found.append((time.perf_counter() - start) / (2 * pairs) * 1e6)
    return found


def cpu_s(name: str) -> float:
    """Returns the core seconds that a thread of this process has used."""
    (thread,) = (t for t in threading.enumerate() if t.name == name)
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def rate_of(cpu: Callable[[], float], seconds: float) -> float:
    before, start = cpu(), time.perf_counter()
    time.sleep(seconds)
    return (cpu() - before) / (time.perf_counter() - start)


def main() -> None:
    options = parser(__doc__).parse_args()
    world = jaxcross.initialize()
    runs, seconds = (20, 1.5) if options.smoke else (2000, 30.0)
    thread_share = rate_of(lambda: cpu_s("jaxcross-watchdog"), seconds) if world.size > 1 else 0.0
    if world.rank != 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        idle, recording = FlightRecorder([this_process()], 0), FlightRecorder([this_process()], 0)
        recording.record_to(folder)
        without, written = per_event_us(idle, runs), per_event_us(recording, runs)
    for name, raw in (("without a file", without), ("with a file", written)):
        print(
            f"{name}: {min(raw):.1f} us an event at best, {spread(raw)['median']:.1f} in the median"
        )
    print(f"watchdog's thread, {world.size} ranks: {thread_share * 1e6:.0f} us of a core a second")
    facts = {"without_file_us": spread(without), "with_file_us": spread(written)}
    for fact in facts.values():
        del fact["raw"]
    result = {**facts, "ranks": world.size, "watchdog_cpu_s_per_s": thread_share}
    write_json(options.json, __doc__, result)


if __name__ == "__main__":
    main()
