"""No more compression than hides: what a set of jobs needs so that the network is not its bottleneck."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange import collectives
from jaxcross.exchange.mean import mean
from jaxcross.exchange.power_sgd import power_sgd
from jaxcross.exchange.qsgd import qsgd
from jaxcross.exchange.top_k import top_k
from jaxcross.exchange.validation import whole_number
from jaxcross.program.cut import cut
from jaxcross.program.ir import Exchange
from jaxcross.program.trace import Traced, trace
from jaxcross.wire.bytes import wire_bytes
from jaxcross.wire.recognise import recognise


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job's step, as it was measured with the plain mean.

    Attributes:
        name: For the explanation.
        compute_s: Seconds that its computation takes of the device (c).
        exchange_s: Seconds that its exchanges take of the network (m).
        params: Its parameters, or their shapes (`jax.ShapeDtypeStruct`).
    """

    name: str
    compute_s: float
    exchange_s: float
    params: Any


@dataclass(frozen=True, slots=True)
class Candidate:
    """One exchange of a ladder: its name, and how it is made for an axis. It is counted by its step that sends most."""

    name: str
    make: Callable[[Hashable], optax.GradientTransformation]


LADDER = (
    Candidate("mean", mean),
    Candidate("mean, bfloat16", partial(mean, wire_dtype=jnp.bfloat16)),
    Candidate("qsgd, 127 levels", partial(qsgd, 127)),
    Candidate("power_sgd, rank 8", partial(power_sgd, 8)),
    Candidate("top_k, 1%", partial(top_k, 0.01)),
    Candidate("top_k, 0.1%", partial(top_k, 0.001)),
)
"""From what loses nothing to what loses most."""


def auto(
    target: float,
    jobs: Sequence[Load],
    axis_name: Hashable,
    *,
    ranks: int,
    ladder: Sequence[Candidate] = LADDER,
    say: Callable[[str], Any] = print,
) -> tuple[optax.GradientTransformation, ...]:
    """The least compression with which the jobs' exchanges take at most `target` of their computation; says why.

    In crossover the jobs' exchanges hide behind their computation as long as sum m <= sum c: compressing further buys
    nothing and costs accuracy. All jobs begin with the first rung. While sum m exceeds `target` times sum c, the job
    that stands lowest climbs to its next rung that sends less (of several the one that saves most); at the end every
    job steps back as far as the target allows. A job's m is taken to shrink as its bytes do, those of a step cut as by
    default: latency and what the compression computes are not foreseen. Measure the run that comes of it. A rung that
    raises ValueError for a job, as for leaves of integers, is left out for this job, which is said.

    Does not wait or communicate. The same on every rank only if the loads are: take those of a report, which every
    rank has alike.

    Args:
        target: Sum of m over sum of c that is wanted; 1 where exchanges just hide.
        jobs: What each job's step takes.
        axis_name: One axis, over which the gradients are exchanged.
        ranks: Along that axis.
        ladder: What there is to choose from, from what loses least to what loses most.
        say: Is told the reasons, as one text.

    Returns:
        An exchange a job, for `optax.chain` before its optimizer.

    Raises:
        ValueError: No jobs, an empty ladder, a target or a time that is not positive, several axes,
            `ranks` that are no whole number; and whatever the first rung raises for a job's leaves.

    Example:
        >>> report = jaxcross.run(jobs)
        >>> loads = [
        ...     Load(name=j.facts.name, compute_s=j.compute_s, exchange_s=j.exchange_s, params=params)
        ...     for j in report.rounds.jobs
        ... ]
        >>> exchanges = jaxcross.exchange.auto(1.0, loads, "batch", ranks=world.size)
    """
    if not jobs or not ladder:
        raise ValueError(f"`auto` chooses for jobs from a ladder, and got {len(jobs)} jobs and {len(ladder)} rungs.")
    if not target > 0 or any(not (j.compute_s > 0 and j.exchange_s >= 0) for j in jobs):
        times = ", ".join(f"{j.name} {j.compute_s} s + {j.exchange_s} s" for j in jobs)
        raise ValueError(f"`target` ({target}) and all times must be positive: {times}.")
    axis = collectives.one_axis(axis_name, "`auto`")
    ranks = whole_number(ranks, "ranks", "`auto`")
    made = [rung.make(axis) for rung in ladder]
    refused: list[str] = []
    seconds = []
    for job in jobs:
        nbytes: list[float] = []
        for tx, rung in zip(made, ladder, strict=True):
            try:
                nbytes.append(received_bytes(tx, job.params, axis, ranks))
            except ValueError as error:
                if not nbytes:  # what all others are compared with
                    raise
                nbytes.append(math.inf)
                refused.append(f"  {job.name} cannot have {rung.name}: {str(error).partition(chr(10))[0]}")
        seconds.append(_seconds(job, nbytes))
    limit = target * sum(job.compute_s for job in jobs)
    at = _climb(seconds, limit)
    say("\n".join([_why(jobs, ladder, seconds, at, limit), *refused]))
    return tuple(made[rung] for rung in at)


def received_bytes(tx: optax.GradientTransformation, params: Any, axis_name: Hashable, ranks: int) -> int:
    """Bytes that one rank receives in an update of `tx`, cut as a step is by default, by the wire's formulas.

    Of an exchange whose steps differ, in the one that sends most, whichever it is: in a warm-up's densest stage, at the
    end of a round of local steps.
    """
    axes: dict[Any, int] = {axis_name: ranks}
    ways = _ways(trace_update(tx, params, axes))
    return max(sum(wire_bytes(x, axes) for x in cut(way).exchanges) for way in ways)


def trace_update(tx: optax.GradientTransformation, params: Any, axes: Mapping[Any, int]) -> Traced:
    """An update of `tx`, traced by types alone. It cannot be run: there is no wire.

    Args:
        tx: With its exchanges over `axes`; `init` may ask about them, too.
        params: Arrays, or their types.
        axes: Each with its ranks.
    """
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    _, state = jax.make_jaxpr(tx.init, axis_env=list(axes.items()), return_shape=True)(types)
    return trace(lambda g, s, p: tx.update(g, s, p), (types, state, types), axes=axes, wire=_NoWire())


class _NoWire:
    """A `Wire` that sees what would travel, and carries nothing."""

    def recognise(self, eqn: Any, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
        return recognise(eqn, axes)

    def lower(self, jaxpr: Any, axes: Mapping[str, int]) -> Callable[..., list[Any]]:
        raise NotImplementedError

    def coords(self, axes: Mapping[str, int]) -> Mapping[str, int]:
        raise NotImplementedError


def _ways(traced: Traced) -> Iterator[Traced]:
    """Every variant of a step, whatever its conditions of counters say."""
    if traced.undecided is None:
        yield traced
    else:
        for branch in range(traced.undecided.branches):
            yield from _ways(traced.decide(branch))


def _seconds(job: Load, nbytes: Sequence[float]) -> list[float]:
    return [n if math.isinf(n) else job.exchange_s * n / nbytes[0] if nbytes[0] else 0.0 for n in nbytes]


def _climb(seconds: Sequence[Sequence[float]], limit: float) -> list[int]:
    """A rung a job, so that the seconds sum up to `limit` at most, where that can be had.

    The job climbs whose next rung is the lowest: a job that must skip rungs waits for those that need not.
    """
    at = [0] * len(seconds)
    while _total(seconds, at) > limit:
        steps = [(n, rung) for n in range(len(at)) if (rung := _next(seconds[n], at[n])) is not None]
        if not steps:
            break
        job, rung = min(steps, key=lambda s: (s[1], seconds[s[0]][s[1]] - seconds[s[0]][at[s[0]]]))
        at[job] = rung
    for job in sorted(range(len(at)), key=lambda n: -at[n]):
        for rung in range(at[job]):
            lower = [*at[:job], rung, *at[job + 1 :]]
            if _total(seconds, lower) <= limit:
                at = lower
                break
    return at


def _next(seconds: Sequence[float], rung: int) -> int | None:
    return next((n for n in range(rung + 1, len(seconds)) if seconds[n] < seconds[rung]), None)


def _total(seconds: Sequence[Sequence[float]], at: Sequence[int]) -> float:
    return math.fsum(row[rung] for row, rung in zip(seconds, at, strict=True))


def _why(
    jobs: Sequence[Load],
    ladder: Sequence[Candidate],
    seconds: Sequence[Sequence[float]],
    at: Sequence[int],
    limit: float,
) -> str:
    plain, after = _total(seconds, [0] * len(at)), _total(seconds, at)
    lines = list(_first_line(plain, after, limit))
    for job, row, rung in zip(jobs, seconds, at, strict=True):
        lines.append(
            f"  {job.name}: {ladder[rung].name}; computes {job.compute_s:.3g} s, exchanges {row[0]:.3g} s as a mean"
            + (f", about {row[rung]:.3g} s so" if rung else "")
        )
    return "\n".join(lines)


def _first_line(plain: float, after: float, limit: float) -> Iterator[str]:
    if plain <= limit:
        yield f"Exchanges take {plain:.3g} s of the {limit:.3g} s that hide them: compression would buy nothing."
    elif after <= limit:
        yield f"Exchanges take {plain:.3g} s, {limit:.3g} s would hide: compressed to about {after:.3g} s, no further."
    else:
        yield (
            f"Exchanges take {plain:.3g} s, {limit:.3g} s would hide: the strongest compression leaves {after:.3g} s. "
            "Larger batches, local steps (`local_sgd`) or another job to share with may hide the rest."
        )
