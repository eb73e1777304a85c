"""What do cut steps, hand-overs and crossover cost and gain on one accelerator?

    python benchmarks/gpu.py [--json FILE] [--smoke] [--stand-in] [--cases A,B]

There are six cases:
  ranks      Two ranks share the accelerator, with a real shaped link between them. We run k jobs in
             crossover, one after the other, and as k processes per rank. If the machine doesn't
             allow network namespaces, the link is emulated, and no speed-up is reported.
  split      One rank runs one job in these ways, in turn: with `jax.jit`; with the step cut whole;
             with the cut that `cut="auto"` uses alongside other jobs, which is one piece per 25 MB
             of gradients; and `copied`, which is the step cut whole, but without pinned memory. A
             single rank has nobody to exchange with, so `cut="auto"` can't try cuts here. As with
             several ranks, a cut step copies its gradients to the host and back.
  depth      One rank runs two jobs, with 1, 2 and 3 segments queued on the device. Does a copy wait
             for segments that were queued before it? The best depth belongs in `depth_of`
             (jaxcross/interleave/compute_queue.py).
  transfers  Which public calls copy arrays fastest to the host's CPU device and back? We measure
             arrays from 1 kB to 100 MB. We also measure the leaves of the model: one by one, in one
             call, and concatenated into one array.
  memory     Two ranks: the memory that is reserved for k jobs before their first steps, over the
             memory that they need (see memory.py).
  profile    One, two and three jobs under `jax.profiler`, compared with a loop of plain `jax.jit`.
             How much do copies of one job overlap with kernels of another? A single job has no
             overlap, because its copies and kernels depend on each other. And for how long was the
             device idle although a segment was ready? The target is less than 1% of the time.
With `--stand-in`, a second CPU device takes the place of the accelerator, so that you can check
that everything runs. The resulting times don't tell you anything about an accelerator. Numbers that
only the profile of an accelerator can show are then null, and the reason is given.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import memory_booked
import numpy as np
from gpu_profile import NO_STREAMS, Recording, idleness, overlap, record
from gpu_ranks import accelerator, measure, prepare, workload
from jax import lax
from jax.sharding import SingleDeviceSharding
from ranks import as_rank
from workloads import Workload, in_turn, parser, spread, write_json

import jaxcross
from jaxcross.program import hand_over

Step = Callable[[Any, Any], tuple[Any, Any]]
Move = Callable[[Any], Any]
# The transfer between the device and pinned host memory alone. Pinned memory isn't an array of the
# CPU device yet.
LINK = "link_only"
CASES = ("ranks", "memory", "split", "depth", "transfers", "profile")
RIVALS = ("jit", "whole", "auto", "copied")
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
PLUGINS = (
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)


def crossed(work: Workload, **options: Any) -> Step:
    """Returns the workload's step over MPI."""
    step = work.make(lambda tree: lax.pmean(tree, "batch"))
    return jaxcross.crossover(step, axes="batch", donate_argnums=0, **options)


def unlike(work: Workload, number: int) -> Step:
    """Returns the same step, but with executables that no other `number` shares.

    So a profile can tell the kernels of different jobs apart.
    """
    rate = 1.0 - number / 8

    def exchange(tree: Any) -> Any:
        return jax.tree.map(lambda x: rate * lax.pmean(rate * x, "batch"), tree)

    step = work.make(exchange)
    step.__name__ = f"job_{number}"
    return jaxcross.crossover(step, axes="batch", donate_argnums=0)


def split(
    work: Workload, device: Any, names: list[str], *, repeats: int, steps: int
) -> dict[str, Any]:
    """Returns the seconds per step of each rival, measured in turn."""

    def copied(state: Any, batch: Any) -> Any:
        with mock.patch("jaxcross.program.compile.can_be_pinned", return_value=False):
            return slow(state, batch)

    slow = crossed(work)
    known: dict[str, Step] = {
        "jit": jax.jit(work.make(lambda tree: tree), donate_argnums=0),
        "whole": crossed(work),
        "auto": crossed(work, cut="auto"),
        "copied": copied,
    }
    rivals = {name: known[name] for name in names}
    batch = jax.device_put(work.batch(0), device)
    states = {name: jax.device_put(work.state(0), device) for name in rivals}
    raw = in_turn(rivals, states, batch, repeats=repeats, steps=steps)
    rows = {name: spread(values) for name, values in raw.items()}
    jit = rows["jit"]["median"]
    return {
        "s_per_step": rows,
        **{f"{name}_over_jit": row["median"] / jit for name, row in rows.items()},
    }


def depths(work: Workload, device: Any, *, repeats: int, steps: int) -> dict[str, Any]:
    """Returns the seconds per job-step of two jobs for each queue depth, measured in turn."""
    step = crossed(work)
    batch = jax.device_put(work.batch(0), device)
    initial = [jax.tree.map(np.asarray, work.state(seed)) for seed in range(2)]
    timed = (
        range(2, steps) if steps > 2 else range(1, steps + 1)
    )  # leave out the start and the end of a run

    def run(depth: int) -> float:
        states = jax.block_until_ready(jax.device_put(initial, device))
        jobs = [
            jaxcross.Job(f"job{n}", step, state, itertools.repeat(batch, steps))
            for n, state in enumerate(states)
        ]
        spans = [
            s
            for s in jaxcross.run(jobs, policy=jaxcross.RoundRobin(depth=depth)).spans
            if s.step in timed
        ]
        return (
            (max(s.end_ns for s in spans) - min(s.start_ns for s in spans)) / 1e9 / (2 * len(timed))
        )

    raw: dict[int, list[float]] = {depth: [] for depth in (1, 2, 3)}
    for repeat in range(-1, repeats):
        for depth, values in raw.items():
            seconds = run(depth)
            if repeat >= 0:
                values.append(seconds)
    rows = {str(depth): spread(values) for depth, values in raw.items()}
    return {"s_per_step": rows, "best": min(rows, key=lambda depth: rows[depth]["median"])}


@jax.jit
def together(arrays: list[Any]) -> Any:
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def apart(arrays: list[np.ndarray]) -> Move:
    """Returns the inverse of `together` for arrays of these shapes, on its argument's device."""
    ends = list(itertools.accumulate(x.size for x in arrays))

    @jax.jit
    def cut(flat: Any) -> list[Any]:
        return [
            flat[end - x.size : end].reshape(x.shape) for end, x in zip(ends, arrays, strict=True)
        ]

    return cut


def to_host(arrays: list[np.ndarray], device: Any, host: Any) -> dict[str, Move]:
    """Ways to move arrays from the accelerator to the host's CPU device.

    Each takes and returns a list of arrays.
    """

    def copy_async(arrays: list[Any]) -> Any:
        for x in arrays:
            x.copy_to_host_async()
        return [jax.device_put(np.asarray(x), host) for x in arrays]

    ways: dict[str, Move] = {
        "device_put": lambda arrays: jax.device_put(arrays, host),
        "copy_to_host_async": copy_async,
    }
    if (place := hand_over.pinned_memory([SingleDeviceSharding(device)], host)) is not None:
        ways[LINK] = lambda arrays: jax.device_put(arrays, place)
        if len(arrays) > 1:
            cut = apart(arrays)
            ways["together"] = lambda arrays: cut(
                hand_over.to_host([together(arrays)], host, [place])[0]
            )
    ways["hand_over"] = lambda arrays: hand_over.to_host(arrays, host, [place] * len(arrays))
    return ways


def to_device(arrays: list[np.ndarray], device: Any, host: Any) -> dict[str, Move]:
    """Ways to move arrays from the host's CPU device to the accelerator."""
    ways: dict[str, Move] = {
        "device_put": lambda arrays: [jax.device_put(x, device) for x in arrays]
    }
    if (place := hand_over.pinned_memory([SingleDeviceSharding(device)], host)) is not None:
        there = hand_over.on_device(place)
        stages = jax.block_until_ready(jax.device_put([np.zeros_like(x) for x in arrays], place))
        views = [writable(x) for x in stages]
        pool = ThreadPoolExecutor(4)

        def staged_by_threads(arrays: list[Any]) -> Any:
            parts = [
                (
                    view.reshape(-1)[start : start + 1_000_000],
                    np.asarray(x).reshape(-1)[start : start + 1_000_000],
                )
                for view, x in zip(views, arrays, strict=True)
                for start in range(0, x.size, 1_000_000)
            ]
            list(pool.map(lambda part: np.copyto(*part), parts))
            return jax.device_put(stages, there)

        ways["pinned"] = lambda arrays: jax.device_put(jax.device_put(arrays, place), there)
        ways["staged_by_threads"] = staged_by_threads
        ways[LINK] = lambda _: jax.device_put(stages, there)
    ways["hand_over"] = lambda arrays: hand_over.from_host(
        arrays, [SingleDeviceSharding(device)] * len(arrays)
    )
    return ways


def writable(x: Any) -> np.ndarray:
    """Returns a writable view of an array's pinned memory.

    A hand-over with its own buffers would write to such memory.
    """
    memory = (ctypes.c_char * x.nbytes).from_address(x.unsafe_buffer_pointer())
    return np.frombuffer(memory, x.dtype).reshape(x.shape)


def inside(arrays: list[np.ndarray], device: Any, host: Any, *, repeats: int) -> dict[str, Any]:
    """Times an executable whose results go to device memory, and one for pinned memory."""
    held = jax.device_put(arrays, device)
    ways = {"device": jax.jit(lambda xs: [x + 1 for x in xs])}
    if (place := hand_over.pinned_memory([SingleDeviceSharding(device)], host)) is not None:
        ways["pinned"] = jax.jit(lambda xs: [x + 1 for x in xs], out_shardings=place)
    raw: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(-1, repeats):
        for way, function in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(function(held))
            if repeat >= 0:
                raw[way].append(time.perf_counter() - start)
    return {way: spread(values) for way, values in raw.items()}


def transfers(
    work: Workload, device: Any, host: Any, sizes: tuple[int, ...], *, repeats: int
) -> dict[str, Any]:
    """Times each way in both directions, for each size and for a whole model's leaves."""
    cases: dict[str, list[np.ndarray]] = {f"{n}": [np.ones(n // 4, np.float32)] for n in sizes}
    params, *_ = jax.eval_shape(
        lambda: work.state(0)
    )  # only shapes matter, and XLA would take a minute to create the values
    cases["leaves"] = [np.ones(x.shape, x.dtype) for x in jax.tree.leaves(params)]
    result: dict[str, Any] = {}
    for direction, find, source in (("to_host", to_host, device), ("to_device", to_device, host)):
        for case, arrays in cases.items():
            raw = _race(find(arrays, device, host), arrays, source, repeats)
            rows = {way: spread(values) for way, values in raw.items()}
            best = min((way for way in rows if way != LINK), key=lambda way: rows[way]["median"])
            nbytes = sum(x.nbytes for x in arrays)
            row = {"bytes": nbytes, "arrays": len(arrays), "s": rows, "best": best}
            if LINK in rows:
                row["hand_over_of_link"] = rows[LINK]["median"] / rows["hand_over"]["median"]
            result.setdefault(direction, {})[case] = row
    result["inside"] = inside(cases["leaves"], device, host, repeats=repeats)
    return result


def _race(
    ways: dict[str, Move], arrays: list[np.ndarray], source: Any, repeats: int
) -> dict[str, list[float]]:
    fresh = jax.jit(
        lambda xs: [x + 1 for x in xs]
    )  # fresh arrays, because an array caches the copy that it gave to NumPy
    held = jax.device_put(arrays, source)
    raw: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(-1, repeats):
        for way, move in ways.items():
            there = jax.block_until_ready(fresh(held))
            start = time.perf_counter()
            found = jax.block_until_ready(move(there))
            if repeat >= 0:
                raw[way].append(time.perf_counter() - start)
            elif way != LINK:
                for a, b in zip(found, arrays, strict=True):
                    np.testing.assert_array_equal(np.asarray(a), b + 1, err_msg=way)
    return raw


def profile(work: Workload, device: Any, *, steps: int) -> dict[str, Any]:
    """Profiles one to three jobs, and plain jit."""
    batch = jax.device_put(work.batch(0), device)
    steps_of = [unlike(work, n) for n in range(3)]

    def jobs(count: int, steps: int) -> Any:
        states = jax.block_until_ready(
            [jax.device_put(work.state(n), device) for n in range(count)]
        )
        made = [
            jaxcross.Job(f"job_{n}", steps_of[n], state, itertools.repeat(batch, steps))
            for n, state in enumerate(states)
        ]
        report = jaxcross.run(made)
        jax.block_until_ready([job.state for job in made])
        return report

    plain = jax.jit(work.make(lambda tree: tree), donate_argnums=0)

    def loop(steps: int) -> None:
        state = jax.device_put(work.state(0), device)
        for _ in range(steps):
            state, _ = plain(state, batch)
        jax.block_until_ready(state)

    jobs(3, 2)  # compiles
    loop(2)
    recording = record(lambda: loop(steps))
    result: dict[str, Any] = {"plain_jit": _result_of(recording, None, device.platform)}
    for count in (1, 2, 3):
        box: list[Any] = []
        recording = record(lambda count=count, box=box: box.append(jobs(count, steps)))
        result[f"{count}_jobs"] = _result_of(recording, box[0], device.platform)
    return result


def _result_of(recording: Recording | None, report: Any, platform: str) -> dict[str, Any]:
    spans = [] if report is None else [s for s in report.spans if s.kind == "compute"]
    account = {} if report is None else {"account": report.summary()}
    if recording is None:
        reason = NO_STREAMS + (": this is a CPU" if platform == "cpu" else "")
        return {"overlap": None, "idleness": None, "reason": reason, **account}
    ready = [(s.ready_ns, s.end_ns) for s in spans]
    return {"overlap": overlap(recording), "idleness": idleness(recording, ready), **account}


def memory(args: argparse.Namespace, save: Callable[[list[Any]], None]) -> list[dict[str, Any]]:
    """What one and two jobs book and need. This process must not have started JAX or MPI."""
    rows: list[dict[str, Any]] = []
    for jobs in (1, 2):
        rows.append(
            memory_booked.measure(
                args.model, jobs, "whole", smoke=args.smoke, stand_in=args.stand_in
            )
        )
        print("memory", memory_booked.shown(rows[-1]), flush=True)
        save(rows)
    return rows


def described(device: Any, stand_in: bool) -> dict[str, Any]:
    found = {}
    for name in PLUGINS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    client = device.client
    return {
        "kind": device.device_kind, "platform": device.platform, "count": len(jax.local_devices()),
        "platform_version": client.platform_version, "plugins": found, "stand_in": stand_in,
    }  # fmt: skip


def some_accelerator() -> bool:
    """Looks for an accelerator without starting JAX, which the ranks must do first."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def show(name: str, result: dict[str, Any]) -> None:
    if name == "transfers":
        for direction in ("to_host", "to_device"):
            for case, row in result[direction].items():
                ways = {
                    way: f"{statistics.median(r['raw']) * 1e6:.0f} us"
                    for way, r in row["s"].items()
                }
                print(f"transfers {direction} {case}: {row['best']} is best of {ways}", flush=True)
    elif name == "profile":
        for case, row in result.items():
            print(
                "profile", case, row["overlap"], row["idleness"], row.get("reason", ""), flush=True
            )
    else:
        if "without_link" in result:
            show(name, result["without_link"] | {"link": "no link"})
        rows = result["s_per_job_step" if name == "ranks" else "s_per_step"]
        shown = {
            rival: None if row is None else round(row["median"], 5) for rival, row in rows.items()
        }
        best = f"best is {result['best']}, see `depth_of`" if "best" in result else ""
        print(name, "seconds a step", shown, result.get("link", ""), best, flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--stand-in", action="store_true", help="a second CPU device stands for the accelerator"
    )
    options.add_argument("--cases", default=",".join(CASES), help="default %(default)s")
    options.add_argument(
        "--rate", default="10gbit", help="of the link between the ranks (default %(default)s)"
    )
    options.add_argument(
        "--no-lab", action="store_true", help="no shaped link, as where namespaces are refused"
    )
    options.add_argument(
        "--model", choices=("resnet50", "gpt"), default="resnet50", help="default %(default)s"
    )
    options.add_argument(
        "--batch-size", type=int, default=64, help="examples a step (default %(default)s)"
    )
    options.add_argument(
        "--jobs", type=int, default=2, help="of the case `ranks` (default %(default)s)"
    )
    options.add_argument(
        "--steps", type=int, default=20, help="timed in one go (default %(default)s)"
    )
    options.add_argument("--repeats", type=int, default=7, help="default %(default)s")
    options.add_argument(
        "--rivals", default=",".join(RIVALS), help="of the case `split` (default %(default)s)"
    )
    options.add_argument(
        "--sizes", type=int, nargs="+", metavar="BYTES", help="of the case `transfers` (default: 6)"
    )
    args = options.parse_args()
    cases, rivals = args.cases.split(","), args.rivals.split(",")
    for what, names, known in (("cases", cases, CASES), ("rivals", rivals, RIVALS)):
        if unknown := [name for name in names if name not in known]:
            options.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    if "jit" not in rivals:
        options.error("`--rivals` must have `jit`, which the others are compared with")
    as_rank()
    if args.smoke:
        args.steps, args.repeats = 2, 2
    if not args.stand_in and not some_accelerator():
        raise SystemExit(
            "This machine has no accelerator. `--stand-in` runs the same code on a second CPU "
            "device."
        )
    result: dict[str, Any] = {}
    prepare(args.stand_in)
    if "ranks" in cases:  # first, while this process holds no device memory
        save = partial(write_json, args.json, __doc__)
        result["ranks"] = measure(args, lambda found: save({"ranks": found}))
        show("ranks", result["ranks"])
        save(result)
    if "memory" in cases:
        result["memory"] = memory(
            args, lambda found: write_json(args.json, __doc__, result | {"memory": found})
        )
    jaxcross.initialize()
    device, host = accelerator(args.stand_in), jax.local_devices(backend="cpu")[0]
    result["device"] = described(device, args.stand_in)
    work = workload(args.model, args.smoke, args.batch_size)
    sizes = args.sizes or (SIZES[:4] if args.smoke else SIZES)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "split": lambda: split(work, device, rivals, repeats=args.repeats, steps=args.steps),
        "depth": lambda: depths(work, device, repeats=args.repeats, steps=args.steps),
        "transfers": lambda: transfers(work, device, host, sizes, repeats=args.repeats),
        "profile": lambda: profile(work, device, steps=args.steps),
    }
    for name in run:
        if name in cases:
            result[name] = run[name]()
            show(name, result[name])
            write_json(
                args.json, __doc__, result
            )  # after each case, because a borrowed machine may be taken away


if __name__ == "__main__":
    main()
