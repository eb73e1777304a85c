"""Which XLA CPU options speed up a ResNet-50 step: flags, layouts, large pages, 1x1 products?

    python benchmarks/backend.py [--repeats 5] [--steps 4] [--json FILE] [--smoke]

We run the training step of `race.py` (batch 4, 224x224, without its exchange) on one core, once for
each of the options. XLA reads its flags only once per process, so each option has its own process.
All of these processes are started before the first measurement, which needs 20 GB of memory. Then
the processes take turns, so that all options are affected if the machine becomes slower for a
while.

`as raced` is the way in which every JAX row of the race runs, and `ratio` is an option's seconds
per step over those of `as raced`. If this jaxlib doesn't support a flag, the process with that flag
ends, and the output names the flag. If PyTorch is installed, we also time its step, because large
pages may help PyTorch as much as XLA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from workloads import parser, spread, write_json

from jaxcross.world import malloc

CONVOLUTIONS, SMALL_PAGES, TORCH = (
    "1x1 kernels as convolutions",
    "pages as the kernel gives them",
    "PyTorch",
)
NCHW = "other convolutions in NCHW"
WAYS = {
    "as raced": "",
    CONVOLUTIONS: "",
    NCHW: "",
    SMALL_PAGES: "",
    **{
        flag: f"--{flag}"
        for flag in (
            "xla_cpu_use_onednn=true",
            "xla_cpu_use_xnnpack=true",
            "xla_cpu_prefer_vector_width=512",
            "xla_cpu_enable_fast_math=true",
            "xla_cpu_use_fusion_emitters=false",
            "xla_cpu_multi_thread_eigen=false",
        )
    },
    **(
        dict.fromkeys((TORCH, f"{TORCH}, {SMALL_PAGES}"), "")
        if importlib.util.find_spec("torch")
        else {}
    ),
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    options.add_argument(
        "--steps", type=int, default=4, help="of each way, a repeat (default %(default)s)"
    )
    options.add_argument("--worker", metavar="WAY", help="(internal) step as stdin says")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    processes = {way: start(way, args.smoke) for way in WAYS}
    try:
        unknown = [
            way for way, process in processes.items() if asked(process, 2) is None
        ]  # compiles and warms up
        if others := [
            way for way in unknown if not WAYS[way] or processes[way].wait() == -signal.SIGKILL
        ]:
            raise RuntimeError(f"the process of `{others[0]}` ended; its last words are above")
        for way in unknown:
            print(f"{way}: not known to this jaxlib")
        raw: dict[str, list[float]] = {way: [] for way in WAYS if way not in unknown}
        for _ in range(2 if args.smoke else args.repeats):
            for way, seconds in raw.items():
                found = asked(processes[way], args.steps)
                if found is None:
                    raise RuntimeError(f"the process of `{way}` ended")
                seconds += found
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    rows = {way: {"s": spread(seconds)} for way, seconds in raw.items()}
    for way, row in rows.items():
        row["ratio"] = row["s"]["median"] / rows["as raced"]["s"]["median"]
        print(f"{way:40} {row['s']['median']:.3f} s a step, {row['ratio']:.2f} of `as raced`")
    write_json(args.json, __doc__, {"rows": rows, "unknown": unknown})
    return 0


def start(way: str, smoke: bool) -> subprocess.Popen[str]:
    """Starts a process that steps on request."""
    environment = {**os.environ, "NPROC": "1", "XLA_FLAGS": WAYS[way]}
    if not way.endswith(SMALL_PAGES):
        environment |= malloc.settings(environment)
    line = [sys.executable, __file__, "--worker", way, *(["--smoke"] if smoke else [])]
    return subprocess.Popen(
        line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def asked(process: subprocess.Popen[str], steps: int) -> list[float] | None:
    """Returns the seconds of each of `steps` steps, or None if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{steps}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line else None


def worker(args: argparse.Namespace) -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from rivals.cases import jobs_of

    (spec,) = jobs_of("one", args.smoke)
    timed = torch_step(spec) if args.worker.startswith(TORCH) else xla_step(spec, args.worker)
    for line in sys.stdin:
        print(json.dumps(timed(int(line))), flush=True)
    return 0


def xla_step(spec: Any, way: str) -> Callable[[int], list[float]]:
    import jax
    import resnet
    from rivals import jax_work

    usual = resnet.convolve

    def nchw(x: Any, kernel: Any, *args: Any, **rest: Any) -> Any:
        if kernel.shape[:2] == (1, 1):
            return usual(x, kernel, *args, **rest)
        order = rest | {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}
        y = jax.lax.conv_general_dilated(
            x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1), *args, **order
        )
        return y.transpose(0, 2, 3, 1)

    resnet.convolve = {CONVOLUTIONS: jax.lax.conv_general_dilated, NCHW: nchw}.get(way, usual)
    work = jax_work.workload(spec)
    step: Any = jax.jit(work.make(lambda tree: tree), donate_argnums=0)
    return jax_work.Loop(step, jax_work.state_of(work, 0), jax_work.batch_of(work, 0, 0)).timed


def torch_step(spec: Any) -> Callable[[int], list[float]]:
    import torch
    from rivals import torch_models

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    work = torch_models.work(spec, seed=0)

    def step() -> float:
        start = time.perf_counter()
        work.loss(work.model).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
        return time.perf_counter() - start

    return lambda steps: [step() for _ in range(steps)]


if __name__ == "__main__":
    raise SystemExit(main())
