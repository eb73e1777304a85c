"""Predicts how much faster equal jobs run alongside each other, given the cost of their step.

Say a step computes for c seconds and exchanges for m seconds. When jobs run one after the other,
each job-step takes c + m. When two or more equal jobs run alongside each other, one can compute
while another exchanges, so at best a job-step takes max(c, m).

In practice, a job-step takes longer than that if the same processor both computes and drives the
network, because they slow each other down. The expected speed-up accounts for this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxcross._html import preformatted
from jaxcross.interleave import Contention
from jaxcross.jobs import JobMemory, needed_bytes
from jaxcross.plan.groups import bound_s
from jaxcross.plan.machine_contention import TWO_CORES, MachineContention
from jaxcross.plan.twin import predict
from jaxcross.program import human_bytes
from jaxcross.report import SlowRank, seconds, slowest
from jaxcross.step import Profile

TOO_SHORT_S = 0.02
"""Votes and dispatch take up a noticeable part of steps shorter than this."""

_WORTH = 1.1  # don't recommend anything below, since predicted gains are up to a tenth off


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The cost of a step that runs alone, as a basis for estimates. Identical across ranks.

    Attributes:
        whole: Profile of the uncut step, including the step's name and memory.
        cut: Profile of the step with its exchange cut into several segments; None if the step
            wasn't or can't be cut.
        where: Name of the job whose step this is, for display; empty outside a run.
        steps: Number of steps that were timed; 0 if the profiles were given.
        wire_bytes: Number of bytes that a rank receives per step.
        narrow_wire_bytes: The same, if all 32-bit and 64-bit values were sent in 16 bits.
        link_mbps: Rate of the link that the user asked about, in Mbit/s; None if exchange times
            were measured.
        limit_bytes: Number of bytes that a rank may use; None if unknown.
        shares_processor: Whether the processor that computes also drives the network.
        contention: The contention that was measured on the user's machine. If None, we use that of
            two-core hosts, unless the step runs on an accelerator.
    """

    whole: Profile
    cut: Profile | None = None
    where: str = ""
    steps: int
    wire_bytes: int
    narrow_wire_bytes: int
    link_mbps: float | None = None
    limit_bytes: int | None = None
    shares_processor: bool = True
    contention: MachineContention | None = None

    @property
    def compute_s(self) -> float:
        """Seconds of the step's computation (c)."""
        return self.whole.compute_s

    @property
    def exchange_s(self) -> float:
        """Seconds of the step's exchanges, excluding waits for other ranks (m)."""
        return self.whole.exchange_s

    @property
    def narrow_exchange_s(self) -> float:
        """Seconds of the step's exchanges in 16 bits, if time is proportional to bytes."""
        if not self.wire_bytes:
            return self.exchange_s
        return self.exchange_s * self.narrow_wire_bytes / self.wire_bytes

    @property
    def mbps(self) -> float | None:
        """Rate at which a rank receives, in Mbit/s; None if the step has no exchanges."""
        return 8e-6 * self.wire_bytes / self.exchange_s if self.exchange_s else None

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data, along with c, m and the rate."""
        costs = {
            "whole": self.whole.as_data(),
            "cut": None if self.cut is None else self.cut.as_data(),
            "contention": None if self.contention is None else self.contention.to_json(),
        }
        derived = {"compute_s": self.compute_s, "exchange_s": self.exchange_s, "mbps": self.mbps}
        return {**asdict(self), **costs, **derived}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What equal jobs gain from running alongside each other instead of one after the other.

    Attributes:
        jobs: Number of jobs.
        most: Largest possible speed-up. With two or more jobs it's (c + m) / max(c, m), because no
            ordering of the same work is faster.
        expected: Expected speed-up, accounting for how much the lanes slow each other down. None if
            we don't know that.
        most_narrow, expected_narrow: The same, with exchanges in 16 bits. The baseline is still one
            job after the other with full exchanges.
        memory_bytes: Number of bytes of arrays on a rank: the largest peak of one job, plus the
            bytes that the other jobs keep between segments, plus the temporaries of one exchange.
            Arrays that the jobs will share, such as a base model, are counted once per job here,
            even though a run only keeps a single copy.
        fits: Whether `memory_bytes` is within the limit; None if no limit is known.
    """

    jobs: int
    most: float
    expected: float | None
    most_narrow: float
    expected_narrow: float | None
    memory_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predictions for a step, as returned by `jaxcross.estimate`. Identical across ranks.

    `print` shows them in ten lines, and in an eleventh if a rank is slow.

    Attributes:
        cost: Cost of the step alone.
        jobs: Number of jobs that the caller asked about.
        gains: The gains for 1 to 4 jobs and for `jobs`.
        cut_alone: Largest possible speed-up of a single job with its exchange cut, compared with
            the uncut step; None if no cut was measured.
        fitting_jobs: Number of jobs that fit into memory; None if no limit is known.
        slow_rank: The ranks that compute the longest, and what that costs if the asked number of
            jobs run alongside each other. None if they aren't clearly slower than the median rank
            or cost less than a twentieth of the time, or if the step takes less than 20 ms.
        basis: What the contention behind the expected speed-ups is based on at the link's rate,
            e.g. `interpolated from 100 and 200 Mbit/s`; see `MachineContention.basis`. "" if it
            isn't known, so there are no expected speed-ups.
    """

    cost: StepCost
    jobs: int
    gains: tuple[Gain, ...]
    cut_alone: float | None
    fitting_jobs: int | None
    slow_rank: SlowRank | None = None
    basis: str = ""

    def of(self, jobs: int) -> Gain:
        """Returns the prediction for a given number of jobs."""
        return next(p for p in self.gains if p.jobs == jobs)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data, along with the recommendation."""
        return {**asdict(self), "cost": self.cost.as_dict(), "recommendation": self.recommendation}

    def __repr__(self) -> str:
        return (
            f"<Estimate of `{self.cost.whole.name}`: {self.recommendation.rstrip('.')}; print() "
            "shows the numbers>"
        )

    def __str__(self) -> str:
        slow = [] if self.slow_rank is None else [f"  {self.slow_rank.text('the predicted time')}"]
        return "\n".join((*_lines(self), *slow, f"  {self.recommendation}"))

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    @property
    def recommendation(self) -> str:
        """One sentence about what to do."""
        return _recommendation(self)


def estimate_of(cost: StepCost, jobs: int = 2) -> Estimate:
    """Predicts what equal jobs gain from running together, given the cost of their step.

    Args:
        cost: Cost of the step alone.
        jobs: Number of jobs that the caller asks about.

    Raises:
        ValueError: `jobs` is below 1.
    """
    if jobs < 1:
        raise ValueError(f"`jobs` must be at least 1, got {jobs}.")
    c = cost.compute_s
    m = cost.exchange_s
    rate = cost.mbps
    machine = machine_of(cost)
    basis = "" if machine is None or rate is None else machine.basis(rate)
    contention = machine.at(rate) if machine is not None and rate is not None and basis else None
    gains = []
    for k in sorted({1, 2, 3, 4, jobs}):
        before_s = k * (c + m)
        full = ([c] * k, [m] * k)
        narrow = ([c] * k, [cost.narrow_exchange_s] * k)
        memory = memory_bytes(cost, k)
        expected = None
        expected_narrow = None
        if contention is not None:
            expected = _ratio(before_s, period_s(*full, contention))
            expected_narrow = _ratio(before_s, period_s(*narrow, contention))
        gains.append(
            Gain(
                jobs=k,
                most=_ratio(before_s, period_s(*full)),
                expected=expected,
                most_narrow=_ratio(before_s, period_s(*narrow)),
                expected_narrow=expected_narrow,
                memory_bytes=memory,
                fits=None if cost.limit_bytes is None else memory <= cost.limit_bytes,
            )
        )
    cut_alone = None
    if cost.cut is not None:
        # At best, a cut step hides all of its exchange behind its computation, or vice versa. But
        # the cut and the uncut step were timed separately, and noise may make the cut look even
        # faster than that, so cap the speed-up at what's possible.
        cut_alone = min(_ratio(c + m, _alone_s(cost.cut)), _ratio(c + m, max(c, m)))
    return Estimate(
        cost=cost,
        jobs=jobs,
        gains=tuple(gains),
        cut_alone=cut_alone,
        fitting_jobs=_fitting_jobs(cost),
        slow_rank=_slow_rank(cost, jobs, contention),
        basis=basis,
    )


def _slow_rank(cost: StepCost, jobs: int, contention: Contention | None) -> SlowRank | None:
    found = slowest(cost.whole.rank_compute_s)
    # The times of very short steps vary too much to tell a slow rank from noise.
    if found is None or cost.compute_s + cost.exchange_s < TOO_SHORT_S:
        return None
    exchange_s = [cost.exchange_s] * jobs
    now_s = period_s([cost.compute_s] * jobs, exchange_s, contention)
    evened_s = period_s([cost.whole.evened().compute_s] * jobs, exchange_s, contention)
    ranks, factor = found
    return SlowRank.if_costly(ranks, factor, 1 - evened_s / now_s)


def period_s(
    compute_s: Sequence[float], exchange_s: Sequence[float], contention: Contention | None = None
) -> float:
    """Returns the seconds of a round, i.e. one step of each job, in the best order.

    Without contention (i.e. if computation and exchange don't slow each other down), a round takes
    as long as its bound (`bound_s`).

    With contention, we assume that the lane with more work never idles. So whenever the other lane
    is working, they overlap and slow each other down. This is exact for equal jobs whose steps
    first compute, then exchange, then update.

    Args:
        compute_s: Seconds that each job's step computes alone (c).
        exchange_s: Seconds that each job's step exchanges alone (m).
        contention: How much the lanes slow each other down. If None, they don't.
    """
    if contention is None:
        return float(bound_s(compute_s, exchange_s))
    slower = contention.compute
    longer = contention.exchange
    c = sum(compute_s)
    m = sum(exchange_s)
    # Say the compute lane has more work. All exchanges then overlap with computation, so they take
    # m * longer seconds, during which the compute lane only gets 1 / slower of its usual work done.
    # The rest of its work runs at full speed. The second line is the same with the lanes swapped.
    computing = c + m * longer * (1 - 1 / slower)
    exchanging = m + c * slower * (1 - 1 / longer)
    busiest = computing if c * slower >= m * longer else exchanging
    return max(busiest, *(a + b for a, b in zip(compute_s, exchange_s, strict=True)))


def machine_of(cost: StepCost) -> MachineContention | None:
    """Returns the contention to use for a step; None if it's on an accelerator and not measured."""
    return cost.contention or (TWO_CORES if cost.shares_processor else None)


def _alone_s(profile: Profile) -> float:
    """Returns the seconds per step of a single job.

    If its step is cut, its exchanges overlap with its own computation.
    """
    return predict([profile], vote_s=0.0, steps=4).s_per_step


def memory_bytes(cost: StepCost, jobs: int) -> int:
    """Returns how many bytes of arrays this number of equal jobs needs on a rank."""
    return needed_bytes([cost.whole.memory or JobMemory()] * jobs)


def _fitting_jobs(cost: StepCost) -> int | None:
    if cost.limit_bytes is None:
        return None
    left = cost.limit_bytes - memory_bytes(cost, 1)
    each = memory_bytes(cost, 2) - memory_bytes(cost, 1)
    return 0 if left < 0 else 1 + left // max(each, 1)


def _ratio(before_s: float, after_s: float) -> float:
    return before_s / after_s if after_s > 0 else 1.0


def _lines(estimate: Estimate) -> Iterator[str]:
    cost = estimate.cost
    gains = estimate.gains
    where = f" of {cost.where}" if cost.where else ""
    ranks = f"{cost.whole.ranks} rank{'s' * (cost.whole.ranks > 1)}"
    how = "as its profile says"
    if cost.steps:
        how = f"{cost.steps} steps timed on copies, nothing else running"
    yield f"`{cost.whole.name}`{where} on {ranks}: {how}"
    yield (
        f"  c = {seconds(cost.compute_s)} of computation, m = {seconds(cost.exchange_s)} of "
        f"exchange{_wire(cost)}"
    )
    yield _row("equal jobs side by side", [str(p.jobs) for p in gains])
    yield _row("times as fast, at most", [f"{p.most:.2f}" for p in gains], "(c + m) / max(c, m)")
    expected = ["-" if p.expected is None else f"{p.expected:.2f}" for p in gains]
    yield _row("times as fast, expected", expected, _how_expected(cost, estimate.basis))
    narrow = [
        f"{p.most_narrow if p.expected_narrow is None else p.expected_narrow:.2f}" for p in gains
    ]
    kind = "at most" if gains[0].expected_narrow is None else "expected"
    yield _row(f"{kind}, exchange in 16 bits", narrow, "against full exchanges one after the other")
    fitting = "limit not known"
    if cost.limit_bytes is not None:
        fitting_jobs = estimate.fitting_jobs or 0
        fitting = (
            f"{min(fitting_jobs, 100)}{'+' * (fitting_jobs > 100)} fit into "
            f"{human_bytes(cost.limit_bytes)}"
        )
    yield _row("arrays on a rank", [human_bytes(p.memory_bytes) for p in gains], fitting)
    if estimate.cut_alone is None:
        yield "  one job with a cut: its exchanges were not cut further"
    else:
        gain = f"at most {estimate.cut_alone:.2f} times as fast as uncut"
        pieces = "four" if cost.steps or cost.cut is None else len(cost.cut.graph.collectives)
        yield f'  one job cut in {pieces}: {gain}; `cut="auto"` finds the best number'
    yield (
        '  "At most" is a bound: data loading, votes and dispatch come on top, and batches kept '
        "ahead need memory."
    )


def _row(label: str, cells: Sequence[str], note: str = "") -> str:
    return f"  {label:29}{''.join(f'{cell:>10}' for cell in cells)}{note and '   ' + note}"


def _wire(cost: StepCost) -> str:
    if cost.link_mbps is not None:
        return (
            f": {human_bytes(cost.wire_bytes)} on a link of {cost.link_mbps:g} Mbit/s that was "
            "asked for"
        )
    rate = "" if cost.mbps is None else f" at {cost.mbps:.0f} Mbit/s"
    return f": {human_bytes(cost.wire_bytes)} to each rank{rate}" if cost.whole.ranks > 1 else ""


def _how_expected(cost: StepCost, basis: str) -> str:
    if cost.mbps is None:
        return ""
    if machine_of(cost) is None:
        return "not known for accelerators"
    if not basis:
        return f"not known at {cost.mbps:.0f} Mbit/s; run `jaxcross contention`"
    return f"{'two-core hosts' if cost.contention is None else 'your contention'}, {basis}"


def _recommendation(estimate: Estimate) -> str:
    cost = estimate.cost
    k = estimate.jobs
    asked = estimate.of(k)
    step_s = cost.compute_s + cost.exchange_s
    if not cost.exchange_s:
        return (
            "One rank exchanges nothing: m = 0. Launch the ranks that will train, or ask for a "
            "link (`mbps`)."
        )
    if asked.fits is False:
        fitting = estimate.fitting_jobs or 0
        if fitting < 1:
            return "Not even one job fits into memory: make the batch or the model smaller."
        instead = f"{fitting} side by side" if fitting > 1 else _one(estimate)
        return f"{k} jobs do not fit into memory: run {instead}."
    if k == 1:
        return f"Run {_one(estimate)}."
    if step_s < TOO_SHORT_S:
        return (
            "Enlarge the batch first: votes and dispatch are a noticeable part of a step of "
            f"{seconds(step_s)}."
        )
    return _advice_on_speed(estimate, asked)


def _one(estimate: Estimate) -> str:
    gain = estimate.cut_alone
    if gain is None or gain < _WORTH:
        return "one job as it is"
    return f'one job with `cut="auto"`, at most {gain:.2f} times as fast'


def _advice_on_speed(estimate: Estimate, asked: Gain) -> str:
    cost = estimate.cost
    k = estimate.jobs
    gain = asked.expected
    about = "about"
    if gain is None:
        gain = asked.most
        about = "at most"
    faster = f"{about} {gain:.2f} times as fast as one after the other"
    if gain < _WORTH and cost.exchange_s < cost.compute_s:
        share = cost.exchange_s / (cost.compute_s + cost.exchange_s)
        return f"No: exchanges take only {share:.0%} of a step, {k} jobs run {faster}."
    narrow = ""
    narrow_gain = asked.most_narrow if asked.expected_narrow is None else asked.expected_narrow
    if narrow_gain > _WORTH * gain:
        narrow = f"; with exchange in 16 bits {about} {narrow_gain:.2f}"
    if gain < _WORTH:
        return f"No: the network is the limit, {k} jobs run {faster}{narrow}."
    return (
        f"{'Try' if asked.expected is None else 'Yes, run'} {k} jobs side by side: "
        f"{faster}{narrow}."
    )
