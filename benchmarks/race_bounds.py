"""The arithmetic of a race: bounds, rates and hidden shares.

These are pure functions of measured seconds and bytes. Throughout, c is the time that a job's step
takes to compute, and m the time that its exchange takes on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_RATE, MAX_RATE = 1e6, 4e9
RATES = {"network": 2.0, "balanced": 1.0, "compute": 0.5}
"""Per named rate: the sum of the jobs' exchange times over the sum of their compute times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The costs of one job's step in seconds, as calibrated on this core and link.

    Attributes:
        compute_s: c, the step without its exchange, alone on its core.
        exchange_s: m, its exchange, alone on the link.
        tax_s: CPU time that the exchange takes from the core while a step is computing there.
    """

    compute_s: float
    exchange_s: float
    tax_s: float = 0.0


def bound_s(jobs: Sequence[Cost], *, chain: bool = True) -> float:
    """Returns the fewest seconds per job-step that any order of the work could reach.

    For k jobs that's max(sum c, sum m, max(c + m)) / k: the core has to do all computations, the
    link all exchanges, and each job has to do one after the other.

    Args:
        jobs: The cost of each job.
        chain: Whether a job's exchange can't begin before its own computation has ended. Otherwise
            the last term is left out.
    """
    longest = max(j.compute_s + j.exchange_s for j in jobs) if chain else 0.0
    return max(sum(j.compute_s for j in jobs), sum(j.exchange_s for j in jobs), longest) / len(jobs)


def taxed_bound_s(jobs: Sequence[Cost], *, chain: bool = True) -> float:
    """Returns the same bound if exchanges also need CPU time on the core that computes.

    The core then has to copy, send and poll in addition to computing, so sum c becomes sum c + sum
    tax.
    """
    compute = sum(j.compute_s + j.tax_s for j in jobs)
    return max(compute / len(jobs), bound_s(jobs, chain=chain))


def wait_free_s(cost: Cost, first_s: float, last_share: float) -> float:
    """Returns the fewest seconds per step that a single job can reach, however its step is cut.

    Even with wait-free backpropagation, the link is idle until the first bucket of gradients is
    ready, and the last bucket can only be sent after the whole computation. The step takes as long
    as the slower of these two chains.

    Args:
        cost: The job's c and m.
        first_s: From the step's start to its first gradients.
        last_share: Bytes of the last exchange over those of all exchanges.
    """
    return max(first_s + cost.exchange_s, cost.compute_s + last_share * cost.exchange_s)


def hidden_share(jobs: Sequence[Cost], measured_s: float) -> float:
    """Estimates how much of the shorter lane was hidden, for rivals that don't record a trace.

    That's (c + m - T) / min(c, m) of the mean job-step, clipped to 0..1, where T is the measured
    time.
    """
    compute = sum(j.compute_s for j in jobs) / len(jobs)
    exchange = sum(j.exchange_s for j in jobs) / len(jobs)
    return min(1.0, max(0.0, (compute + exchange - measured_s) / min(compute, exchange)))


def rate_for(
    target_s: float, jobs: Sequence[Cost], sent_bytes: Sequence[float], reference_rate: float
) -> float:
    """Returns the rate in bits per second at which the exchanges of all jobs take `target_s`.

    We assume that an exchange takes a constant time plus its bytes over the rate. The constant then
    follows from one measurement.

    Args:
        target_s: The sum of m to reach.
        jobs: The costs at the reference rate.
        sent_bytes: Per job, the bytes sent in one direction, including headers.
        reference_rate: In bits per second.
    """
    bits = [8 * n for n in sent_bytes]
    constant = sum(
        max(0.0, j.exchange_s - b / reference_rate) for j, b in zip(jobs, bits, strict=True)
    )
    left = target_s - constant
    return min(MAX_RATE, max(MIN_RATE, sum(bits) / left if left > 0 else MAX_RATE))


def needed_bytes(parameters: int, wire: str, ranks: int) -> float:
    """Returns the bytes that all ranks together must send in a step.

    In an all-reduce over P ranks, each rank sends at least 2(P-1)/P times its operand.
    """
    return ranks * 2 * (ranks - 1) / ranks * parameters * (2 if wire == "bfloat16" else 4)


def bits_a_second(rate: str) -> float:
    """Converts a rate such as `500mbit` to bits per second. As in `tc`, `bps` means bytes."""
    unit = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
    number = rate.removesuffix("bit").removesuffix("bps")
    factor = unit.get(number[-1], 1.0)
    return float(number.rstrip("kmgt")) * factor * (8 if rate.endswith("bps") else 1)
