"""Groups jobs to share devices, so that computation and exchange fill each other's gaps.

A job that mostly computes leaves the link idle, and a job that mostly exchanges leaves the device
idle, which makes them a good match. `group` looks for the grouping whose rounds take the fewest
rank-seconds in total.

With up to `EXACT` jobs on the same number of ranks, it simply compares all possible groupings. For
more jobs that would take too long, so it starts from a grouping that combines jobs of opposite
kinds (`_folded`), and improves it by repeatedly taking two groups and redistributing their jobs
(`_improve`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import numpy.typing as npt

from jaxcross.jobs import JobMemory, memory_limit, needed_by_groups, needed_bytes

Numbers = npt.NDArray[np.float64]

EXACT = 8
"""Largest number of jobs for which we compare all groupings."""
_ROUNDS = 300
_PATIENCE = 30  # the search stops after this many rounds without an improvement
_GAIN = 1e-3  # a job runs alone if sharing saves less than this share of its own step
_OVER_FULL = (
    1e6  # penalty per relative excess over the memory limit, so that any grouping that fits wins
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that one job puts on the device and the link of each of its ranks.

    Attributes:
        name: Name of the job.
        compute_s: Seconds of device time per step.
        exchange_s: Seconds of link time per step.
        ranks: Number of its ranks. Only jobs with the same number of ranks can share devices.
        steps: Weight of the job: how many steps it makes per round, relative to a job with weight
            1.
        memory: The memory that the job needs on a rank.

    Raises:
        ValueError: A number is negative or not finite, there are no ranks, or `steps` is not
            positive.
    """

    name: str
    compute_s: float
    exchange_s: float
    ranks: int = 1
    steps: float = 1.0
    memory: JobMemory = field(default_factory=JobMemory)

    def __post_init__(self) -> None:
        numbers = (self.compute_s, self.exchange_s, self.steps)
        if (
            not all(math.isfinite(number) and number >= 0 for number in numbers)
            or self.ranks < 1
            or not self.steps
        ):
            raise ValueError(
                f"`compute_s` and `exchange_s` of job `{self.name}` must be finite and not "
                "negative, `ranks` at least 1, and `steps` finite and positive, got "
                f"{self.compute_s!r:.30}, {self.exchange_s!r:.30}, {self.ranks!r:.30} and "
                f"{self.steps!r:.30}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Which jobs share devices.

    Attributes:
        groups: For each group, the names of its jobs.
        rank_s: Rank-seconds that a round of all groups takes: the sum of each group's bound times
            its number of ranks.
        alone_rank_s: The same, if every job ran alone.
        pooled_rank_s: The same, if all jobs with the same number of ranks formed a single group,
            regardless of its size and memory. No grouping can beat this.
    """

    groups: tuple[tuple[str, ...], ...]
    rank_s: float
    alone_rank_s: float
    pooled_rank_s: float


def group(loads: Sequence[Load], *, most: int = 4, memory: int | str | None = None) -> Grouping:
    """Groups jobs so that their rounds take few rank-seconds. Depends only on its arguments.

    With c and m being the compute and exchange time of a job's step, we assume that a round of a
    group (one step of each of its jobs) takes max(sum c, sum m, max(c + m)). This is the same bound
    that reports use.

    With up to 8 jobs on the same number of ranks, we compare all groupings. With more jobs, we sort
    them by the share of exchange in their step and form groups from both ends of that order, which
    brings together jobs that mostly compute and jobs that mostly exchange. Then we repeatedly take
    two groups and redistribute their jobs, until that no longer helps.

    Args:
        loads: The jobs. Their names must differ.
        most: Largest number of jobs per group, at least 1.
        memory: Device memory of a rank, in bytes or as `"80GB"`; no limit if None.

    Raises:
        TypeError: `memory` is neither a number nor a text.
        ValueError: There are no jobs, two jobs have the same name, a job doesn't fit into the
            memory alone, or `memory` isn't a number of bytes.
    """
    limit = memory_limit(memory)
    if not loads:
        raise ValueError("`loads` is empty: pass the load of at least one job")
    twice = [name for name, count in Counter(load.name for load in loads).items() if count > 1]
    if twice:
        raise ValueError(f"two jobs have the name `{twice[0]}`. Give each job a different name.")
    if most < 1:
        raise ValueError(f"a group has at least 1 job, got `most={most}`")
    if limit is not None:
        for load in loads:
            alone = needed_bytes([load.memory])
            if alone > limit:
                raise ValueError(
                    f"job `{load.name}` needs {alone} bytes alone, and a rank has {limit}. Give it "
                    "more ranks, a smaller batch, or a device with more memory."
                )
    of_ranks: dict[int, list[Load]] = defaultdict(list)
    for load in loads:
        of_ranks[load.ranks].append(load)
    groups: list[tuple[str, ...]] = []
    cost = 0.0
    alone = 0.0
    pooled = 0.0
    for ranks, same in sorted(of_ranks.items()):
        table = _LoadTable(same, limit)
        for members in _divide(table, min(most, len(same))):
            groups.append(tuple(same[i].name for i in members))
            cost += ranks * float(table.seconds(np.array([members]))[0])
        alone += ranks * float((table.compute + table.exchange)[:-1].sum())
        pooled += ranks * max(float(table.compute.sum()), float(table.exchange.sum()))
    return Grouping(groups=tuple(groups), rank_s=cost, alone_rank_s=alone, pooled_rank_s=pooled)


def bound_s(compute_s: npt.ArrayLike, exchange_s: npt.ArrayLike) -> Numbers:
    """Returns the shortest time that a round can take: max(sum c, sum m, max(c + m)).

    The arguments are arrays of the jobs' compute times (c) and exchange times (m), with the jobs
    along the last axis. A device does one thing at a time, so a round takes at least as long as all
    of its computation; likewise for the link and all exchanges. Nor can a round be shorter than the
    step of any single job.
    """
    compute = np.asarray(compute_s)
    exchange = np.asarray(exchange_s)
    return np.maximum((compute + exchange).max(-1), np.maximum(compute.sum(-1), exchange.sum(-1)))


class _LoadTable:
    """The loads of the jobs as arrays, for evaluating many groupings at once.

    The methods take an array of job numbers, with one row per group. Rows need to have the same
    length even if groups have different sizes, so we append a dummy job with a load of 0 to each
    array of loads, and pad the rows of small groups with the dummy's number.
    """

    def __init__(self, loads: Sequence[Load], limit: int | None) -> None:
        self.jobs = len(loads)
        self.compute = np.array([load.compute_s * load.steps for load in loads] + [0.0])
        self.exchange = np.array([load.exchange_s * load.steps for load in loads] + [0.0])
        self._memory = np.array(
            [astuple(memory) for memory in (*(load.memory for load in loads), JobMemory())]
        ).T
        self._limit = limit

    def seconds(self, rows: npt.NDArray[np.intp]) -> Numbers:
        """Returns the bound of each group in `rows`."""
        return bound_s(self.compute[rows], self.exchange[rows])

    def excess(self, rows: npt.NDArray[np.intp]) -> Numbers:
        """Returns by how much each group exceeds the memory limit, relative to the limit."""
        if self._limit is None:
            return np.zeros(rows.shape[:-1])
        return np.maximum(0.0, needed_by_groups(self._memory[:, rows]) / self._limit - 1)

    def costs(self, rows: npt.NDArray[np.intp]) -> Numbers:
        return self.seconds(rows) + _OVER_FULL * self.excess(rows) * (1 + self.seconds(rows))


def _divide(table: _LoadTable, most: int) -> list[tuple[int, ...]]:
    """Returns the job numbers of each group."""
    if table.jobs <= EXACT:
        return _best(table, most)
    count = -(-table.jobs // most)
    while True:
        rows = _improve(table, _folded(table, count, most))
        if not table.excess(rows).any():
            return [
                part
                for row in rows
                for part in _without_gain(table, [i for i in row.tolist() if i < table.jobs])
            ]
        if count == table.jobs:  # one job per group, which always fits
            return [(i,) for i in range(table.jobs)]
        count = min(table.jobs, count + max(1, count // 20))


def _best(table: _LoadTable, most: int) -> list[tuple[int, ...]]:
    """Returns the best of all groupings, by dynamic programming.

    In any grouping of a set of jobs, one group contains the set's first job, and the other groups
    are a grouping of the remaining jobs. If we go through all sets of jobs from small to large, we
    already know the best grouping of these remaining jobs, and only have to try each possible group
    for the first job.
    """
    best: dict[int, tuple[float, list[tuple[int, ...]]]] = {0: (0.0, [])}
    for left in range(1, 2**table.jobs):
        jobs = [i for i in range(table.jobs) if left >> i & 1]
        options: list[tuple[float, list[tuple[int, ...]]]] = []
        for size in range(min(most, len(jobs))):
            for others in itertools.combinations(jobs[1:], size):
                members = (jobs[0], *others)
                rest_s, rest = best[left & ~sum(1 << i for i in members)]
                options.append((float(table.costs(np.array(members))) + rest_s, [members, *rest]))
        # Among groupings that cost the same, take the one with the most (and hence smallest)
        # groups: the fewer jobs share their ranks, the less they disturb each other.
        shortest = min(cost for cost, _ in options)
        best[left] = max(
            (o for o in options if o[0] <= shortest * (1 + 1e-9)), key=lambda option: len(option[1])
        )
    return best[2**table.jobs - 1][1]


def _folded(table: _LoadTable, count: int, most: int) -> npt.NDArray[np.intp]:
    """Returns the groups to start the search with.

    Sorts the jobs from mostly computing to mostly exchanging. Then deals them out to the groups
    like cards: from the first group to the last, back from the last to the first, and so on. That
    way, each group gets jobs from both ends of the order.
    """
    whole = np.maximum(table.compute + table.exchange, 1e-300)[:-1]
    order = np.argsort(table.exchange[:-1] / whole, kind="stable")
    places = np.full(count * most, table.jobs)
    places[: table.jobs] = order
    rows = places.reshape(most, count)
    rows[1::2] = rows[1::2, ::-1]
    return rows.T.copy()


def _improve(table: _LoadTable, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Redistributes the jobs of two groups at a time, as long as that makes rounds shorter."""
    count, most = rows.shape
    if count < 2:
        return rows
    halves = [half for half in itertools.combinations(range(2 * most), most) if 0 in half]
    splits = np.array([[*half, *(i for i in range(2 * most) if i not in half)] for half in halves])
    random = np.random.default_rng(0)
    idle = 0
    for turn in range(_ROUNDS):
        # Pair up the groups, then redistribute the jobs of each pair. There's most to gain if one
        # group mostly computes and the other mostly exchanges, so we sort the groups and pair
        # opposite ends. Since that would keep producing the same pairs, we pair the groups at
        # random every other time.
        lean = (table.compute[rows] - table.exchange[rows]).sum(-1)
        order = np.argsort(lean, kind="stable") if turn % 2 == 0 else random.permutation(count)
        first = order[: count // 2]
        second = order[::-1][: count // 2]
        pool = np.concatenate([rows[first], rows[second]], axis=1)
        options = pool[:, splits].reshape(len(first), len(splits), 2, most)
        costs = table.costs(options).sum(-1)
        chosen = costs.argmin(axis=1)
        pairs = np.arange(len(first))
        now = table.costs(rows[first]) + table.costs(rows[second])
        better = costs[pairs, chosen] < now * (1 - 1e-12)
        rows[first[better]] = options[pairs, chosen][better, 0]
        rows[second[better]] = options[pairs, chosen][better, 1]
        idle = 0 if better.any() else idle + 1
        if idle == _PATIENCE:
            break
    return rows


def _without_gain(table: _LoadTable, members: list[int]) -> list[tuple[int, ...]]:
    """Splits off jobs that gain nothing from sharing ranks, each into its own group."""
    parts: list[tuple[int, ...]] = []
    left = list(members)
    for job in members:
        rest = [i for i in left if i != job]
        if not rest:
            break
        together = float(table.seconds(np.array(left)))
        apart = float(table.seconds(np.array(rest)))
        alone = float(table.seconds(np.array([job])))
        if apart + alone <= together + _GAIN * alone:
            parts.append((job,))
            left = rest
    return [tuple(left), *parts] if left else parts
