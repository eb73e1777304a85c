"""What do 1-D, 2-D and 2.5-D cost a rank over a slow link in time, bytes and memory, and does the
model foresee it?

    python benchmarks/tensor.py [--rate 200mbit] [--json FILE] [--png FILE] [--smoke]

We train small GPTs with tensor parallelism on 1-D, 2-D and 2.5-D meshes of ranks. Each rank has its
own host, and the hosts are joined by real links of the given rate. If there are more hosts than
cores, they share the cores. There are four parts:
  scaling    A small GPT's step on 4 and 8 ranks, with strong scaling (one batch size) and weak
             scaling (a batch that grows with the number of ranks). The meshes take turns in one
             run. `model` is the prediction of `tensor.step_cost`. Its alpha, beta and operations
             per second are fitted, in the same run, to steps of smaller models and batches.
  crossover  Two 1-D jobs on two ranks with one core each, one after the other and in crossover, at
             the rate at which exchange and computation take equally long. The final states must be
             the same in both ways, bit for bit.
  unlike     The same with one 1-D job and one data-parallel job that is cut into 32 pieces, at the
             same rate, with weighted shares.
  far        Only the model, with the constants of four ranks, for meshes that don't fit on this
             machine: [4,4,4], [8,8,1], and 1-D on 64 ranks.
Over a slow link, tensor parallelism is a way to save memory. We don't claim that it's fast.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hosts import on_hosts, parser_of_hosts
from race_file import out_file
from tensor_show import draw, far, say
from workloads import spread, write_json

FEATURES = 256
GPT = {"vocabulary": 512, "features": FEATURES, "layers": 2, "heads": 8, "positions": 64}
TOY = {"vocabulary": 32, "features": 32, "layers": 1, "heads": 8, "positions": 8}
MESHES = {
    4: {"1-D": {"tensor": 4}, "2-D": {"side": 2}},
    8: {"1-D": {"tensor": 8}, "2.5-D": {"side": 2, "depth": 2}},
}
# The features and batch sizes of the steps to which the constants are fitted.
SMALLER = ((128, 16), (128, 32), (256, 8))
# A link that was idle passes this much at full speed. With the usual 256 kB, a step with many
# messages would be a fifth faster than the link's rate allows.
BURST_KB = 64
CALIBRATED_BITS_PER_S = 200e6
# Sequences per batch. Weak scaling has four per rank, so on four ranks both kinds of scaling have
# the same batch.
STRONG = 16


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.set_defaults(rate="200mbit")
    options.add_argument(
        "--steps", type=int, default=2, help="steps per mesh and repeat (default %(default)s)"
    )
    options.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    options.add_argument(
        "--png", metavar="FILE", type=out_file, help="draw measured and modelled times"
    )
    options.add_argument(
        "--part", choices=["scaling", "calibrate", "crossover", "unlike"], help="(internal)"
    )
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result: dict[str, Any] = {"rate": args.rate, "scaling": {}}
    for ranks in [4] if args.smoke else MESHES:
        result["scaling"][str(ranks)] = on_hosts(
            __file__, args.rate, ranks, ["--part", "scaling"], burst_kb=BURST_KB
        )
    result["calibration"] = on_hosts(
        __file__, f"{CALIBRATED_BITS_PER_S / 1e3:.0f}kbit", 2, ["--part", "calibrate"]
    )
    rate = f"{balanced_bits_per_s(result['calibration']) / 1e3:.0f}kbit"
    for part in ("crossover", "unlike"):
        result[part] = on_hosts(__file__, rate, 2, ["--part", part])
    # The constants come from the smallest number of ranks, where the fewest ranks share a core.
    result["far"] = far(next(iter(result["scaling"].values()))["machine"])
    say(result)
    write_json(args.json, __doc__, result)
    if args.png:
        draw(result, args.png)
    return 0


def balanced_bits_per_s(found: dict[str, Any]) -> float:
    """Returns the rate at which an exchange takes as long as the computation.

    Part of an exchange's time doesn't depend on the rate, so only the rest is scaled.
    """
    true_bits_per_s = statistics.fmean(found["tcp_bits_per_s"])
    fixed_s = found["exchange_s"] - 8 * found["received_bytes"] / true_bits_per_s
    left_s = max(found["compute_s"] - max(fixed_s, 0.0), found["compute_s"] / 4)
    return 8 * found["received_bytes"] / left_s * CALIBRATED_BITS_PER_S / true_bits_per_s


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize(stall_timeout_s=300)
    part = {
        "scaling": scaling,
        "calibrate": calibrate,
        "crossover": crossover,
        "unlike": crossover,
    }[args.part]
    found = part(world, args)
    if world.rank == 0:
        Path(args.worker).write_text(json.dumps(found))
    return 0


class Work:
    """A GPT on a mesh: one rank's step, its part of the initial state, and its rows of a batch."""

    def __init__(self, mesh: Any, batch: int, rank: int, smoke: bool, **sizes: int) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jaxcross import tensor

        sizes = {**(TOY if smoke else GPT), **sizes}
        model = tensor.Transformer(**sizes, mesh=mesh)
        length = model.positions
        self.mesh, self.model = mesh, model
        self.cost = tensor.step_cost(model, batch, length)
        rows = (
            np.random.default_rng(0)
            .integers(0, model.vocabulary, (batch, length + 1))
            .astype(np.int32)
        )
        self.batch = mesh.local_batch({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, rank)
        self.batch = jax.tree.map(jnp.asarray, self.batch)
        # We draw the parameters with NumPy. With eight ranks on this machine, compiling the model's
        # initialisation would take longer than the measurement.
        draw = np.random.default_rng(0)
        types = jax.eval_shape(
            lambda: tensor.init(model, jax.random.key(0), jnp.zeros((1, length), jnp.int32), rank)
        )
        self.params = jax.tree.map(
            lambda x: jnp.asarray(0.02 * draw.standard_normal(x.shape, np.float32)), types
        )

        def step(params: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                return tensor.cross_entropy(
                    model.apply({"params": params}, batch["tokens"]), batch["labels"], mesh
                )

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

        self.step = step


def scaling(world: Any, args: Any) -> dict[str, Any]:
    """Measures every mesh of this many ranks with both batch sizes, and fits the constants."""
    import jax

    import jaxcross
    from jaxcross.tensor import Mesh
    from jaxcross.wire.bytes import wire_bytes

    steps, repeats = (1, 1) if args.smoke else (args.steps, args.repeats)
    batches = {"strong": STRONG, "weak": 4 * world.size}
    wanted = [(FEATURES, batch) for batch in sorted(set(batches.values()))]
    works = {}
    for name, sizes in MESHES[world.size].items():
        for features, batch in (*SMALLER, *wanted):
            wide = {} if args.smoke else {"features": features}
            works[name, features, batch] = Work(
                Mesh(**sizes), batch, world.rank, args.smoke, **wide
            )
    calls = {key: jaxcross.crossover(work.step, axes=work.mesh.axes) for key, work in works.items()}
    raw: dict[Any, list[float]] = {key: [] for key in works}
    for repeat in range(-1, repeats):
        for key, work in works.items():
            params = work.params
            world.control.allgather_text("")  # so that all ranks begin together
            start = time.perf_counter()
            for _ in range(steps):
                params, metrics = calls[key](params, work.batch)
                jax.block_until_ready((params, metrics))
            if repeat >= 0:
                raw[key].append((time.perf_counter() - start) / steps)
    smaller = [
        (work.cost, statistics.median(raw[key]))
        for key, work in works.items()
        if key[1:] in SMALLER
    ]
    machine, fit = constants(smaller)
    accounts = {}
    for key, work in ((key, work) for key, work in works.items() if key[1:] in wanted):
        report, _ = run(world, [(work, calls[key])], jaxcross.Sequential(), steps)
        accounts[key] = report.summary()["jobs"][0]
    rows = []
    for key in accounts:
        (name, _, batch), work = key, works[key]
        # There's no public way to get the compiled program and its memory.
        compiled = calls[key]._last[2].compiled[0]
        sent = sum(wire_bytes(x, work.mesh.axes) for x in compiled.program.exchanges)
        assert sent == work.cost.received_bytes, "the formula is exact"
        rows.append(
            {
                "mesh": name,
                "axes": dict(work.mesh.axes),
                "batch": batch,
                "scaling": [kind for kind, size in batches.items() if size == batch],
                "s": spread(raw[key]),
                "model_s": work.cost.seconds(machine),
                "model_exchange_s": work.cost.exchange_s(machine),
                "exchange_s": accounts[key]["exchange_s"],
                "compute_s": accounts[key]["compute_s"],
                "messages": work.cost.messages,
                "received_bytes": sent,
                "operations": work.cost.operations,
                "weights_bytes": work.cost.weights_bytes,
                "peak_live_bytes": compiled.peak_live_bytes(),
                "segments": len(compiled.runnables),
                "executables": len({id(r.call) for r in compiled.runnables}),
            }
        )
    return {"ranks": world.size, "rows": rows, "machine": dataclasses.asdict(machine), "fit": fit}


def constants(rows: Sequence[tuple[Any, float]]) -> tuple[Any, dict[str, Any]]:
    """Fits alpha, beta and the operations per second to steps of smaller models on the same meshes.

    Returns:
        The fitted machine, and how good the fit is.
    """
    import numpy as np
    from scipy.optimize import nnls

    from jaxcross.tensor import Machine

    table = np.array(
        [(cost.messages, cost.received_bytes, cost.operations, seconds) for cost, seconds in rows],
        float,
    )
    # We minimise relative errors, because otherwise the longest step alone would decide the fit.
    relative = table[:, :3] / table[:, 3:]
    scale = relative.max(axis=0)
    found = nnls(relative / scale, np.ones(len(table)))[0] / scale
    off = float(np.sqrt(np.mean((relative @ found - 1) ** 2)))
    none = [
        name
        for name, value in zip(("messages", "bytes", "operations"), found, strict=True)
        if value <= 0
    ]
    alpha_s, s_per_byte, s_per_operation = (max(float(value), 1e-15) for value in found)
    machine = Machine(
        alpha_s=alpha_s, bytes_per_s=1 / s_per_byte, operations_per_s=1 / s_per_operation
    )
    return machine, {"relative_rms": off, "found_free": none, "steps": table.tolist()}


def job_of(world: Any, args: Any, cut: int = 1, **sizes: int) -> tuple[Work, Any]:
    """Makes one of the jobs that run in pairs on two ranks. Returns its work and its step."""
    import jaxcross
    from jaxcross.tensor import Mesh

    wide = {} if args.smoke else {"features": 512, "layers": 8, "positions": 128}
    work = Work(Mesh(**sizes), 4 if args.smoke else STRONG, world.rank, args.smoke, **wide)
    return work, jaxcross.crossover(work.step, axes=work.mesh.axes, cut=cut)


def calibrate(world: Any, args: Any) -> dict[str, Any]:
    """Measures how long a single job computes and exchanges per step, and how much it receives."""
    import jaxcross

    work, step = job_of(world, args, tensor=2)
    report, _ = run(world, [(work, step)] * 2, jaxcross.Sequential(), 2 if args.smoke else 3)
    jobs = report.summary()["jobs"]
    mine = [statistics.fmean(job[key] for job in jobs) for key in ("compute_s", "exchange_s")]
    everywhere = [json.loads(text) for text in world.control.allgather_text(json.dumps(mine))]
    compute_s, exchange_s = (statistics.fmean(values) for values in zip(*everywhere, strict=True))
    return {
        "received_bytes": work.cost.received_bytes,
        "compute_s": compute_s,
        "exchange_s": exchange_s,
    }


def crossover(world: Any, args: Any) -> dict[str, Any]:
    """Runs two jobs one after the other and in crossover, and compares their final states."""
    import jax
    import numpy as np

    import jaxcross

    # With round robin, the job with fewer exchanges would finish its steps early, and the other job
    # would have nothing left to overlap with. Equal shares keep both jobs busy until the end.
    unlike = args.part == "unlike"
    one = job_of(world, args, tensor=2)
    jobs = [one, job_of(world, args, cut=4 if args.smoke else 32, data=2) if unlike else one]
    turns = partial(jaxcross.Weighted, (1.0, 1.0)) if unlike else jaxcross.RoundRobin
    policies = {"one after the other": jaxcross.Sequential, "crossover": turns}
    steps, repeats = (3, 1) if args.smoke else (4, 2 * args.repeats - 1)
    raw: dict[str, list[float]] = {name: [] for name in policies}
    finals, summaries = {}, {}
    for repeat in range(-1, repeats):
        for name, policy in policies.items():
            count = 2 if repeat < 0 else steps
            world.control.allgather_text("")
            start = time.perf_counter()
            report, states = run(world, jobs, policy(), count)
            if repeat >= 0:
                raw[name].append((time.perf_counter() - start) / (2 * count))
                finals[name], summaries[name] = states, report.summary()
    first, second = (jax.tree.leaves(states) for states in finals.values())
    same = all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(first, second, strict=True)
    )
    if not same:
        raise SystemExit("crossover and one after the other end in different states")
    return {
        "equal_to_the_bit": same,
        "s_per_job_step": {name: spread(times) for name, times in raw.items()},
        "accounts": summaries,
        "received_bytes": [work.cost.received_bytes for work, _ in jobs],
    }


def run(
    world: Any, jobs: Sequence[tuple[Work, Any]], policy: Any, steps: int
) -> tuple[Any, list[Any]]:
    """Runs jobs for some steps. Returns the report and the jobs' final states."""
    import jax
    import jax.numpy as jnp

    import jaxcross

    def loop(job: Any, work: Work, step: Any) -> Any:
        # Ranks draw the same numbers but keep different parts of them, so the state is rank-local.
        params = job.restore(
            jax.tree.map(jnp.array, work.params), mode="local", rank_local=tuple(work.params)
        )
        for _ in range(steps):
            params, _ = step(params, work.batch)
        return params

    with jaxcross.Runner(world, policy) as runner:
        added = [
            runner.add(f"job{n}", loop, {"work": work, "step": step})
            for n, (work, step) in enumerate(jobs)
        ]
        report = runner.run()
    return report, [job.state for job in added]


if __name__ == "__main__":
    raise SystemExit(main())
