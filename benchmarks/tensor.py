"""What do 1-D, 2-D and 2.5-D cost a rank over a slow link in time, bytes and memory, and does the model foresee it?

    python benchmarks/tensor.py [--rate 200mbit] [--json FILE] [--png FILE] [--smoke]

Hosts of one rank each, joined by real links of that rate; beyond the machine's cores they share them. Three parts:
  scaling    a small GPT's step on 4 and 8 ranks: strong (one batch) and weak (a batch that grows with the ranks).
             Meshes alternate in one run. model: `tensor.step_cost` with alpha, beta and operations a second that were
             measured in the same run, from lone collectives and from a serial step on every rank at once
  crossover  two such jobs on two ranks with a core each, 1-D, one after the other and in turns, at the rate at which
             exchange and computation take equally long. Both must end in the same bits
  far        the model alone, with the constants of eight ranks: [4,4,4], [8,8,1] and 1-D on 64 ranks

Over a slow link tensor parallelism is a matter of memory; nothing here is a claim that it is fast.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from hosts import on_hosts, parser_of_hosts
from tensor_show import draw, far, say
from workloads import spread, write_json

GPT = {"vocabulary": 512, "features": 256, "layers": 2, "heads": 8, "positions": 64}
TOY = {"vocabulary": 32, "features": 32, "layers": 1, "heads": 8, "positions": 8}
MESHES = {4: {"1-D": {"tensor": 4}, "2-D": {"side": 2}}, 8: {"1-D": {"tensor": 8}, "2.5-D": {"side": 2, "depth": 2}}}
SUSTAINED_BYTES = 4e6  # of each calibrated collective, without a pause
CALIBRATED_BITS_PER_S = 200e6
STRONG = 16  # sequences; weak scaling has four a rank, so that both have them on four ranks


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.set_defaults(rate="200mbit")
    options.add_argument("--steps", type=int, default=2, help="of a mesh, a repeat (default %(default)s)")
    options.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    options.add_argument("--png", metavar="FILE", help="draw measured and modelled times")
    options.add_argument("--part", choices=["scaling", "calibrate", "crossover"], help="(internal)")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result: dict[str, Any] = {"rate": args.rate, "scaling": {}}
    for ranks in [4] if args.smoke else MESHES:
        result["scaling"][str(ranks)] = on_hosts(__file__, args.rate, ranks, ["--part", "scaling"])
    result["calibration"] = on_hosts(__file__, f"{CALIBRATED_BITS_PER_S / 1e3:.0f}kbit", 2, ["--part", "calibrate"])
    rate = f"{balanced_bits_per_s(result['calibration']) / 1e3:.0f}kbit"
    result["crossover"] = on_hosts(__file__, rate, 2, ["--part", "crossover"])
    result["far"] = far([*result["scaling"].values()][-1]["machine"])
    say(result)
    write_json(args.json, __doc__, result)
    if args.png:
        draw(result, args.png)
    return 0


def balanced_bits_per_s(found: dict[str, Any]) -> float:
    """The rate at which an exchange lasts as long as the computation: part of it is no matter of the rate."""
    true_bits_per_s = statistics.fmean(found["tcp_bits_per_s"])
    fixed_s = found["exchange_s"] - 8 * found["received_bytes"] / true_bits_per_s
    left_s = max(found["compute_s"] - max(fixed_s, 0.0), found["compute_s"] / 4)
    return 8 * found["received_bytes"] / left_s * CALIBRATED_BITS_PER_S / true_bits_per_s


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize(watchdog_s=300)
    part = {"scaling": scaling, "calibrate": calibrate, "crossover": crossover}[args.part]
    found = part(world, args)
    if world.rank == 0:
        Path(args.worker).write_text(json.dumps(found))
    return 0


class Work:
    """A GPT on a mesh: a rank's step, its first state and its rows of one batch."""

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
        rows = np.random.default_rng(0).integers(0, model.vocabulary, (batch, length + 1)).astype(np.int32)
        self.batch = mesh.local_batch({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, rank)
        self.batch = jax.tree.map(jnp.asarray, self.batch)
        # Drawn on the host: eight ranks would compile the initialisation for longer than they measure.
        draw = np.random.default_rng(0)
        types = jax.eval_shape(lambda: tensor.init(model, jax.random.key(0), jnp.zeros((1, length), jnp.int32), rank))
        self.params = jax.tree.map(lambda x: jnp.asarray(0.02 * draw.standard_normal(x.shape, np.float32)), types)

        def step(params: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                return tensor.cross_entropy(model.apply({"params": params}, batch["tokens"]), batch["labels"], mesh)

            loss, grads = jax.value_and_grad(loss_fn)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

        self.step = step


def scaling(world: Any, args: Any) -> dict[str, Any]:
    """Every mesh of this many ranks at both batches, and the model's constants on these ranks."""
    import jax

    import jaxcross
    from jaxcross.tensor import Mesh
    from jaxcross.wire.bytes import wire_bytes

    steps, repeats = (1, 1) if args.smoke else (args.steps, args.repeats)
    batches = {"strong": STRONG, "weak": 4 * world.size}
    works = {(name, batch): Work(Mesh(**sizes), batch, world.rank, args.smoke)
             for name, sizes in MESHES[world.size].items() for batch in sorted(set(batches.values()))}  # fmt: skip
    calls = {key: jaxcross.crossover(work.step, axes=work.mesh.axes) for key, work in works.items()}
    raw: dict[Any, list[float]] = {key: [] for key in works}
    for repeat in range(-1, repeats):
        for key, work in works.items():
            params = work.params
            world.control.allgather_text("")  # all ranks begin together
            start = time.perf_counter()
            for _ in range(steps):
                params, metrics = calls[key](params, work.batch)
                jax.block_until_ready((params, metrics))
            if repeat >= 0:
                raw[key].append((time.perf_counter() - start) / steps)
    accounts = {}
    for key, work in works.items():
        report, _ = run(world, work, calls[key], jaxcross.Sequential(), steps, jobs=1)
        accounts[key] = report.summary()["jobs"][0]
    machine = constants(world, args, [work.mesh for work in works.values()])
    rows = []
    for (name, batch), work in works.items():
        # What the step holds on the device and what it compiled are not offered to users.
        compiled = calls[name, batch]._last[2].compiled_for(None)
        sent = sum(wire_bytes(x, work.mesh.axes) for x in compiled.program.exchanges)
        assert sent == work.cost.received_bytes, "the formula is exact"
        rows.append({
            "mesh": name, "axes": dict(work.mesh.axes), "batch": batch,
            "scaling": [kind for kind, size in batches.items() if size == batch],
            "s": spread(raw[name, batch]), "model_s": work.cost.seconds(machine),
            "model_exchange_s": work.cost.exchange_s(machine), "exchange_s": accounts[name, batch]["exchange_s"],
            "compute_s": accounts[name, batch]["compute_s"], "messages": work.cost.messages,
            "received_bytes": sent, "operations": work.cost.operations, "weights_bytes": work.cost.weights_bytes,
            "peak_live_bytes": compiled.peak_live_bytes(), "segments": len(compiled.runnables),
            "executables": len({id(r.call) for r in compiled.runnables}),
        })  # fmt: skip
    values = {name: getattr(machine, name) for name in ("alpha_s", "bytes_per_s", "operations_per_s")}
    return {"ranks": world.size, "rows": rows, "machine": values}


def constants(world: Any, args: Any, meshes: list[Any]) -> Any:
    """Alpha and beta fitted to lone collectives along the meshes' axes; operations of a step on each rank at once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    import jaxcross
    from jaxcross.tensor import Machine, Mesh

    sizes, repeats = ((256, 1024), 2) if args.smoke else ((256, 16_384, 262_144), 3)
    measured = []
    for axes in dict.fromkeys(tuple(mesh.axes.items()) for mesh in meshes):  # in one order on all ranks
        axis, ranks = axes[-1]
        ways = {
            "psum": (lambda x, a=axis: lax.psum(x, a), 2),
            "all_gather": (lambda x, a=axis: lax.all_gather(x, a), ranks),
            "psum_scatter": (lambda x, a=axis: lax.psum_scatter(x, a, tiled=True), 1),
        }
        for way, count in ((way, count) for way in ways for count in sizes):
            function, shares = ways[way]
            call = jaxcross.crossover(function, axes=dict(axes))
            x, took = jnp.ones(count, jnp.float32), []
            nbytes = shares * (ranks - 1) * count * 4 / ranks
            # As in a step, one after the other: a link that rested passes its first 256 kB at full speed.
            times = 2 if args.smoke else int(min(max(SUSTAINED_BYTES / nbytes, 4), 200))
            for _ in range(repeats + 1):
                world.control.allgather_text("")
                start = time.perf_counter()
                for _ in range(times):
                    jax.block_until_ready(call(x))
                took.append((time.perf_counter() - start) / times)
            messages = (2 if way == "psum" else 1) * (ranks - 1)
            measured.append((messages, nbytes, statistics.median(took[1:])))
    a, seconds = np.array([row[:2] for row in measured]), np.array([row[2] for row in measured])
    # Relative errors count: else the longest message alone would decide.
    (alpha, per_byte), *_ = np.linalg.lstsq(a / seconds[:, None], np.ones(len(a)), rcond=None)
    serial = Work(Mesh(), 2 if args.smoke else STRONG // 4, 0, args.smoke)
    step, took = jax.jit(serial.step), []
    for _ in range(repeats + 1):
        world.control.allgather_text("")
        start = time.perf_counter()
        jax.block_until_ready(step(serial.params, serial.batch))
        took.append(time.perf_counter() - start)
    found = [alpha, 1 / max(per_byte, 1e-12), serial.cost.operations / statistics.median(took[1:])]
    everywhere = [json.loads(text) for text in world.control.allgather_text(json.dumps(found))]
    alpha, beta, rate = (statistics.median(values) for values in zip(*everywhere, strict=True))
    return Machine(alpha_s=max(alpha, 0.0), bytes_per_s=beta, operations_per_s=rate)


def pair(world: Any, args: Any) -> Work:
    """The job of which two run in crossover: 1-D on two ranks."""
    from jaxcross.tensor import Mesh

    wide = {} if args.smoke else {"features": 384}
    return Work(Mesh(tensor=2), 4 if args.smoke else STRONG, world.rank, args.smoke, **wide)


def calibrate(world: Any, args: Any) -> dict[str, Any]:
    """A job's bytes, and its seconds of computation and of exchange, nothing else beside it."""
    import jaxcross

    work = pair(world, args)
    step = jaxcross.crossover(work.step, axes=work.mesh.axes)
    report, _ = run(world, work, step, jaxcross.Sequential(), 2 if args.smoke else 5)
    jobs = report.summary()["jobs"]
    mine = [statistics.fmean(job[key] for job in jobs) for key in ("compute_s", "exchange_s")]
    everywhere = [json.loads(text) for text in world.control.allgather_text(json.dumps(mine))]
    compute_s, exchange_s = (statistics.fmean(values) for values in zip(*everywhere, strict=True))
    return {"received_bytes": work.cost.received_bytes, "compute_s": compute_s, "exchange_s": exchange_s}


def crossover(world: Any, args: Any) -> dict[str, Any]:
    """Two jobs one after the other and in turns."""
    import jax
    import numpy as np

    import jaxcross

    work = pair(world, args)
    step = jaxcross.crossover(work.step, axes=work.mesh.axes)
    policies = {"one after the other": jaxcross.Sequential, "crossover": jaxcross.RoundRobin}
    steps, repeats = (3, 1) if args.smoke else (24, 2 * args.repeats - 1)
    raw: dict[str, list[float]] = {name: [] for name in policies}
    finals, summaries = {}, {}
    for repeat in range(-1, repeats):
        for name, policy in policies.items():
            count = 2 if repeat < 0 else steps
            world.control.allgather_text("")
            start = time.perf_counter()
            report, states = run(world, work, step, policy(), count)
            if repeat >= 0:
                raw[name].append((time.perf_counter() - start) / (2 * count))
                finals[name], summaries[name] = states, report.summary()
    first, second = (jax.tree.leaves(states) for states in finals.values())
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(first, second, strict=True))
    if not same:
        raise SystemExit("crossover and one after the other end in different states")
    return {"equal_to_the_bit": same, "s_per_job_step": {name: spread(times) for name, times in raw.items()},
            "accounts": summaries, "received_bytes": work.cost.received_bytes}  # fmt: skip


def run(world: Any, work: Work, step: Any, policy: Any, steps: int, jobs: int = 2) -> tuple[Any, list[Any]]:
    """Jobs of so many steps; the report and the final states."""
    import jax
    import jax.numpy as jnp

    import jaxcross

    def loop(job: Any) -> Any:
        params = job.restore(jax.tree.map(jnp.array, work.params), mode="local")  # ranks hold other parts
        for _ in range(steps):
            params, _ = step(params, work.batch)
        return params

    with jaxcross.Runner(world, policy) as runner:
        added = [runner.add(f"job{n}", loop) for n in range(jobs)]
        report = runner.run()
    return report, [job.state for job in added]


if __name__ == "__main__":
    raise SystemExit(main())
