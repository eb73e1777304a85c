"""How long does each exchange of a model's gradients take on a slow link, relative to the mean?

    python benchmarks/exchanges.py [--rate 500mbit] [--hosts 2] [--local 1] [--only NAME ...]
        [--json FILE] [--smoke]

We exchange the gradients of ResNet-50 and of a small Transformer over a real link between the
hosts. By default, there's one rank on each host. A step consists only of the exchange and SGD,
without a forward or backward pass. The strategies take turns in one run, and each of them starts
from its initial state. We report for each strategy:
  total  the seconds of a step, including its computation
  wire   the seconds of the step's exchanges, not counting the time that a rank waits because
         another rank computes for longer
  bytes  the bytes of the step's exchanges
All three are also given relative to `mean` in the same repeat. There are targets for some of these
ratios. If only some of the repeats meet a target, it's `undecided`.

If a strategy exchanges only every few steps, we measure a whole cycle and report the mean over its
steps. A turn has two steps. For a small model it has up to eight, namely as many as exchange about
20 million elements. `ParameterServer` is the real one. Its `wire` is the time of `push_pull`, which
includes the servers' updates and may include waiting for other workers.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from pages.exchanges import ratios
from workloads import spread, write_json

# Each target limits the ratio of one strategy's time to another's. `as chosen` is the selection
# that users get by default; the other selections are forced.
TOP_K = ("top_k 1%, as chosen", "top_k 1%, exact", "top_k 1%, threshold")
TARGETS = (
    *(("top-k at 1%, wire", "wire", name, "mean", 1 / 20) for name in TOP_K),
    *(("top-k at 1%, selection and wire", "total", name, "mean", 1 / 4) for name in TOP_K),
    ("Adasum", "total", "adasum of gradients", "mean", 1.3),
    ("Adasum of deltas", "total", "adasum of deltas", "mean", 1.3),
    ("bfloat16, wire", "wire", "mean, bfloat16", "mean", 0.55),
    ("norms shared out", "total", "shared norms", "norms on every rank", 1.0),
)

TURN = 20_000_000  # elements exchanged per turn, rounded to whole steps

# The servers that we measure, and how many steps a worker may be ahead.
SERVERS = {"ParameterServer, synchronous": 0, "ParameterServer, asynchronous": math.inf}


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.add_argument("--hosts", type=int, default=2, help="default %(default)s")
    options.add_argument(
        "--local",
        type=int,
        default=1,
        help="ranks a host, which share its core (default %(default)s)",
    )
    options.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    options.add_argument("--models", default="transformer,resnet50", help="default %(default)s")
    options.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="mean, and what begins so"
    )
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = on_hosts(__file__, args.rate, args.hosts, local=args.local)
    result |= {"hosts": args.hosts, "ranks_a_host": args.local}
    result["targets"] = [
        found for model in result["models"] for found in judge(model, result["models"][model])
    ]
    for model, rows in result["models"].items():
        print(f"{model}: {rows['elements'] / 1e6:.2f} million elements")
        for name, row in rows["strategies"].items():
            print(
                f"  {name:36} total {row['total']['median']:.4f} s ({row['total_over_mean']:.2f} "
                f"of the mean's), wire {row['wire']['median']:.4f} s "
                f"({row['wire_over_mean']:.3f}), {row['bytes'] / 1e6:.3f} MB "
                f"({row['bytes_over_mean']:.3f})"
            )
    for found in result["targets"]:
        print(
            f"{found['model']}: {found['what']}, {found['of']}: {found['ratio']:.3f} of "
            f"{found['over']}'s ({min(found['ratios']):.3f} to {max(found['ratios']):.3f}), target "
            f"{found['target']:.3f}: {found['verdict']}"
        )
    write_json(args.json, __doc__, result)
    return 0


def judge(model: str, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets whose strategies are in this run.

    A target is met or missed if every repeat agrees, and undecided otherwise.
    """
    found: list[dict[str, Any]] = []
    for what, key, name, over, target in TARGETS:
        if {name, over} <= rows["strategies"].keys():
            each = ratios(rows["strategies"], name, key, over)
            verdict = (
                "met" if max(each) <= target else "missed" if min(each) > target else "undecided"
            )
            found.append(
                {
                    "model": model,
                    "what": what,
                    "of": name,
                    "over": over,
                    "ratio": statistics.median(each),
                    "ratios": each,
                    "target": target,
                    "verdict": verdict,
                }
            )
    return found


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from strategies import AXIS, ROUTES, STRATEGIES, Setting, Strategy, received_bytes

    if args.smoke:
        works = {"mlp": workloads.mlp(width=64)}
    else:
        works = {
            "transformer": workloads.transformer(layers=2, width=192, length=128, batch_size=4),
            "resnet50": workloads.resnet("resnet50", batch_size=4, image_size=224),
        }
        works = {name: works[name] for name in args.models.split(",")}
    sgd = optax.sgd(1e-3)
    setting = Setting(
        ranks=world.size,
        optimizer=sgd,
        signs=sgd,
        adam_rate=1e-3,
        norms=jaxcross.exchange.lars(AXIS, 1e-3),
        freeze_step=1,
    )
    rivals = (
        *STRATEGIES,
        *ROUTES,
        Strategy(
            name="top_k 1%, as chosen",
            make=lambda s: optax.chain(jaxcross.exchange.top_k(0.01, AXIS), s.optimizer),
        ),
        Strategy(
            name="top_k 1%, one bucket",
            make=lambda s: optax.chain(
                jaxcross.exchange.top_k(0.01, AXIS, bucket=True), s.optimizer
            ),
        ),
        Strategy(
            name="norms on every rank",
            make=lambda s: optax.chain(jaxcross.exchange.mean(AXIS), optax.lars(1e-3)),
        ),
    )

    def wanted(name: str) -> bool:
        return not args.only or name == "mean" or name.startswith(tuple(args.only))

    servers = {name: bound for name, bound in SERVERS.items() if wanted(name)}
    repeats = 1 if args.smoke else args.repeats

    def cross(tx: optax.GradientTransformation, axes: dict[str, int]) -> Any:
        def step(state: Any, grads: Any) -> Any:
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {}

        return jaxcross.crossover(step, axes=axes, donate_argnums=0)

    def measure(model: str, work: Any) -> dict[str, Any]:
        """Measures all selected strategies on a model's gradients, in turn."""
        params = jax.tree.map(np.asarray, work.state(0)[0])
        elements = sum(x.size for x in jax.tree.leaves(params))
        fewest = 2 if args.smoke else max(2, min(8, TURN // elements))
        rng = np.random.default_rng(world.rank)
        grads = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape, dtype=np.float32)), params
        )
        made = {s.name: s.make(setting) for s in rivals if wanted(s.name)}
        nbytes: dict[str, float] = {}
        for s in rivals:
            try:
                if s.name in made:
                    kinds = s.begins(setting) or range(s.cycle)
                    each = received_bytes(made[s.name], params, s.axes(world.size), kinds)
                    nbytes[s.name] = statistics.fmean(each.values())
            except ValueError as error:  # doesn't support this number of ranks
                if world.rank == 0:
                    print(f"{s.name} is left out: {error}", flush=True)
        chosen = [s for s in rivals if s.name in nbytes]
        steps = {s.name: cross(made[s.name], s.axes(world.size)) for s in chosen}

        def of_strategy(s: Strategy) -> Any:
            # The first step doesn't count, so that 1-bit Adam is already sending signs.
            count = 1 + s.cycle * -(-fewest // s.cycle)
            state = jax.tree.map(jnp.array, params)
            batches = itertools.repeat(grads, count)
            job = jaxcross.Job(s.name, steps[s.name], (state, made[s.name].init(state)), batches)
            return jaxcross.run([job], world=world)

        def of_server(name: str, staleness: float) -> Any:
            def train(_: Any) -> None:
                with jaxcross.ParameterServer(params, sgd, staleness=staleness) as server:
                    for _ in range(1 + fewest):
                        server.push_pull(grads)

            with jaxcross.Runner(world) as runner:
                runner.add(name, train)
                return runner.run()

        ways = {s.name: functools.partial(of_strategy, s) for s in chosen}
        ways |= {
            name: functools.partial(of_server, name, staleness)
            for name, staleness in servers.items()
        }
        raw: dict[str, dict[str, list[float]]] = {
            name: {"total": [], "wire": [], "compute": []} for name in ways
        }
        for repeat in range(-1, repeats):  # the first round compiles
            for name, way in ways.items():
                (account,) = way().rounds.jobs
                own = {
                    "total": account.period_s,
                    "wire": account.exchange_s,
                    "compute": account.compute_s,
                }
                if repeat >= 0:
                    for key, value in own.items():
                        raw[name][key].append(value)
                if world.rank == 0:
                    times = ", ".join(f"{key} {value:.4f} s" for key, value in own.items())
                    print(f"{model}, repeat {repeat}: {name}: {times}", flush=True)
        whole = sum(x.nbytes for x in jax.tree.leaves(params))
        nbytes |= dict.fromkeys(servers, 2 * (world.size - 1) / world.size * whole)
        rows: dict[str, Any] = {
            name: {"bytes": nbytes[name], **{key: spread(values) for key, values in found.items()}}
            for name, found in raw.items()
        }
        for name, row in rows.items():
            row["bytes_over_mean"] = row["bytes"] / rows["mean"]["bytes"]
            for key in ("total", "wire"):
                row[f"{key}_over_mean"] = statistics.median(ratios(rows, name, key))
        return {"elements": elements, "steps": fewest, "strategies": rows}

    models = {model: measure(model, work) for model, work in works.items()}
    if world.rank == 0:
        Path(args.worker).write_text(json.dumps({"models": models}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
