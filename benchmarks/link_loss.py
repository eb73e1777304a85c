"""Over a slow link, which exchange trains a model to a given test loss first?

    python benchmarks/link_loss.py [--rate 25mbit] [--task TASK]... [--only NAME]... [--resume]
        [--json FILE] [--png FILE] [--draw] [--smoke]

We train on the tasks of `convergence.py`, with the same batch sizes and learning rates and with 3
seeds, but this time on two hosts with one core each and a real link between them. Steps run in a
plain loop under `crossover`.

`seconds` is the training time up to each evaluation. It includes neither the evaluations nor
compilation, because we run the steps of two evaluations before we start to measure. Note that a
link that has been idle passes 64 kB at full speed (`burst_kb`). That's a quarter of the model of
`text`, and all of the model of `images`.

FILE is written after each strategy. With `--resume`, only what FILE doesn't have yet is measured.
`--draw` draws the rows of FILE without measuring anything.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import link_loss_show
from convergence import SEEDS, TASKS
from hosts import on_hosts, parser_of_hosts
from workloads import kept, write_json

WAYS = (
    "mean",
    "mean, bfloat16",
    "top_k 1%, threshold",
    "delayed_mean",
    "diloco, every 16, outer momentum 0.5",
    "streaming_diloco, every 8, 4 bits",
    "sparse_loco 1/64, every 8",
    "no_loco, every 16",
)
RANKS = 2
BURST_KB = 64


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.set_defaults(rate="25mbit")
    options.add_argument(
        "--task", choices=TASKS, action="append", help="only this task; may be repeated"
    )
    options.add_argument(
        "--only", choices=WAYS, action="append", help="only this strategy; may be repeated"
    )
    options.add_argument(
        "--resume", action="store_true", help="add what the file of --json does not hold yet"
    )
    options.add_argument("--png", type=Path, metavar="FILE", help="draw loss against seconds")
    options.add_argument("--draw", action="store_true", help="draw what --json has, and end")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    if args.draw and not (args.png and args.json):
        options.error("`--draw` needs `--json` and `--png`.")
    result: dict[str, Any] = {"ranks": RANKS, "burst_kb": BURST_KB, "rows": []}
    if args.resume or args.draw:
        result |= kept(args.json, {"rows": []})
    if args.draw:
        link_loss_show.draw(result, args.png)
        return 0
    for task in args.task or TASKS:
        for name in args.only or WAYS:
            if any(
                (row["task"], row["strategy"], row["rate"]) == (task, name, args.rate)
                for row in result["rows"]
            ):
                continue
            arguments = ["--task", task, "--only", name]
            row = on_hosts(__file__, args.rate, RANKS, arguments, burst_kb=BURST_KB)
            result["rows"].append({"rate": args.rate, **row})
            print(link_loss_show.line(row), flush=True)
            write_json(args.json, __doc__, result)
    if args.png:
        link_loss_show.draw(result, args.png)
    return 0


def worker(args: Any) -> int:
    """Runs on each rank: trains one strategy on one task from each seed."""
    import jaxcross

    world = jaxcross.initialize(stall_timeout_s=120)

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from convergence import keys_of, plan
    from mpi4py import MPI
    from strategies import AXIS, ROUNDS, STRATEGIES

    # The parent's own `--task` and `--only` come first on this command line.
    name, task = args.only[-1], args.task[-1]
    (strategy,) = (s for s in (*STRATEGIES, *ROUNDS) if s.name == name)
    seeds = 1 if args.smoke else SEEDS
    made = plan(task, world.size, seeds, smoke=args.smoke)
    tx = strategy.make(made.setting)

    @jaxcross.crossover(axes=AXIS, donate_argnums=0)
    def step(carry: Any, key: jax.Array, number: jax.Array) -> Any:
        params, state = carry
        own = jax.random.fold_in(jax.random.fold_in(key, number), jax.lax.axis_index(AXIS))
        grads = jax.grad(made.task.loss)(params, made.task.batch(own, made.batch))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def evaluate(params: Any, state: Any) -> Any:
        return made.task.evaluate(strategy.model(params, state))

    def tested(carry: Any) -> tuple[float, float]:
        """Returns test loss and accuracy. Waits for all ranks."""
        params, state = carry
        each = MPI.COMM_WORLD.allgather(jax.tree.map(np.asarray, params))
        loss, accuracy = evaluate(
            jax.tree.map(lambda *xs: jnp.stack(xs), *each), jax.tree.map(lambda x: x[None], state)
        )
        return float(loss), float(accuracy)

    def train(seed: int, steps: int) -> dict[str, list[float]]:
        params = jax.tree.map(lambda x: jnp.array(x[seed]), made.params)
        carry = (params, tx.init(params))
        found: dict[str, list[float]] = {"seconds": [], "test_loss": [], "accuracy": []}
        took = 0.0
        for first in range(0, steps, made.every):
            MPI.COMM_WORLD.barrier()
            begin = time.perf_counter()
            for number in range(first, first + made.every):
                carry = step(carry, keys_of(seeds)[seed], jnp.int32(number))
            jax.block_until_ready(carry)
            took += time.perf_counter() - begin
            loss, accuracy = tested(carry)
            for key, value in (("seconds", took), ("test_loss", loss), ("accuracy", accuracy)):
                found[key].append(round(value, 4))
        return found

    train(0, 2 * made.every)
    each = [train(seed, made.steps) for seed in range(seeds)]
    if world.rank == 0:
        curves = {key: [found[key] for found in each] for key in each[0]}
        ends = [curve[-1] for curve in curves["test_loss"]]
        row = {
            "task": task,
            "strategy": name,
            "steps": made.steps,
            "every": made.every,
            "batch": made.batch,
            **curves,
            "final_test_loss": statistics.fmean(ends) if all(map(math.isfinite, ends)) else None,
            "s_per_step": statistics.median(curve[-1] for curve in curves["seconds"]) / made.steps,
        }
        Path(args.worker).write_text(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
