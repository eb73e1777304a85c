"""How much do accelerator and host hand over per exchange, and how often does it go back and forth?

    python benchmarks/hand_overs.py [--ranks 4] [--models mlp,resnet50] [--json FILE] [--smoke]

With an accelerator, the arrays of an exchange have to be copied to the host and back. We count
these copies in the cut programs, so the script needs neither an accelerator nor MPI, and nothing is
timed. We count them for two cuts:
  apart  work between two exchanges goes to the accelerator unless it's a single pass over memory,
         as on a CPU
  cut    small work between two exchanges stays on the host as well, which is what jaxcross does
         with an accelerator
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import workloads
from strategies import AXIS, ROUTES, STRATEGIES, Setting, Strategy
from workloads import parser, write_json

from jaxcross import exchange
from jaxcross.program import stages
from jaxcross.program.host_work import HostWork
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import LocalRanks, decide


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4, help="default %(default)s")
    options.add_argument("--models", default="mlp,resnet50", help="default %(default)s")
    args = options.parse_args()
    models = ["mlp"] if args.smoke else args.models.split(",")
    result: dict[str, Any] = {"ranks": args.ranks, "models": {}}
    for model in models:
        params, *_ = jax.eval_shape(lambda model=model: _workload(model).state(0))
        rows = result["models"][model] = {}
        print(
            f"{model}: {sum(x.size for x in jax.tree.leaves(params)) * 4 / 1e6:.1f} MB of gradients"
        )
        for strategy in (*STRATEGIES, *ROUTES):
            row = rows[strategy.name] = _row(strategy, params, args.ranks)
            apart, cut = row["apart"], row["cut"]
            print((
                f"  {strategy.name:38} there and back {apart['trips']:2} -> {cut['trips']:2}, "
                f"arrays {apart['arrays']:4} -> {cut['arrays']:4}, MB {apart['bytes'] / 1e6:8.2f} "
                f"-> {cut['bytes'] / 1e6:8.2f}"
            ), flush=True)  # fmt: skip
    write_json(args.json, __doc__, result)


def _workload(model: str) -> workloads.Workload:
    if model == "mlp":
        return workloads.mlp(width=64, batch_size=8)
    return workloads.resnet(model, batch_size=1, image_size=224)


def _row(strategy: Strategy, params: Any, ranks: int) -> dict[str, dict[str, int]]:
    """Returns the counts for the step that exchanges most, with both cuts."""
    sgd = optax.sgd(1e-3)
    norms = exchange.lars(AXIS, 1e-3)
    setting = Setting(
        ranks=ranks, optimizer=sgd, signs=sgd, adam_rate=1e-3, norms=norms, freeze_step=1
    )
    traced = _traced(strategy.make(setting), params, strategy.axes(ranks))
    row: dict[str, dict[str, int]] = {}
    for name, patched in (
        ("apart", mock.patch.object(HostWork, "costs_less", return_value=False)),
        ("cut", nullcontext()),
    ):
        accelerator = mock.patch("jaxcross.program.cut.on_accelerator", return_value=True)
        with accelerator, patched:
            programs = [
                _cut(traced, step) for step in strategy.begins(setting) or range(strategy.cycle)
            ]
        row[name] = counts(
            max(programs, key=lambda program: sum(x.nbytes for x in program.exchanges))
        )
    return row


def _traced(tx: optax.GradientTransformation, params: Any, axes: dict[str, int]) -> Traced:
    """Traces an update by `tx` of gradients that the accelerator has computed."""

    def step(grads: Any, state: Any, params: Any) -> Any:
        grads = jax.tree.map(lambda x: jax.lax.cumsum(x.reshape(-1)).reshape(x.shape), grads)
        return tx.update(grads, state, params)

    _, state = jax.make_jaxpr(tx.init, axis_env=list(axes.items()), return_shape=True)(params)
    return trace(step, (params, state, params), axes=axes, wire=LocalRanks())


def _cut(traced: Traced, step: int) -> Program:
    leaves = [
        jnp.int32(step) if x.shape == () and x.dtype == jnp.int32 else x for x in traced.in_avals
    ]
    return stages.cut(decide(traced, leaves))


def counts(program: Program) -> dict[str, int]:
    """Counts what the program's collective segments receive from the accelerator and return to it.

    `trips`: computations between two exchanges, each of which needs a transfer in both directions.
    Outputs count as returned even if no computation reads them.
    """
    collectives = program.collectives
    constants = {*program.inputs[: program.constants]}
    moved = [
        v for s in collectives for v in (*(v for v in s.inputs if v not in constants), *s.outputs)
    ]
    after: set[int] = set()
    for segment, needs in zip(program.segments, program.order.needs, strict=True):
        if segment.kind == "collective" or not after.isdisjoint(needs):
            after.add(segment.index)
    before = {n for s in collectives for n in program.order.needs[s.index]}
    trips = sum(s.kind == "compute" and s.index in after & before for s in program.segments)
    return {
        "trips": trips,
        "arrays": len(moved),
        "bytes": sum(program.values[v].nbytes for v in moved),
    }


if __name__ == "__main__":
    main()
