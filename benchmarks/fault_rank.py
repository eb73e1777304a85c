"""Runs on each rank of faults.py: `fault_rank.py FAULT POINT FOLDER SILENCE_S WATCHDOG_S`.

Two jobs run in crossover. They save a checkpoint in FOLDER after every step, unless the runner
itself is expected to save after the fault. The fault is injected once, on the last rank and in job
`b`. If FAULT is `none`, no fault is injected, and the jobs resume from their checkpoints.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jaxcross

STEPS, AT_STEP = 8, 3
FAULT, POINT, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
SAID = {"agreement": "checkpoint: save", "carried": "exchange"}.get(
    POINT, POINT
)  # the flight recorder's name for it
RUNNER_SAVES = FAULT == "term" or (FAULT in ("raise", "memory") and POINT == "compute")
WORLD = jaxcross.initialize(
    heartbeat_timeout_s=float(sys.argv[4]), stall_timeout_s=float(sys.argv[5])
)
VICTIM = WORLD.size - 1

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxcross.program.execution import Execution  # noqa: E402


def hurt() -> None:
    """Injects the fault on the victim."""
    (FOLDER / "hurt").write_text(str(time.time()))
    match FAULT:
        case "raise":
            raise ValueError("a fault")
        case "memory":
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), resource.RLIM_INFINITY))
            try:
                np.zeros(1 << 30, np.uint8)
            finally:
                resource.setrlimit(
                    resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                )
        case "segv":
            ctypes.string_at(0)
        case "block":
            ctypes.PyDLL(None).sleep(1000)  # holds the GIL
        case "exit":
            os._exit(3)
        case "link":
            while not (FOLDER / "cut").exists():  # the process that started us takes the link down
                threading.Event().wait(0.02)
        case "stop":
            # If we sent the signal to the process, another thread might receive it, some time after
            # this thread has continued.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case name:
            os.kill(os.getpid(), getattr(signal, f"SIG{name.upper()}"))


class Injector:
    """Waits until the victim's flight recorder reaches the point of the fault."""

    def __init__(self) -> None:
        self.lock, self.done, self.near = threading.Lock(), False, False
        self.armed: tuple[int, int] | None = (
            None  # the thread and the segment in which to raise an error
        )
        self.begin, self.run = WORLD.flight.begin, Execution.run
        WORLD.flight.begin = self.watch  # type: ignore[method-assign]
        Execution.run = lambda execution, index: self.run_segment(execution, index)  # type: ignore[method-assign]

    def watch(self, activity: Any) -> int:
        token = self.begin(activity)
        if self.comes(activity):
            if FAULT in ("raise", "memory") and POINT in ("compute", "exchange"):
                self.armed = (
                    threading.get_ident(),
                    activity.segment,
                )  # a segment must fail while it runs
            else:
                hurt()
        return token

    def comes(self, activity: Any) -> bool:
        """Returns whether this is the point. True only once, although several threads ask."""
        with self.lock:
            # Saving a checkpoint at this step doesn't count as being near the point, because it may
            # be the job's first checkpoint. If a fault interrupted that one, there would be nothing
            # to resume from.
            self.near |= activity.job == "b" and activity.step == AT_STEP and activity.segment >= 0
            here = activity.job == "b" and (activity.step == AT_STEP or POINT == "compile")
            here |= self.near and (
                POINT == "vote" or (POINT == "agreement" and activity.job == "b")
            )
            here &= (
                POINT != "agreement" or activity.number > 0
            )  # the exchange lane's activity; a job's thread waits for it as well
            now = not self.done and here and activity.what == SAID
            self.done |= now
        return now

    def run_segment(self, execution: Execution, index: int) -> None:
        if self.armed == (threading.get_ident(), index):
            self.armed = None
            hurt()
        self.run(execution, index)


def make_step(scale: float) -> Any:
    def step(w, x):
        return w + jax.lax.pmean(jnp.mean(x) * scale, "batch")

    return jaxcross.crossover(step, axes="batch", donate_argnums=0)


def make_carried_step(scale: float) -> Any:
    """Returns a step that exchanges the previous step's value alongside a product."""

    def step(w, x):
        done, pending = w
        return done + jax.lax.pmean(pending, "batch"), jnp.dot(x, jnp.ones_like(x)) / x.size * scale

    return jaxcross.crossover(step, axes="batch", donate_argnums=0)


def train(job: Any, scale: float) -> Any:
    carried = POINT == "carried"
    step = (make_carried_step if carried else make_step)(scale)
    w = job.restore((jnp.zeros(()), jnp.zeros(())) if carried else jnp.zeros(()))
    print(f"rank {WORLD.rank} begins job {job.name} after step {job.step}", flush=True)
    for x in job.batches(np.full(4, n + 1, np.float32) for n in range(STEPS)):
        w = step(w, x)
        if not RUNNER_SAVES or (POINT == "checkpoint" and job.step == AT_STEP):
            job.save(w)
        if FAULT == "term" and job.step == STEPS - 2:
            while not (FOLDER / "hurt").exists():  # the disk may be slow
                time.sleep(0.02)
            time.sleep(3)  # time for all ranks to learn of it before the job finishes
    return w


if WORLD.rank == VICTIM and FAULT != "none":
    Injector()
runner = jaxcross.Runner(WORLD, checkpoints=jaxcross.Checkpoints(FOLDER / "checkpoints"))
for name, scale in (("a", 1.0), ("b", 2.0)):
    runner.add(name, train, {"scale": scale})
try:
    runner.run()
    ends = {job.name: (job.step, float(sum(jax.tree.leaves(job.state)))) for job in runner.jobs}
    print(f"rank {WORLD.rank} ends: {ends}", flush=True)
except jaxcross.JobError as error:
    steps = {job.name: job.step for job in runner.jobs}
    print(f"rank {WORLD.rank} continues: {steps}: {str(error).splitlines()[0]}", flush=True)
except SystemExit:
    steps = {job.name: job.step for job in runner.jobs}
    print(f"rank {WORLD.rank} leaves: {steps}", flush=True)
    raise
