"""Does a warm-up close DiLoCo's gap to the mean on the language task of `convergence.py`?

    python benchmarks/diloco_gap.py [--json FILE] [--resume] [--only CASE]... [--smoke]

We train with the mean and with `diloco` on 4 ranks under `vmap`, with 3 seeds. `diloco` makes H =
16 local steps per exchange. There are two cases:
  as it is  400 steps from the start, with a batch of 4 on each rank
  warm-up   the first quarter of the steps uses the mean; when `diloco` takes over, Adam's state and
            the cosine decay of the learning rate continue
A seed's gap is the test loss at the last step minus the mean's test loss with the same seed. The
results don't depend on how fast the machine is. FILE is written after each row. With `--resume`,
only what FILE doesn't have yet is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from convergence import RANKS, SEEDS, plan, train
from strategies import AXIS, OUTER, agreed, one_axis
from workloads import kept, parser, write_json

from jaxcross import exchange

EVERY = 16
OUTERS = {
    "published": OUTER,
    "outer momentum 0.5": optax.sgd(0.7, momentum=0.5, nesterov=True),
}


CASES = {"as it is": 0.0, "warm-up": 0.25}
"""The fraction of the steps made with the mean."""


class WarmUpState(NamedTuple):
    """State of `after_warm_up`.

    Attributes:
        step: Counted from 0.
        diloco: Its anchor follows the parameters during the warm-up.
    """

    step: jax.Array
    diloco: Any


def after_warm_up(
    inner: optax.GradientTransformation, outer: optax.GradientTransformation, *, steps: int
) -> optax.GradientTransformation:
    """Returns `diloco` with a warm-up: the first steps use the mean of the gradients.

    When DiLoCo starts, it continues with the state of `inner`.
    """
    alone = exchange.diloco(inner, outer, AXIS, every=EVERY)

    def init(params: Any) -> WarmUpState:
        return WarmUpState(jnp.int32(0), alone.init(params))

    def update(grads: Any, state: WarmUpState, params: Any = None) -> tuple[Any, WarmUpState]:
        own, own_state = alone.update(grads, state.diloco, params)
        mean, mean_inner = inner.update(jax.lax.pmean(grads, AXIS), state.diloco.inner, params)
        mean_state = alone.init(optax.apply_updates(params, mean))._replace(inner=mean_inner)
        is_warm = state.step < steps
        updates, following = jax.tree.map(
            lambda a, b: jnp.where(is_warm, a, b), (mean, mean_state), (own, own_state)
        )
        return updates, WarmUpState(state.step + 1, following)

    return optax.GradientTransformation(init, update)


def row(case: str, way: str, *, smoke: bool) -> dict[str, Any]:
    """Trains one way in one case, and returns its row."""
    begin = time.perf_counter()
    ranks, seeds = (2, 1) if smoke else (RANKS, SEEDS)
    made = plan("text", ranks, seeds, smoke=smoke)
    warm_up = round(made.steps * CASES[case])
    inner = made.setting.optimizer
    if way == "mean":
        tx, model = (
            optax.chain(exchange.mean(AXIS), inner),
            lambda params, _: jax.tree.map(lambda x: x.mean(0), params),
        )
    else:
        tx = after_warm_up(inner, OUTERS[way], steps=warm_up)
        model = lambda params, state: agreed(params, state.diloco)  # noqa: E731
    curves = train(made, tx, model, axes=one_axis(ranks), steps=made.steps, every=made.every)
    ends = [curve[-1] for curve in curves["test_loss"]]
    return {
        "case": case, "way": way, "steps": made.steps, "every": made.every, "batch": made.batch,
        "warm_up_steps": 0 if way == "mean" else warm_up, **curves,
        "final_test_loss": statistics.fmean(ends), "wall_s": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def gaps(rows: Mapping[tuple[str, str], Mapping[str, Any]], case: str, way: str) -> list[float]:
    """Returns each seed's final test loss minus that of the plain mean."""
    mean = rows["as it is", "mean"]["test_loss"]
    return [
        own[-1] - other[-1] for own, other in zip(rows[case, way]["test_loss"], mean, strict=True)
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--resume", action="store_true", help="add what the file of --json does not hold yet"
    )
    options.add_argument(
        "--only", metavar="CASE", action="append", choices=CASES, help="may be repeated"
    )
    args = options.parse_args()
    rows = kept(args.json if args.resume else None, {"rows": []})["rows"]
    known = {(made["case"], made["way"]) for made in rows}
    for case in args.only or CASES:
        for way in ("mean", *OUTERS):
            if (case, way) in known or (way == "mean" and case != "as it is"):
                continue
            rows.append(row(case, way, smoke=args.smoke))
            print(
                f"{case}, {way}: test loss {rows[-1]['final_test_loss']:.3f}, {rows[-1]['wall_s']} "
                "s",
                flush=True,
            )
            write_json(
                args.json, __doc__, {"ranks": RANKS, "seeds": SEEDS, "every": EVERY, "rows": rows}
            )
    by = {(made["case"], made["way"]): made for made in rows}
    for case, way in by:
        if way != "mean" and ("as it is", "mean") in by:
            each = ", ".join(f"{gap:+.3f}" for gap in gaps(by, case, way))
            print(f"{case}, {way}: {each} to the mean, by seed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
