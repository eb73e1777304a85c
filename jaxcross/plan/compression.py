"""Chooses how much to compress exchanges so that a set of jobs isn't limited by the network.

Compression costs accuracy, so we use as little of it as possible. Every job starts out with the
plain mean. As long as the jobs' exchanges take longer in total than their computation, we move one
job to the next exchange in a list that goes from lossless to very lossy.

Exchanges are gradient transformations. We find out how many bytes each of them sends by tracing its
update with the shapes and types of the parameters, without compiling or running anything.
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
"""We take a profile to be measured with the plain mean if its step exchanges at most this many
times the bytes of its parameters. It may be more than once, since statistics and metrics are
exchanged along with the gradients.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """The cost of one job's step, measured with the plain mean as its exchange.

    Attributes:
        name: Name of the job, for the explanation.
        compute_s: Seconds of device time that the step's computation takes (c).
        exchange_s: Seconds of network time that the step's exchanges take (m).
        params: Parameters of the job, or their shapes (`jax.ShapeDtypeStruct`).
        profile: The profile that the seconds come from, or None if you supplied them as numbers.
            `choose_compression` checks that its number of ranks and its bytes are as expected.
    """

    name: str
    compute_s: float
    exchange_s: float
    params: PyTree
    profile: Profile | None = None

    @classmethod
    def of(cls, profile: Profile, params: PyTree) -> Self:
        """Returns a job's cost according to its profile. `params` may be arrays or their shapes."""
        return cls(
            name=profile.name,
            compute_s=profile.compute_s,
            exchange_s=profile.exchange_s,
            params=params,
            profile=profile,
        )

    def check(self, ranks: int) -> None:
        """Checks that the profile (if there is one) belongs to this step.

        It must have been measured on this number of ranks, with the plain mean of these parameters.

        Raises:
            ValueError: It was measured with something else.
        """
        if self.profile is None:
            return
        if self.profile.ranks != ranks:
            raise ValueError(
                f"the profile of `{self.name}` was measured on {self.profile.ranks} ranks, and "
                f"`ranks` is {ranks}. Pass the profile of a run on {ranks} ranks, or a `JobCost` "
                "with numbers instead of a profile."
            )
        measured = sum(self.profile.graph.nbytes)
        needed = sum(
            math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize
            for x in jax.tree.leaves(self.params)
        )
        if measured and not needed <= measured <= _MOST_BYTES * needed:
            raise ValueError(
                f"the step in the profile of `{self.name}` exchanges {human_bytes(measured)}, but "
                f"`params` has {human_bytes(needed)}. So the profile is of a different step, or "
                "it wasn't measured with the plain mean. Pass a profile of this step, measured "
                "with the plain mean."
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An exchange to choose from: a name, and a function that creates the exchange for an axis.

    If an exchange sends different amounts on different steps, its most expensive step counts.
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
"""The exchanges to choose from by default, from the exact mean to the lossiest."""


def choose_compression(
    target: float,
    jobs: Sequence[JobCost],
    axes: collectives.Axes,
    *,
    ranks: int,
    candidates: Sequence[Candidate] = CANDIDATES,
    log: Callable[[str], object] = print,
) -> tuple[optax.GradientTransformation, ...]:
    """Chooses the weakest compression at which exchanges take at most `target` of computation.

    Let c be the time a job's step spends computing, and m the time it spends exchanging. In
    crossover, one job exchanges while another computes, so all exchanges are hidden behind
    computation as long as sum m <= sum c. Compressing any further would cost accuracy without
    making the run any faster.

    So all jobs start with the first candidate. While sum m exceeds `target` times sum c, we move
    one job to its next candidate that sends less. We pick the job for which this candidate comes
    earliest in the list; in case of a tie, the job that saves the most. Finally, we check for each
    job whether a weaker compression would meet the target as well.

    We assume that m shrinks in proportion to the bytes sent, and that the step has the default cut.
    Neither latency nor the cost of compressing is predicted, so measure the resulting run.

    If a candidate raises ValueError for a job, e.g. because a leaf is an integer array, we never
    assign it to that job, and say so in the explanation.

    Doesn't wait or communicate: each rank makes the choice by itself. To get the same choice on all
    ranks, pass costs that are identical across ranks, such as those from a report.

    Args:
        target: The largest acceptable ratio of sum m to sum c. At 1, the exchanges are only just
            hidden.
        jobs: Cost of each job's step.
        axes: Name of the axis over which the gradients are exchanged. Several axes aren't
            supported.
        ranks: Number of ranks along that axis.
        candidates: Exchanges to choose from, from least to most lossy.
        log: Called once, with an explanation of the choice.

    Returns:
        An exchange for each job, to put before the optimizer in `optax.chain`.

    Raises:
        ValueError: There are no jobs or no candidates, the target or a time isn't positive, `axes`
            names several axes, `ranks` isn't a whole number, the first candidate rejects a job's
            leaves, or a profile is of another step or a different number of ranks.

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
        raise ValueError(
            "`target` and the `compute_s` of each job must be positive, and `exchange_s` must not "
            f"be negative, got `target` {target} and `compute_s` + `exchange_s`: {times}."
        )
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
        model = (treedef, tuple(types))
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
    """Returns the bytes that a rank receives per update, according to the wire's formulas.

    This assumes that the step has the default cut. Not every step has to send the same amount: an
    exchange with a warm-up doesn't compress at first, for example, and local steps only send
    something on every k-th step. In such cases, we return the bytes of the step that sends the
    most.
    """
    axes: dict[Any, int] = {axis_name: ranks}
    variants = _variants(trace_update(tx, params, axes))
    return max(
        sum(wire_bytes(x, axes) for x in stages.cut(variant).exchanges) for variant in variants
    )


def trace_update(
    tx: optax.GradientTransformation, params: PyTree, axes: Mapping[Any, int]
) -> Traced:
    """Traces an update of `tx` from shapes and types alone. It has no wire, so it can't be run.

    Args:
        tx: An exchange over `axes`. Its `init` may query the sizes of the axes as well.
        params: The parameters as arrays, or their shapes and types.
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
    """A `Wire` that recognises exchanges but can't run them, which is enough to count bytes."""

    def recognise(self, eqn: Equation, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
        return recognise(eqn, axes)

    def lower(self, jaxpr: Jaxpr, axes: Mapping[str, int]) -> Lowered:
        raise NotImplementedError

    def coords(self, axes: Mapping[str, int]) -> Mapping[str, int]:
        raise NotImplementedError


def _variants(traced: Traced) -> Iterator[Traced]:
    """Yields all variants of the step; there are several if it depends on a step counter."""
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
    """Returns each job's candidate, keeping the total time of all exchanges within `budget_s`.

    If that's impossible, every job gets its strongest compression.

    Args:
        seconds: Predicted exchange time of each job (row) with each candidate (column).
        budget_s: Seconds that the exchanges of all jobs may take in total.
    """
    chosen = [0] * len(seconds)
    # Compress one job at a time a little more. To treat all jobs alike, pick the job whose next
    # useful candidate comes earliest in the list, where "useful" means that it makes the job's
    # exchange smaller than it is now. A job that skips some candidates has its next useful
    # candidate further down the list, so it only moves once the others have caught up.
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
    # We may have compressed more than necessary. For example, the first job to move may have saved
    # a little, and then another job's move saved so much that the first move is no longer needed.
    # So let each job go back to the weakest compression that still meets the target.
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
