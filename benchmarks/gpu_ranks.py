"""The part of gpu.py with two ranks: k jobs in crossover, one after the other, and as k processes.

All ranks share one accelerator. If the machine allows network namespaces, there's a real shaped
link between the ranks. Otherwise, we start the ranks with a plain `mpirun` and don't compute a
speed-up. In that case, jobs are measured with an emulated link, and both jobs and processes are
measured without any link, which shows what sharing the device costs.

If you run this file as a script, it acts as one rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ranks
import workloads
from ended import ends_on_signals, run, started
from hosts import bytes_crossed
from workloads import spread

RANKS = 2
Wrap = Callable[[list[str]], list[str]]


def prepare(stand_in: bool) -> None:
    """Configures JAX before it starts.

    Memory is allocated as needed, so that processes can share the device. `stand_in` adds a second
    CPU device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # XLA in JAX 0.11.2 crashes when it compiles ResNet-50 for an H100 ("Check failed:
    # subdim_size_accumulator == dim_size" in triton_tiling_propagation.cc). With this flag, it uses
    # cuBLAS for matrix products instead.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false".strip()
    )
    if stand_in:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)


def shared_by(processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment that limits each of `processes` to its share of the memory."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / processes:.3f}", **environ}


def accelerator(stand_in: bool) -> Any:
    """Returns the device for compute segments. Collective segments run on the first CPU device."""
    device = jax.local_devices()[1 if stand_in else 0]
    if device.platform == "cpu" and not stand_in:
        raise SystemExit(
            "JAX found no accelerator. `--stand-in` runs the same code on a second CPU device."
        )
    return device


def workload(model: str, smoke: bool, batch_size: int) -> workloads.Workload:
    """ResNet-50 on 224-pixel images, or a GPT of 0.2 billion parameters on 512-token texts."""
    if smoke:
        return workloads.mlp(width=64, batch_size=8)
    if model == "gpt":
        return workloads.transformer(
            layers=12, width=1024, length=512, batch_size=batch_size, vocabulary=32768
        )
    return workloads.resnet(model, batch_size=batch_size, image_size=224)


def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Starts the ranks and collects their numbers. This process must not have started JAX or MPI.

    Args:
        args: The command line's.
        save: Saves the results so far, because a borrowed machine may be taken away.
    """
    from jaxcross.lab import Lab, available

    mpirun = ranks.mpirun_or_exit()
    reason = "as was asked for" if args.no_lab else available()
    with ends_on_signals(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts=RANKS, rate=args.rate)) if reason is None else None
        out = Path(folder) / "jobs.json"

        def command(role: str, *flags: str) -> tuple[list[str], dict[str, str]]:
            arguments = ["--role", role, "--out", str(out), *_arguments(args), *flags]
            plain = shared_by(RANKS * (args.jobs if role == "process" else 1), os.environ)
            line, environ = ranks.command(mpirun, RANKS, __file__, arguments, environ=plain)
            return (line, environ) if lab is None else (lab.wrap(line), lab.environment(environ))

        def jobs(*flags: str) -> dict[str, Any]:
            run(*command("jobs", *flags))
            return json.loads(out.read_text())

        def processes() -> dict[str, Any]:
            return spread(_processes(*command("process"), args))

        # We save the results of the jobs before we start processes, because every process compiles
        # again.
        if lab is None:
            result = jobs("--emulate") | {
                "link": f"emulated link {args.rate}",
                "no_real_link": reason,
            }
            save(result)
            result["without_link"] = jobs()
            save(result)
            # If each process emulated its own link, the processes wouldn't share the link.
            result["without_link"]["s_per_job_step"]["processes"] = processes()
            return result
        result = jobs() | {"link": lab.description, "mpi": mpirun.vendor}
        seconds = result["s_per_job_step"]
        if not args.stand_in:  # a gain on two CPU devices says nothing about an accelerator
            result["speedup_over_sequential"] = (
                seconds["sequential"]["median"] / seconds["crossover"]["median"]
            )
        save(result)
        seconds["processes"] = processes()
        result["bytes_crossed"] = bytes_crossed(lab)
    if not args.stand_in:
        result["speedup_over_processes"] = (
            seconds["processes"]["median"] / seconds["crossover"]["median"]
        )
    return result


def _arguments(args: argparse.Namespace) -> list[str]:
    flags = [f"--{name.replace('_', '-')}" for name in ("smoke", "stand_in") if getattr(args, name)]
    names = ("model", "rate", "jobs", "steps", "repeats", "batch_size")
    return [
        *flags,
        *(word for n in names for word in (f"--{n.replace('_', '-')}", str(getattr(args, n)))),
    ]


def _processes(line: list[str], environ: dict[str, str], args: argparse.Namespace) -> list[float]:
    """Seconds per job-step with one world per job. The worlds start each repeat together."""
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        worlds = [
            stack.enter_context(started(line, env=environ, stdin=pipe, stdout=pipe))
            for _ in range(args.jobs)
        ]
        for world in worlds:
            _answer(world)  # compiled and warm
        raw = []
        for _ in range(args.repeats):
            for world in worlds:
                assert world.stdin is not None
                world.stdin.write("go\n")
                world.stdin.flush()
            times = [_answer(world) for world in worlds]  # all processes share the machine's clock
            raw.append(
                (max(t[1] for t in times) - min(t[0] for t in times)) / (args.steps * args.jobs)
            )
        for world in worlds:
            world.wait(timeout=60)
        return raw


def _answer(world: subprocess.Popen[str]) -> list[float]:
    """Returns rank 0's next line of JSON. Other lines are passed on to stderr."""
    assert world.stdout is not None
    for line in world.stdout:
        if line.startswith("["):
            return json.loads(line)
        print(line, end="", file=sys.stderr)
    raise SystemExit(
        f"a world of {RANKS} ranks ended early, with status {world.wait()}; its words are above"
    )


def rank_main(args: argparse.Namespace) -> None:
    import jaxcross
    from jaxcross import Link
    from jaxcross.lab import emulated_link

    prepare(args.stand_in)
    world = jaxcross.initialize()
    device = accelerator(args.stand_in)
    work = workload(args.model, args.smoke, args.batch_size)
    step = jaxcross.crossover(
        work.make(lambda tree: jax.lax.pmean(tree, "batch")), axes="batch", cut=1, donate_argnums=0
    )
    link = Link.parse(args.rate) if args.emulate else None
    initial = [jax.tree.map(np.asarray, work.state(seed)) for seed in range(args.jobs)]
    batches = [
        jax.device_put(work.batch(100 * world.rank + seed), device) for seed in range(args.jobs)
    ]

    def run(policy: Any, steps: int, count: int) -> tuple[list[Any], Any, list[float]]:
        states = jax.block_until_ready(jax.device_put(initial[:count], device))
        jobs = [
            # BatchNorm's running means are rank-local.
            jaxcross.Job(f"job{n}", step, state, itertools.repeat(batch, steps), rank_local="[1]")
            for n, (state, batch) in enumerate(zip(states, batches, strict=False))
        ]
        world.control.allreduce_min(np.zeros(1, np.int64))  # all ranks start together
        start = time.monotonic()
        with emulated_link(link):
            report = jaxcross.run(jobs, policy=policy, world=world)
        jax.block_until_ready([job.state for job in jobs])
        world.control.allreduce_min(np.zeros(1, np.int64))
        times = [start, time.monotonic()]
        return [jax.device_get(job.state) for job in jobs], report, times

    run(jaxcross.RoundRobin(), 1, args.jobs if args.role == "jobs" else 1)  # compiles
    if args.role == "process":
        say = (
            (lambda times: print(json.dumps(times), flush=True))
            if world.rank == 0
            else lambda _: None
        )
        say([0.0, 0.0])
        for _ in range(args.repeats):
            if world.rank == 0:
                sys.stdin.readline()  # wait until the other worlds are warm, too
            say(run(jaxcross.Sequential(), args.steps, 1)[2])
        return
    raw: dict[str, list[float]] = {"sequential": [], "crossover": []}
    finals, summary = {}, {}
    for _ in range(args.repeats):
        for name, policy in (
            ("sequential", jaxcross.Sequential()),
            ("crossover", jaxcross.RoundRobin()),
        ):
            finals[name], report, times = run(policy, args.steps, args.jobs)
            raw[name].append((times[1] - times[0]) / (args.steps * args.jobs))
            summary[name] = report.summary()
    same = jax.tree.map(
        lambda a, b: a.tobytes() == b.tobytes(), finals["sequential"], finals["crossover"]
    )
    if world.rank == 0:
        args.out.write_text(
            json.dumps(
                {
                    "ranks": world.size,
                    "jobs": args.jobs,
                    "steps": args.steps,
                    "equal_to_the_bit": all(jax.tree.leaves(same)),
                    "s_per_job_step": {name: spread(values) for name, values in raw.items()},
                    "accounts": summary,
                }
            )
        )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--role", choices=("jobs", "process"), required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--rate", required=True)
    options.add_argument("--model", required=True)
    for number in ("jobs", "steps", "repeats", "batch-size"):
        options.add_argument(f"--{number}", type=int, required=True)
    for flag in ("smoke", "stand-in", "emulate"):
        options.add_argument(f"--{flag}", action="store_true")
    rank_main(options.parse_args())
