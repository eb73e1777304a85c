"""Tests groups of jobs against all possible groupings, a linear program, and the pooled bound."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.jobs.memory import JobMemory
from jaxcross.plan.groups import Grouping, Load, group

LARGE = Load(
    name="large",
    compute_s=1,
    exchange_s=1,
    memory=JobMemory(peak_bytes=9, boundary_bytes=2, exchange_temporary_bytes=1),
)


def _seconds(members: tuple[Load, ...]) -> float:
    compute = [load.compute_s * load.steps for load in members]
    exchange = [load.exchange_s * load.steps for load in members]
    return max(
        sum(compute), sum(exchange), *(c + m for c, m in zip(compute, exchange, strict=True))
    )


def _needed(members: tuple[Load, ...]) -> int:
    memory = [load.memory for load in members]
    held = sum(own.boundary_bytes for own in memory)
    fullest = max(held - own.boundary_bytes + own.peak_bytes for own in memory)
    return fullest + max(own.exchange_temporary_bytes for own in memory)


def _partitions(loads: list[Load], most: int) -> Iterator[list[tuple[Load, ...]]]:
    """Yields all ways to partition the jobs. A job joins an existing group or starts a new one."""
    if not loads:
        yield []
        return
    for groups in _partitions(loads[1:], most):
        yield [(loads[0],), *groups]
        for i, members in enumerate(groups):
            if len(members) < most:
                yield [*groups[:i], (loads[0], *members), *groups[i + 1 :]]


def _loads(seed: int, count: int, ranks: tuple[int, ...] = (1,)) -> list[Load]:
    random = np.random.default_rng(seed)
    compute, exchange = random.lognormal(0, 1, (2, count))
    return [
        Load(
            name=f"job{i}",
            compute_s=float(compute[i]),
            exchange_s=float(exchange[i]),
            ranks=int(random.choice(ranks)),
            steps=float(random.choice([0.5, 1, 2])),
            memory=JobMemory(
                peak_bytes=int(random.integers(10, 40)),
                boundary_bytes=int(random.integers(1, 10)),
                exchange_temporary_bytes=i % 2,
            ),
        )
        for i in range(count)
    ]


def _check(found: Grouping, loads: list[Load], most: int, memory: int | None) -> None:
    """Checks what must hold for any grouping.

    Every job is in exactly one group. The jobs of a group fit into memory and have the same number
    of ranks. The totals are the sums over all groups.
    """
    named = {load.name: load for load in loads}
    assert sorted(itertools.chain.from_iterable(found.groups)) == sorted(named)
    members = [tuple(named[name] for name in names) for names in found.groups]
    assert all(len(m) <= most and len({load.ranks for load in m}) == 1 for m in members)
    assert memory is None or all(_needed(m) <= memory for m in members)
    assert found.rank_s == pytest.approx(sum(m[0].ranks * _seconds(m) for m in members))
    assert found.pooled_rank_s <= found.rank_s * (
        1 + 1e-9
    ) and found.rank_s <= found.alone_rank_s * (1 + 1e-9)


@pytest.mark.mostly_integration("0-None-2", "0-None-3", "0-60-2", "2-None-2", "2-None-3")
@pytest.mark.parametrize("most", [2, 3, 4])
@pytest.mark.parametrize("memory", [None, 60])
@pytest.mark.parametrize("seed", range(3))
def test_eight_jobs_are_grouped_best(seed: int, memory: int | None, most: int) -> None:
    loads = _loads(seed, 7 + seed % 2)
    found = group(loads, most=most, memory=memory)
    _check(found, loads, most, memory)
    fitting = (
        p
        for p in _partitions(loads, most)
        if memory is None or all(_needed(m) <= memory for m in p)
    )
    assert found.rank_s == pytest.approx(min(sum(map(_seconds, p)) for p in fitting))


@pytest.mark.parametrize("seed", range(2))
def test_pairs_are_near_the_best_matching(seed: int) -> None:
    """Within 2% of the exact pairing of 40 jobs, which an integer linear program finds."""
    from scipy.optimize import LinearConstraint, milp

    loads = _loads(seed, 40)
    pairs = [(load,) for load in loads] + list(itertools.combinations(loads, 2))
    cover = np.array([[load in pair for pair in pairs] for load in loads], float)
    best = milp(
        np.array([_seconds(p) for p in pairs]),
        constraints=LinearConstraint(cover, 1, 1),
        integrality=1,
    )
    found = group(loads, most=2)
    _check(found, loads, 2, None)
    assert best.fun - 1e-9 <= found.rank_s <= 1.02 * best.fun


@pytest.mark.mostly_integration("None")
@pytest.mark.parametrize("memory", [None, 45])
def test_a_thousand_jobs_are_near_the_pooled_bound(memory: int | None) -> None:
    """The jobs have 4, 8 or 16 ranks each (over 9,000 in total), weights, and a memory limit."""
    loads = _loads(0, 1000, ranks=(4, 8, 16))
    assert sum(load.ranks for load in loads) > 9000
    found = group(loads, most=4, memory=memory)
    _check(found, loads, 4, memory)
    assert found.pooled_rank_s >= 0.97 * found.rank_s


@given(
    st.integers(0, 10**6),
    st.integers(1, 24),
    st.integers(1, 5),
    st.sampled_from([None, 40, 55, 200]),
)
def test_any_grouping_is_one(seed: int, count: int, most: int, memory: int | None) -> None:
    loads = _loads(seed, count, ranks=(1, 2))
    _check(group(loads, most=most, memory=memory), loads, most, memory)


def test_jobs_that_only_compute_stay_alone() -> None:
    loads = [Load(name=str(i), compute_s=1.0, exchange_s=0.0) for i in range(12)]
    assert sorted(group(loads).groups) == sorted((str(i),) for i in range(12))


@pytest.mark.parametrize(
    ("loads", "options", "message"),
    [
        ([], {}, "at least one job"),
        ([Load(name="a", compute_s=1, exchange_s=1)] * 2, {}, "two jobs have the name `a`"),
        ([Load(name="a", compute_s=1, exchange_s=1)], {"most": 0}, "`most=0`"),
        ([LARGE], {"memory": 9}, "job `large` needs 10 bytes alone"),
        ([LARGE], {"memory": "9B"}, "job `large` needs 10 bytes alone, and a rank has 9"),
        ([LARGE], {"memory": "lots"}, "`memory` must be a number of bytes with a unit"),
    ],
)
def test_what_cannot_be_grouped_is_an_error(
    loads: list[Load], options: dict[str, int | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        group(loads, **options)


@pytest.mark.parametrize(
    "change", [{"compute_s": -1.0}, {"exchange_s": float("nan")}, {"ranks": 0}, {"steps": 0.0}]
)
def test_a_load_has_sensible_numbers(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="job `a` must be finite"):
        Load(**{"name": "a", "compute_s": 1.0, "exchange_s": 1.0, **change})  # type: ignore[arg-type]
