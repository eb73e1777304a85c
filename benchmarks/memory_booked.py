"""The part of memory.py that compares what jobs book with what they need, on two ranks.

What jobs "book" is the memory that `Runner(memory=...)` reserves for them before their first steps.
What they "need" is the peak of the resident set during later steps of the same jobs, which have
already been compiled, minus what the process held before the jobs started. On an accelerator, we
use the device's own count instead. We report the rank that needs most.

If you run this file as a script, it acts as one rank.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import gpu_ranks
import workloads
from ranks import answer
from rivals.serving import status_bytes

RANKS = 2
STEPS = 5
CUTS = ("whole", 4)
WIDTHS = {"mlp": 4096, "mlp_2048": 2048}  # the wider one's state and gradients take 400 MB
WORKLOADS = (*WIDTHS, "resnet50", "gpt")


def measure(
    workload: str, jobs: int, cut: str | int, *, smoke: bool = False, stand_in: bool | None = None
) -> dict[str, Any]:
    """Starts the ranks and returns what they booked and needed.

    Args:
        workload: One of `WORKLOADS`.
        jobs: Number of jobs, all alike.
        cut: As for `crossover`.
        smoke: Toy sizes. MPI and threads then need more memory than the arrays.
        stand_in: Whether a second CPU device stands in for an accelerator. None means no
            accelerator.
    """
    arguments = ["--workload", workload, "--jobs", str(jobs), "--cut", str(cut)]
    arguments += ["--smoke"] * smoke + (
        [] if stand_in is None else ["--device", "stand-in" if stand_in else "gpu"]
    )
    # With this setting, arrays are mapped from the kernel and returned to it, so the resident set
    # is what is in use.
    tunables = "glibc.malloc.mmap_threshold=65536:glibc.malloc.arena_max=1"
    environ = {**gpu_ranks.shared_by(RANKS, os.environ), "GLIBC_TUNABLES": tunables}
    ranks = answer(__file__, [*arguments, "--out"], RANKS, environ=environ)
    worst = max(ranks, key=lambda rank: rank["needed_bytes"])
    row = {"workload": workload, "jobs": jobs, "cut": cut, **worst}
    over = worst["booked_bytes"] / worst["needed_bytes"] if worst["needed_bytes"] > 0 else None
    return {**row, "booked_over_needed": over, "ranks": ranks}


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['jobs']} x {row['workload']}, cut {row['cut']}: needed "
        f"{row['needed_bytes'] / 1e6:.0f} MB, booked {row['booked_bytes'] / 1e6:.0f} MB "
        f"({row['booked_over_needed'] or 0:.3f})"
    )


def rank_main() -> None:
    """Runs the jobs twice on one rank: first to compile, then to measure."""
    options = argparse.ArgumentParser()
    for name in ("workload", "cut", "out"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--jobs", type=int, required=True)
    options.add_argument("--smoke", action="store_true")
    options.add_argument("--device", choices=("stand-in", "gpu"))
    args = options.parse_args()
    if args.device is not None:
        gpu_ranks.prepare(args.device == "stand-in")
    import jax

    import jaxcross

    world = jaxcross.initialize()
    device = jax.local_devices()[1 if args.device == "stand-in" else 0]
    work = _workload(args.workload, args.smoke)
    cut = args.cut if args.cut == "whole" else int(args.cut)
    pmean = lambda tree: jax.lax.pmean(tree, "batch")  # noqa: E731
    step = jaxcross.crossover(work.make(pmean), axes="batch", cut=cut, donate_argnums=0)
    meter = _Meter(device)

    def train(job: Any, seed: int) -> Any:
        state = job.restore(jax.device_put(work.state(seed), device))
        batch = jax.device_put(work.batch(seed), device)
        for _ in job.batches(itertools.repeat(0), STEPS):
            state, metrics = step(state, batch)
            job.log(metrics)
            if job.step == 2:  # leave out temporaries of the initial states
                meter.reset_peak()
        return state

    def run() -> int:
        runner = jaxcross.Runner(world, memory="1TB", progress=False)
        for n in range(args.jobs):
            runner.add(f"job{n}", train, {"seed": n})
        runner.run()
        return runner.booked_bytes

    run()
    gc.collect()
    before = (
        meter.in_use() - world.arena.nbytes
    )  # the next jobs need the arena's receive buffers again
    booked = run()
    gradients = sum(x.nbytes for x in jax.tree.leaves(work.state(0)[0]))
    found = {"booked_bytes": booked, "needed_bytes": meter.peak() - before}
    found |= {"over": world.over, "gradient_bytes": gradients}
    texts = world.control.allgather_text(json.dumps(found))
    if world.rank == 0:
        Path(args.out).write_text(json.dumps([json.loads(text) for text in texts]))


def _workload(name: str, smoke: bool) -> workloads.Workload:
    if smoke:
        return workloads.mlp(width=256, batch_size=8)
    if name in WIDTHS:
        return workloads.mlp(width=WIDTHS[name], batch_size=64)
    return gpu_ranks.workload(name, smoke, 16 if name == "gpt" else 8)


class _Meter:
    """The bytes in use by this process or its accelerator.

    The accelerator's peak can't be reset, so it's the peak since the process started.
    """

    def __init__(self, device: Any) -> None:
        self._device = None if device.platform == "cpu" else device

    def in_use(self) -> int:
        return status_bytes("VmRSS") if self._device is None else 0

    def reset_peak(self) -> None:
        if self._device is None:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return (
            status_bytes("VmHWM")
            if self._device is None
            else int(self._device.memory_stats()["peak_bytes_in_use"])
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    rank_main()
