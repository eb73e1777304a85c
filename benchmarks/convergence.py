"""What does each exchange cost in convergence, per step and per byte that a rank receives?

    python benchmarks/convergence.py [--json FILE] [--png FILE] [--resume]
        [--only NAME]... [--task TASK] [--smoke]

We train with every strategy of `strategies.py` on an image task (momentum SGD) and a language task
(Adam), with 4 ranks under `vmap` and 3 seeds. The learning rates belong to the tasks. They aren't
tuned for each strategy, and they decay to zero as a cosine. We evaluate the mean of the ranks'
parameters, except for `elastic_average`, where we evaluate its centre.

`received_bytes` is the number of bytes that a rank has received up to a step, according to the
formulas of the exchanges. In addition, there are two experiments:
  growth  The effective batch grows from 1 rank to 8 ranks, with a constant batch per rank. We use
          plain SGD at the constant rate that was best for 1 rank.
  longer  The mean and top-k on the language task, for three times as many steps.
The results don't depend on how fast the machine is. Everything together takes about two hours on
one core. With `--resume`, only what the file doesn't have yet is measured.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tasks
from convergence_show import draw
from strategies import (
    AXIS,
    CONTROLS,
    GENTLER,
    ROUNDS,
    ROUTES,
    STRATEGIES,
    Setting,
    Strategy,
    one_axis,
    received_bytes,
)
from tables import kept_result
from workloads import parser, write_json

from jaxcross import exchange

RANKS, SEEDS = 4, 3
TASKS = ("images", "text")
WITHIN = 0.01  # of the mean's accuracy: the target of top-k at 1%
RATES = (0.03, 0.1, 0.3, 1.0)
GROWTH = (1, 2, 4, 8)
REACHED = 0.9  # accuracy


class Plan(NamedTuple):
    """A task, its initial parameters (seeds along the first axis), optimizers and length."""

    task: tasks.Task
    params: Any
    setting: Setting
    batch: int
    steps: int
    every: int


def plan(name: str, ranks: int, seeds: int, *, smoke: bool, times: int = 1) -> Plan:
    """Returns a task's plan, with `times` as many steps as usual."""
    steps, every = (4, 2) if smoke else (1200, 40) if name == "images" else (400, 20)
    steps, every = steps * times, every * times

    def falling(rate: float) -> optax.Schedule:
        return optax.cosine_decay_schedule(rate, steps)

    task = tasks.digits() if name == "images" else tasks.text()
    params = jax.jit(jax.vmap(task.init))(keys_of(seeds))
    common: dict[str, Any] = dict(
        ranks=ranks,
        signs=optax.sgd(falling(0.002)),
        adam_rate=falling(0.003),
        freeze_step=steps // 5 + 1,
    )
    if name == "images":
        norms = exchange.lars(AXIS, falling(0.1), trust_coefficient=0.1)
        setting = Setting(optimizer=optax.sgd(falling(0.05), momentum=0.9), norms=norms, **common)
        return Plan(task, params, setting, 16, steps, every)
    setting = Setting(
        optimizer=optax.adam(falling(0.003)), norms=exchange.lamb(AXIS, falling(0.01)), **common
    )
    return Plan(task, params, setting, 4, steps, every)


def keys_of(seeds: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), seeds)


Curves = dict[str, list[list[float]]]  # name -> [seed][point]


Model = Callable[[Any, Any], Any]


def train(
    made: Plan,
    tx: optax.GradientTransformation,
    model: Model,
    *,
    axes: dict[str, int],
    steps: int,
    every: int,
) -> Curves:
    """Trains, and returns the losses and the accuracy after every `every` steps.

    The training loss is the mean since the last point. Test loss and accuracy are those of the
    model at that point.
    """
    task, names = made.task, tuple(axes)

    def advance(carry: Any, key: jax.Array, first: jax.Array) -> Any:
        def step(carry: Any, number: jax.Array) -> Any:
            params, state = carry
            own = jax.random.fold_in(jax.random.fold_in(key, number), jax.lax.axis_index(names))
            loss, grads = jax.value_and_grad(task.loss)(params, task.batch(own, made.batch))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), jax.lax.pmean(loss, names)

        carry, losses = jax.lax.scan(step, carry, first + jnp.arange(every))
        return carry, losses.mean()

    def on_ranks(function: Any, in_axes: Any = 0) -> Any:
        for name, size in reversed(axes.items()):
            function = jax.vmap(function, in_axes, axis_name=name, axis_size=size)
        return function

    def point(of_seed: Any, first: jax.Array) -> Any:
        carry, key = of_seed
        carry, loss = on_ranks(advance, in_axes=(0, None, None))(carry, key, first)
        ranks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(axes) :]), carry)
        return carry, (loss.reshape(-1)[0], *task.evaluate(model(*ranks)))

    # We train one seed after the other, because XLA's fast top-k for the CPU supports at most two
    # dimensions.
    def more(carry: Any, keys: jax.Array, first: jax.Array) -> Any:
        return jax.lax.map(functools.partial(point, first=first), (carry, keys))

    seeds = len(jax.tree.leaves(made.params)[0])
    keys = keys_of(seeds)
    carry = jax.jit(jax.vmap(on_ranks(lambda params: (params, tx.init(params)), in_axes=None)))(
        made.params
    )
    run, points = jax.jit(more, donate_argnums=0), []
    for first in range(0, steps, every):
        carry, measured = run(carry, keys, jnp.int32(first))
        points.append(jax.device_get(measured))
    return {
        name: [[round(float(p[n][seed]), 4) for p in points] for seed in range(seeds)]
        for n, name in enumerate(("loss", "test_loss", "accuracy"))
    }


def strategy_row(name: str, strategy: Strategy, made: Plan) -> dict[str, Any]:
    begin = time.perf_counter()
    tx, axes = strategy.make(made.setting), strategy.axes(made.setting.ranks)
    curves = train(made, tx, strategy.model, axes=axes, steps=made.steps, every=made.every)
    params = jax.tree.map(lambda x: x[0], made.params)
    kinds = [strategy.like(step, made.setting) for step in range(made.steps)]
    each = received_bytes(tx, params, axes, kinds)
    received = [
        sum(each[kind] for kind in kinds[: n + made.every])
        for n in range(0, made.steps, made.every)
    ]
    return {
        "task": name,
        "strategy": strategy.name,
        **curves,
        "received_bytes": received,
        **{f"final_{key}": mean_of_last(curves[key]) for key in ("test_loss", "accuracy")},
        "wall_s": round(time.perf_counter() - begin, 1),
    }


def mean_of_last(curves: list[list[float]]) -> float:
    return statistics.fmean(curve[-1] for curve in curves)


def longer(kept: list[dict[str, Any]], *, smoke: bool) -> dict[str, Any]:
    """Does top-k get closer to the mean if we train longer with Adam? Adds the missing rows."""
    made = plan(
        "text", 2 if smoke else RANKS, 1 if smoke else SEEDS, smoke=smoke, times=1 if smoke else 3
    )
    few = [s for s in STRATEGIES if s.name in ("mean", "top_k 1%, exact")]
    known = {row["strategy"] for row in kept}
    new = [s for s in (*few, *(() if smoke else GENTLER)) if s.name not in known]
    return {"steps": made.steps, "rows": [*kept, *(strategy_row("text", s, made) for s in new)]}


WAYS: dict[str, Callable[[float, int], optax.GradientTransformation]] = {
    "mean": lambda rate, ranks: optax.chain(exchange.mean(AXIS), optax.sgd(rate)),
    "mean, rate times ranks": lambda rate, ranks: optax.chain(
        exchange.mean(AXIS), optax.sgd(rate * ranks)
    ),
    "adasum": lambda rate, ranks: optax.chain(exchange.adasum(AXIS), optax.sgd(rate)),
}


def growth(*, smoke: bool) -> dict[str, Any]:
    """Counts the steps that each way needs to reach an accuracy as the number of ranks grows.

    All ways use the learning rate that is best for one rank.
    """
    seeds, steps, every = (1, 4, 2) if smoke else (SEEDS, 400, 10)
    made = plan("images", 1, seeds, smoke=smoke)
    rates, sizes, reached = (RATES[:1], GROWTH[:2], 0.0) if smoke else (RATES, GROWTH, REACHED)

    def row(way: str, rate: float, ranks: int) -> dict[str, Any]:
        curves = train(
            made,
            WAYS[way](rate, ranks),
            STRATEGIES[0].model,
            axes=one_axis(ranks),
            steps=steps,
            every=every,
        )
        firsts = [
            next((every * (n + 1) for n, value in enumerate(curve) if value >= reached), math.inf)
            for curve in curves["accuracy"]
        ]
        middle = statistics.median(firsts)
        return {
            "way": way,
            "rate": rate,
            "ranks": ranks,
            "steps_to_reach": None if math.isinf(middle) else middle,
            **{
                f"final_{key}": mean_of_last(curves[key])
                for key in ("loss", "test_loss", "accuracy")
            },
            **curves,
        }

    sweep = [row("mean", rate, 1) for rate in rates]
    best = min(sweep, key=lambda r: (r["steps_to_reach"] or math.inf, -r["final_accuracy"]))["rate"]
    known = {("mean", 1): next(r for r in sweep if r["rate"] == best)}
    return {
        "batch": made.batch,
        "steps": steps,
        "every": every,
        "seeds": seeds,
        "reached": reached,
        "rate": best,
        "sweep": sweep,
        "rows": [
            known.get((way, ranks)) or row(way, best, ranks) for way in WAYS for ranks in sizes
        ],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a line per strategy and task, and how much accuracy top-k at 1% loses."""
    dense = {row["task"]: row["final_accuracy"] for row in rows if row["strategy"] == "mean"}
    for row in rows:
        lost = dense[row["task"]] - row["final_accuracy"]
        diverged = row["final_test_loss"] is None or not math.isfinite(row["final_test_loss"])
        loss = "diverged" if diverged else f"{row['final_test_loss']:.3f}"
        print(
            f"{row['task']:9} {row['strategy']:32} accuracy {row['final_accuracy']:.3f} "
            f"({-lost:+.3f}), test loss {loss}, {row['received_bytes'][-1] / 1e6:.2f} MB"
        )
        if row["strategy"].startswith("top_k 1%"):
            print(f"  within {WITHIN:.0%} of the mean: {'met' if lost <= WITHIN else 'missed'}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--png", type=Path, metavar="FILE", help="draw the curves")
    options.add_argument(
        "--resume", action="store_true", help="add what the file of --json does not hold yet"
    )
    options.add_argument(
        "--only", metavar="NAME", action="append", help="only strategies whose names begin so"
    )
    options.add_argument(
        "--task", choices=TASKS, action="append", help="only this task; may be repeated"
    )
    args = options.parse_args()
    ranks, seeds = (2, 1) if args.smoke else (RANKS, SEEDS)
    result: dict[str, Any] = {"ranks": ranks, "seeds": seeds, "tasks": {}, "rows": []}
    if args.resume and args.json and args.json.exists():
        kept = kept_result(args.json)
        result.update({key: kept[key] for key in ("rows", "growth", "longer") if key in kept})
    whole = not (args.only or args.task)
    if whole and "growth" not in result:
        result["growth"] = growth(smoke=args.smoke)
        write_json(args.json, __doc__, result)
    if whole:
        result["longer"] = longer(
            result["longer"]["rows"] if "longer" in result else [], smoke=args.smoke
        )
        write_json(args.json, __doc__, result)
    known = {(row["task"], row["strategy"]) for row in result["rows"]}
    for name in TASKS:
        made = plan(name, ranks, seeds, smoke=args.smoke)
        result["tasks"][name] = {"batch": made.batch, "steps": made.steps, "every": made.every}
        if args.task and name not in args.task:
            continue
        for strategy in (
            toys(name) if args.smoke else (*STRATEGIES, *ROUTES, *GENTLER, *ROUNDS, *CONTROLS)
        ):
            wanted = not args.only or strategy.name.startswith(tuple(args.only))
            if wanted and (name, strategy.name) not in known:
                result["rows"].append(strategy_row(name, strategy, made))
                print(f"{name}: {strategy.name}, {result['rows'][-1]['wall_s']} s", flush=True)
                write_json(args.json, __doc__, result)
    write_json(args.json, __doc__, result)
    show(result["rows"])
    if "longer" in result:
        print(f"{result['longer']['steps']} steps:")
        show(result["longer"]["rows"])
    for row in result.get("growth", {"rows": []})["rows"]:
        print(
            f"{row['ranks']} ranks, {row['way']:24} rate {row['rate']}: "
            f"{row['steps_to_reach'] or 'no'} steps to {result['growth']['reached']:.0%}, at the "
            f"end {row['final_accuracy']:.3f}"
        )
    if args.png:
        draw(result, args.png)
    return 0


def toys(task: str) -> list[Strategy]:
    """A few strategies, one of each kind: each takes a second or two to compile."""
    names = (
        ("mean", "top_k 1%", "one_bit", "local_sgd", "elastic", "mean, hier")
        if task == "images"
        else ("mean",)
    )
    return [next(s for s in (*STRATEGIES, *ROUTES) if s.name.startswith(name)) for name in names]


if __name__ == "__main__":
    raise SystemExit(main())
