"""What does the cut cost if there's nothing to hide: one job on one rank, against plain `jax.jit`?

    python benchmarks/overhead.py [--json FILE] [--smoke] [--cores N]

Times: we alternate short runs of the plain step, of the cut step, and of the cut step's compute
segments under plain `jax.jit` (`by_hand`). The last shows what it would cost to split the step by
hand in any way. We report the difference of the medians, and the median of the differences of
neighbouring runs.

Host time per segment: we time calls that only dispatch.

Memory: the peak of live bytes of the cut program over the figure that XLA gives for the fused step.
The peak counts the arrays that are passed between segments and XLA's buffer assignment.

The process uses only one core, as if several ranks shared a host. With `--cores 0`, it uses all
cores.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from ranks import as_rank
from workloads import Workload, in_turn, mlp, parser, resnet, spread, transformer, write_json

import jaxcross
from jaxcross.program import stages

AXIS = "batch"


def plain_and_cut(work: Workload, cut: Any = "whole") -> tuple[Any, Any]:
    plain = jax.jit(work.make(lambda tree: tree), donate_argnums=0)
    crossed = jaxcross.crossover(
        work.make(lambda tree: lax.pmean(tree, AXIS)), axes=AXIS, cut=cut, donate_argnums=0
    )
    return plain, crossed


def by_hand(step: Any, state: Any, batch: Any) -> Callable[..., Any]:
    """Returns the cut step with each compute segment under `jax.jit`.

    The exchange is left out, because there's only one rank.
    """
    program = stages.cut(step.trace(state, batch))
    compiled = stages.compile(program)
    parts = []
    for segment, may in zip(program.segments, program.order.donates, strict=True):
        positions = tuple(n for n, v in enumerate(segment.inputs) if v in may)
        call = jax.jit(jaxpr_as_fun(segment.jaxpr), donate_argnums=positions, keep_unused=True)
        parts.append(
            (
                segment.inputs,
                segment.outputs,
                call if segment.kind == "compute" else lambda *args: args,
            )
        )

    def run(state: Any, batch: Any) -> Any:
        env = dict(
            zip(
                program.inputs, (*compiled.constants, *jax.tree.leaves((state, batch))), strict=True
            )
        )
        for inputs, outputs, call in parts:
            env.update(zip(outputs, call(*(env[v] for v in inputs)), strict=True))
        return jax.tree.unflatten(compiled.out_tree, [env[v] for v in program.outputs])

    return run


def alternate(work: Workload, *, repeats: int, steps: int) -> dict[str, Any]:
    """Times the rivals in turn, and compares the cut and the split by hand with plain jit."""
    batch = work.batch(0)
    plain, crossed = plain_and_cut(work)
    rivals = {"jit": plain, "jaxcross": crossed, "by_hand": by_hand(crossed, work.state(0), batch)}
    states = {name: work.state(0) for name in rivals}
    raw = in_turn(rivals, states, batch, repeats=repeats, steps=steps)
    one, other, hand = (np.array(raw[name]) for name in rivals)
    return {
        **{name: spread(values) for name, values in raw.items()},
        "ratio_of_medians": float(np.median(other) / np.median(one)),
        "median_difference_us": float(np.median(other - one) * 1e6),
        "difference_of_lower_quartiles_us": float(
            (np.percentile(other, 25) - np.percentile(one, 25)) * 1e6
        ),
        "by_hand_median_difference_us": float(np.median(hand - one) * 1e6),
    }


def host_time_us(work: Workload, *, repeats: int) -> dict[str, float]:
    """Returns the calling thread's CPU time in a call that only dispatches.

    It's reported per step and per segment.
    """
    _, step = plain_and_cut(work)
    state, batch = work.state(0), work.batch(0)
    segments = len(stages.cut(step.trace(state, batch)).segments)
    raw = []
    for _ in range(repeats):
        jax.block_until_ready(state)
        start = time.thread_time_ns()
        state, _ = step(state, batch)
        raw.append((time.thread_time_ns() - start) / 1e3)
    return {
        "us_per_step": float(np.median(raw)),
        "segments": segments,
        "us_per_segment": float(np.median(raw)) / segments,
    }


def memory(work: Workload, cuts: tuple[Any, ...]) -> dict[str, float]:
    """Returns the peak live bytes of the fused step, and those of each cut relative to it.

    The cuts count with and without the buffers that exchanges hold.
    """
    state, batch = work.state(0), work.batch(0)
    plain, step = plain_and_cut(work)
    stats = plain.lower(state, batch).compile().memory_analysis()
    fused = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    fused += stats.temp_size_in_bytes
    result = {"fused_bytes": float(fused)}
    for cut in cuts:
        program = stages.cut(step.trace(state, batch), cut)
        peak = stages.compile(program).peak_live_bytes()
        received = sum(
            x.nbytes for s in program.segments[: program.collectives[-1].index] for x in s.exchanges
        )
        result[f"cut_{cut}_over_fused"] = peak / fused
        result[f"cut_{cut}_over_fused_without_exchange_buffers"] = (peak - received) / fused
    return result


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--cases", default="", metavar="A,B", help="only these, of those it prints (default: all)"
    )
    options.add_argument(
        "--cores", type=int, default=1, metavar="N", help="cores of the rank, 0: all (default: 1)"
    )
    args = options.parse_args()
    as_rank(args.cores)
    warnings.filterwarnings(
        "ignore", message="Some donated buffers"
    )  # not all donated arguments of the split by hand can be used
    jaxcross.initialize()
    if args.smoke:
        big, language, repeats, cuts = (
            mlp(width=64),
            transformer(layers=1, width=64, length=16),
            3,
            ("whole", 2),
        )
    else:
        big = resnet(batch_size=4, image_size=224)
        language, repeats, cuts = transformer(), 400, ("whole", 4)
    measure: dict[str, Callable[[], Any]] = {
        "mlp": lambda: alternate(mlp(), repeats=repeats, steps=10),
        "resnet50": lambda: alternate(big, repeats=min(repeats, 25), steps=1),
        "host_time_mlp": lambda: host_time_us(mlp(), repeats=repeats),
        "memory_resnet50": lambda: memory(big, cuts),
        "memory_transformer": lambda: memory(language, cuts),
    }
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    chosen = args.cases.split(",") if args.cases else list(measure)
    if unknown := set(chosen) - set(measure):
        raise SystemExit(
            f"no such cases: {', '.join(sorted(unknown))}; there are {', '.join(measure)}"
        )
    for name, run in ((name, measure[name]) for name in chosen):
        result[name] = run()
        shown = {k: v for k, v in result[name].items() if not isinstance(v, dict)}
        print(name, {k: round(v, 4) for k, v in shown.items()}, flush=True)
    write_json(args.json, __doc__, result)


if __name__ == "__main__":
    main()
