"""The arithmetic of a race: bounds, rates, shares. Pure functions over measured seconds and
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_RATE, MAX_RATE = 1e6, 4e9
RATES = {"network": 2.0, "balanced": 1.0, "compute": 0.5}
"""Sum of the jobs' exchange times over the sum of their compute times, at each named rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One job's step, in seconds, as calibrated on the link and the core.

    Attributes:
        compute_s: c, the step without its exchange, alone on its core.
        exchange_s: m, its exchange, alone on the link.
        tax_s: CPU that its exchange takes, on the core that computes, while a step computes there.
    """

    compute_s: float
    exchange_s: float
    tax_s: float = 0.0


def bound_s(jobs: Sequence[Cost], *, chain: bool = True) -> float:
    """Seconds a job-step that no order of the same work beats: max(sum c, sum m, max(c + m)) / k.

    Args:
        jobs: One cost a job.
        chain: Whether a job's exchange must wait for the end of its own computation; else the last
            term is left out.
    """
    longest = max(j.compute_s + j.exchange_s for j in jobs) if chain else 0.0
    return max(sum(j.compute_s for j in jobs), sum(j.exchange_s for j in jobs), longest) / len(jobs)


def taxed_bound_s(jobs: Sequence[Cost], *, chain: bool = True) -> float:
    """The same where exchanges burn CPU on the core that computes.

    The core has both to compute and to copy, send and poll: max(sum c + sum tax, sum m, max(c + m))
    / k.
    """
    compute = sum(j.compute_s + j.tax_s for j in jobs)
    return max(compute / len(jobs), bound_s(jobs, chain=chain))


def wait_free_s(cost: Cost, first_s: float, last_share: float) -> float:
    """Seconds a step that no cut of one job beats: the wire has work from the first bucket on, the
    core until c.

    Args:
        cost: The job's c and m.
        first_s: From the step's start to its first gradients.
        last_share: Bytes of the last exchange over those of all: they travel after the computation.
    """
    return max(first_s + cost.exchange_s, cost.compute_s + last_share * cost.exchange_s)


def hidden_share(jobs: Sequence[Cost], measured_s: float) -> float:
    """(c + m - T) / min(c, m) of the mean job-step, between 0 and 1: for rivals that keep no
    trace.
    """
    compute = sum(j.compute_s for j in jobs) / len(jobs)
    exchange = sum(j.exchange_s for j in jobs) / len(jobs)
    return min(1.0, max(0.0, (compute + exchange - measured_s) / min(compute, exchange)))


def rate_for(
    target_s: float, jobs: Sequence[Cost], sent_bytes: Sequence[float], reference_rate: float
) -> float:
    """The rate, in bits a second, at which all jobs' exchanges take `target_s` in sum.

    An exchange takes a constant and its bytes over the rate; the constant follows from one
    measurement.

    Args:
        target_s: Wanted sum of m.
        jobs: Costs at the reference rate.
        sent_bytes: Each job's bytes in one direction, headers included.
        reference_rate: In bits a second.
    """
    bits = [8 * n for n in sent_bytes]
    constant = sum(
        max(0.0, j.exchange_s - b / reference_rate) for j, b in zip(jobs, bits, strict=True)
    )
    left = target_s - constant
    return min(MAX_RATE, max(MIN_RATE, sum(bits) / left if left > 0 else MAX_RATE))


def needed_bytes(parameters: int, wire: str, ranks: int) -> float:
    """Bytes that all ranks together must send in a step: an all-reduce sends 2(P-1)/P of its
    operand a rank.
    """
    return ranks * 2 * (ranks - 1) / ranks * parameters * (2 if wire == "bfloat16" else 4)


def bits_a_second(rate: str) -> float:
    """`500mbit` as a number; `bps` is bytes, as `tc` means it."""
    unit = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
    number = rate.removesuffix("bit").removesuffix("bps")
    factor = unit.get(number[-1], 1.0)
    return float(number.rstrip("kmgt")) * factor * (8 if rate.endswith("bps") else 1)
