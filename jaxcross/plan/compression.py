"""Chooses the least compression with which a set of jobs isn't limited by the network.

Each job starts with the plain mean and moves along a list of exchanges that lose more and more,
until the exchanges of all jobs fit behind their computation. The bytes of each exchange come from
tracing its update by types, so nothing is compiled or run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from jaxcross._jax_compat import Equation, Jaxpr
from jaxcross._pytree import PyTree
from jaxcross.exchange import collectives, mean, power_sgd, qsgd, top_k, whole_number
from jaxcross.program import Exchange, Lowered, Traced, human_bytes, stages
from jaxcross.step import Profile
from jaxcross.wire import recognise, wire_bytes

_MOST_BYTES = 2
"""How many times the bytes of its parameters a step may exchange and still count as a plain mean.
Statistics and metrics are exchanged in addition to the gradients.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """Cost of one job's step, measured with the plain mean as its exchange.

    Attributes:
        name: Name of the job, for the explanation.
        compute_s: Seconds of device time that the step's computation takes (c).
        exchange_s: Seconds of network time that the step's exchanges take (m).
        params: Parameters of the job, or their shapes (`jax.ShapeDtypeStruct`).
        profile: The profile that the seconds come from. The choice checks its ranks and bytes. None
            if the seconds were given as numbers.
    """

    name: str
    compute_s: float
    exchange_s: float
    params: PyTree
    profile: Profile | None = None

    @classmethod
    def of(cls, profile: Profile, params: PyTree) -> Self:
        """Returns the cost that a profile of the job states, for its parameters or their shapes."""
        return cls(
            name=profile.name,
            compute_s=profile.compute_s,
            exchange_s=profile.exchange_s,
            params=params,
            profile=profile,
        )

    def check(self, ranks: int) -> None:
        """Checks that the profile, if there is one, was measured with these parameters' plain mean
        and this number of ranks.

        Raises:
            ValueError: It was measured with something else.
        """
        if self.profile is None:
            return
        if self.profile.ranks != ranks:
            raise ValueError(
                f"the profile of `{self.name}` was measured on {self.profile.ranks} ranks, and "
                f"`ranks` is {ranks}: give that of a run on as many ranks, or numbers."
            )
        measured = sum(self.profile.graph.nbytes)
        needed = sum(
            math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize
            for x in jax.tree.leaves(self.params)
        )
        if measured and not needed <= measured <= _MOST_BYTES * needed:
            raise ValueError(
                f"the profile of `{self.name}` is of a step that exchanges "
                f"{human_bytes(measured)}, and `params` has {human_bytes(needed)}: it is of "
                "another step, or was not measured with the plain mean."
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An exchange to choose from: its name, and how it is made for an axis. If its steps differ,
    the step that sends most counts as its cost.
    """

    name: str
    make: Callable[[Hashable], optax.GradientTransformation]


CANDIDATES = (
    Candidate("mean", mean),
    Candidate("mean, bfloat16", partial(mean, wire_dtype=jnp.bfloat16)),
    Candidate("qsgd, 127 levels", partial(qsgd, 127)),
    Candidate("power_sgd, rank 8", partial(power_sgd, 8)),
    Candidate("top_k, 1%", partial(top_k, 0.01)),
    Candidate("top_k, 0.1%", partial(top_k, 0.001)),
)
"""Exchanges ordered by how much they lose, starting with the exact mean."""


def choose_compression(
    target: float,
    jobs: Sequence[JobCost],
    axes: collectives.Axes,
    *,
    ranks: int,
    candidates: Sequence[Candidate] = CANDIDATES,
    log: Callable[[str], object] = print,
) -> tuple[optax.GradientTransformation, ...]:
    """Chooses the least compression with which exchanges take at most `target` of computation.

    In crossover the jobs' exchanges hide behind their computation as long as sum m <= sum c.
    Compressing further gains nothing and costs accuracy. So all jobs start with the first
    candidate. While sum m exceeds `target` times sum c, one job moves on to its next candidate that
    sends less: the job for which that candidate comes earliest in the list or, among several, the
    one that saves most. At the end, every job steps back as far as the target allows.

    We assume that a job's m shrinks in proportion to its bytes, with the default cut. Latency and
    the computation of the compression itself are not predicted, so measure the resulting run. A
    candidate that raises ValueError for a job, e.g. for integer leaves, is left out for this job,
    and the explanation names it.

    Does not wait or communicate. The choice is the same on every rank only if the costs are, so
    take them from a report, which is identical across ranks.

    Args:
        target: Wanted ratio of sum m to sum c; at 1 the exchanges just hide.
        jobs: Cost of each job's step.
        axes: Name of the axis over which the gradients are exchanged. Several axes are refused.
        ranks: Number of ranks along that axis.
        candidates: Exchanges to choose from, ordered from the one that loses least to the one that
            loses most.
        log: Called once, with an explanation of the choice.

    Returns:
        An exchange for each job, for `optax.chain` before its optimizer.

    Raises:
        ValueError: If there are no jobs or no candidates, if the target or a time is not positive,
            if `axes` names several axes, if `ranks` is not a whole number, if the first
            candidate rejects a job's leaves, or if a profile is of another step or of a different
            number of ranks.

    Example:
        >>> report = jaxcross.run(jobs)
        >>> costs = [
        ...     JobCost(
        ...         name=j.facts.name,
        ...         compute_s=j.compute_s,
        ...         exchange_s=j.exchange_s,
        ...         params=params,
        ...     )
        ...     for j in report.rounds.jobs  # or `JobCost.of(profile, params)`
        ... ]
        >>> exchanges = jaxcross.plan.choose_compression(1.0, costs, "batch", ranks=world.size)
    """
    if not jobs or not candidates:
        raise ValueError(
            "`choose_compression` needs at least one job and one candidate, "
            f"got {len(jobs)} jobs and {len(candidates)} candidates."
        )
    if not target > 0 or any(not (j.compute_s > 0 and j.exchange_s >= 0) for j in jobs):
        times = ", ".join(f"{j.name} {j.compute_s} s + {j.exchange_s} s" for j in jobs)
        raise ValueError(f"`target` ({target}) and all times must be positive: {times}.")
    axis = collectives.one_axis(axes, "`choose_compression`")
    ranks = whole_number(ranks, "ranks", "`choose_compression`")
    for job in jobs:
        job.check(ranks)
    exchanges = [candidate.make(axis) for candidate in candidates]

    refused: list[str] = []
    seconds = []
    known: dict[Hashable, list[int | ValueError]] = {}  # jobs with the same model are traced once
    for job in jobs:
        types, treedef = jax.tree.flatten(_types(job.params))
        model = treedef, tuple(types)
        if model not in known:
            known[model] = list(_received(exchanges, job.params, axis, ranks))
        for candidate, found in zip(candidates, known[model], strict=True):
            if isinstance(found, ValueError):
                refused.append(
                    f"  {job.name} cannot have {candidate.name}: {str(found).partition(chr(10))[0]}"
                )
        nbytes = [math.inf if isinstance(found, ValueError) else found for found in known[model]]
        seconds.append(_predicted_seconds(job, nbytes))
    budget_s = target * sum(job.compute_s for job in jobs)
    chosen = _least_compression(seconds, budget_s)
    log("\n".join([_explanation(jobs, candidates, seconds, chosen, budget_s), *refused]))
    return tuple(exchanges[n] for n in chosen)


def _received(
    exchanges: Sequence[optax.GradientTransformation], params: PyTree, axis: Hashable, ranks: int
) -> Iterator[int | ValueError]:
    """Yields the bytes of each exchange, or its error if it rejects the parameters."""
    for n, tx in enumerate(exchanges):
        try:
            yield received_bytes(tx, params, axis, ranks)
        except ValueError as error:
            if n == 0:  # all other candidates are compared with the first one, so it must work
                raise
            yield error


def received_bytes(
    tx: optax.GradientTransformation, params: PyTree, axis_name: Hashable, ranks: int
) -> int:
    """Returns the bytes that one rank receives per update of `tx`, by the wire's formulas.

    Assumes the default cut. If the steps of an exchange differ, the step that sends most counts,
    e.g. the densest stage of a warm-up, or the end of a round of local steps.
    """
    axes: dict[Any, int] = {axis_name: ranks}
    variants = _variants(trace_update(tx, params, axes))
    return max(
        sum(wire_bytes(x, axes) for x in stages.cut(variant).exchanges) for variant in variants
    )


def trace_update(
    tx: optax.GradientTransformation, params: PyTree, axes: Mapping[Any, int]
) -> Traced:
    """Traces an update of `tx` by types alone. The result can't be run, because it has no wire.

    Args:
        tx: Exchange over `axes`. Its `init` may query their sizes, too.
        params: Arrays, or their types.
        axes: Number of ranks along each axis.
    """
    types = _types(params)
    _, state = jax.make_jaxpr(tx.init, axis_env=list(axes.items()), return_shape=True)(types)
    return stages.trace(
        lambda g, s, p: tx.update(g, s, p), (types, state, types), axes=axes, wire=_NoWire()
    )


def _types(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


class _NoWire:
    """A `Wire` that recognises exchanges but can't run them."""

    def recognise(self, eqn: Equation, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
        return recognise(eqn, axes)

    def lower(self, jaxpr: Jaxpr, axes: Mapping[str, int]) -> Lowered:
        raise NotImplementedError

    def coords(self, axes: Mapping[str, int]) -> Mapping[str, int]:
        raise NotImplementedError


def _variants(traced: Traced) -> Iterator[Traced]:
    """Yields one variant of the step for each outcome of its conditions on counters."""
    if traced.undecided is None:
        yield traced
    else:
        for branch in range(traced.undecided.branches):
            yield from _variants(traced.decide(branch))


def _predicted_seconds(job: JobCost, nbytes: Sequence[float]) -> list[float]:
    def predicted(n: float) -> float:
        if math.isinf(n):
            return n
        return job.exchange_s * n / nbytes[0] if nbytes[0] else 0.0

    return [predicted(n) for n in nbytes]


def _least_compression(seconds: Sequence[Sequence[float]], budget_s: float) -> list[int]:
    """Returns a candidate for each job, so that their seconds add up to at most `budget_s`.

    If no choice fits the budget, every job ends up with its strongest compression.

    Args:
        seconds: Predicted exchange time of each job (row) with each candidate (column).
        budget_s: Time that the exchanges of all jobs may take together.
    """
    chosen = [0] * len(seconds)
    # The job whose next useful candidate comes earliest moves first. So a job that has to skip
    # candidates (because they send no less) waits until the others have caught up.
    while _total(seconds, chosen) > budget_s:
        moves = [
            (n, step)
            for n in range(len(chosen))
            if (step := _next(seconds[n], chosen[n])) is not None
        ]
        if not moves:
            break
        job, step = min(
            moves, key=lambda s: (s[1], seconds[s[0]][s[1]] - seconds[s[0]][chosen[s[0]]])
        )
        chosen[job] = step
    # The last move of one job may have made an earlier move of another job unnecessary.
    for job in sorted(range(len(chosen)), key=lambda n: -chosen[n]):
        for step in range(chosen[job]):
            gentler = [*chosen[:job], step, *chosen[job + 1 :]]
            if _total(seconds, gentler) <= budget_s:
                chosen = gentler
                break
    return chosen


def _next(seconds: Sequence[float], step: int) -> int | None:
    return next((n for n in range(step + 1, len(seconds)) if seconds[n] < seconds[step]), None)


def _total(seconds: Sequence[Sequence[float]], chosen: Sequence[int]) -> float:
    return math.fsum(row[n] for row, n in zip(seconds, chosen, strict=True))


def _explanation(
    jobs: Sequence[JobCost],
    candidates: Sequence[Candidate],
    seconds: Sequence[Sequence[float]],
    chosen: Sequence[int],
    budget_s: float,
) -> str:
    plain_s = _total(seconds, [0] * len(chosen))
    lines = [_headline(plain_s, _total(seconds, chosen), budget_s)]
    for job, row, n in zip(jobs, seconds, chosen, strict=True):
        lines.append(
            f"  {job.name}: {candidates[n].name}; computes {job.compute_s:.3g} s, exchanges "
            f"{row[0]:.3g} s as a mean" + (f", about {row[n]:.3g} s compressed" if n else "")
        )
    return "\n".join(lines)


def _headline(plain_s: float, compressed_s: float, budget_s: float) -> str:
    if plain_s <= budget_s:
        return (
            f"Exchanges take {plain_s:.3g} s of the {budget_s:.3g} s that hide them: compression "
            "would buy nothing."
        )
    start = f"Exchanges take {plain_s:.3g} s, {budget_s:.3g} s would hide"
    if compressed_s <= budget_s:
        return f"{start}: compressed to about {compressed_s:.3g} s, no further."
    return (
        f"{start}: the strongest compression leaves {compressed_s:.3g} s. "
        "Larger batches, local steps (`local_sgd`) or another job to share with may hide the rest."
    )
