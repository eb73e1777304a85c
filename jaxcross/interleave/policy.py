"""Policies, which choose the next job on a lane.

Each rank has a compute lane and an exchange lane, and applies the same policy to both. All that a
policy knows about the jobs is their numbers and how much each of them has used the lane so far.
Jobs are numbered in the order in which they were added to the run or joined it, and numbers are
never reused.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from jaxcross._arguments import check_choice, is_whole

Start = Literal["together", "as_ready"]
"""Whether jobs in crossover make their first steps once all are ready, or each as soon as it can.
"""


@runtime_checkable
class Policy(Protocol):
    """The rule that chooses the next job on a lane. Immutable, without a clock or random numbers.

    The ranks don't communicate to find out whose exchange is next. Instead, each rank asks its own
    copy of the policy. All copies must give the same answer, or the ranks would run different
    exchanges and deadlock. So a policy's decisions may depend on nothing but its arguments.

    A policy class may also define `depth` (the number of segments on the device) and `start`
    (whether jobs begin together), with the same meaning as in `RoundRobin`. If it doesn't, the run
    uses the defaults.
    """

    @property
    def name(self) -> str:
        """The policy's name in reports."""
        ...

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        """Returns the jobs that may run now. Must not be empty.

        Args:
            jobs: The jobs that are neither finished nor paused, in ascending order.
        """
        ...

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        """Returns the next job on the lane.

        A policy must not starve a job: a job that keeps being a candidate has to be chosen
        eventually.

        Args:
            candidates: The jobs to choose from. Never empty.
            turns: How the jobs have used this lane so far.
        """
        ...

    def share(self, job: int) -> float:
        """Returns the job's weight on a lane. Only the ratios between the jobs' weights matter."""
        ...


class Turns:
    """How much each job has used a lane so far, for start-time fair queueing.

    The algorithm is due to Goyal, Vin and Cheng (SIGCOMM 1996, section 2). Each job has a tag, its
    position in virtual time. Whenever the job uses the lane, its tag advances by the amount used
    divided by the job's share. `Weighted` always picks the job with the lowest tag, so in the long
    run each job gets its share.

    Classic fair queueing picks the job whose turn would end first in virtual time (the lowest
    finish tag), but that requires knowing in advance how long each turn will take. Start-time fair
    queueing picks the job whose turn would start first instead, so we can charge a job after its
    turn, once we've measured how long it took.

    Attributes:
        policy: Picks the next job.
        jobs: The jobs on the lane, in ascending order.
        last: The job that used the lane last, or -1 if none has yet.
    """

    def __init__(self, policy: Policy, jobs: int) -> None:
        self.policy = policy
        self.jobs = list(range(jobs))
        self.last = -1
        self._virtual_time = 0.0  # start tag of the latest turn
        self._finish_tags = dict.fromkeys(self.jobs, 0.0)

    def add(self, job: int) -> None:
        """Adds a job, which gets no credit for the time before it joined."""
        insort(self.jobs, job)
        self._finish_tags[job] = self._virtual_time

    def remove(self, job: int) -> None:
        """Removes a job."""
        self.jobs.remove(job)
        del self._finish_tags[job]

    def next(self, candidates: Collection[int]) -> int:
        """Returns the job that the policy chooses."""
        return self.policy.next(candidates, self)

    def start_tag(self, job: int) -> float:
        """Returns the start tag that the job's next turn would have.

        In virtual time, the next turn starts where the job's last turn ended (its finish tag), but
        no earlier than the lane's current virtual time. Without this lower bound, an idle job could
        save up its share, and then hog the lane until it has caught up.
        """
        return max(self._virtual_time, self._finish_tags[job])

    def distance(self, job: int) -> int:
        """Returns how many other jobs come before this one in round-robin order."""
        return (bisect_left(self.jobs, job) - bisect_right(self.jobs, self.last)) % len(self.jobs)

    def round(self) -> Iterator[int]:
        """Yields all jobs in round-robin order, starting with the one after the last turn."""
        first = bisect_right(self.jobs, self.last)
        yield from self.jobs[first:]
        yield from self.jobs[:first]

    def begin(self, job: int) -> None:
        """Records that a turn of the job begins."""
        self.last = job
        self._virtual_time = self._finish_tags[job] = self.start_tag(job)

    def charge(self, job: int, amount: float) -> None:
        """Charges a job for its use of the lane, in bytes or nanoseconds.

        All calls for a lane must use the same unit.
        """
        if job in self._finish_tags:
            # Otherwise the job has already left. Its last segments may still complete after that.
            self._finish_tags[job] += amount / self.policy.share(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Crossover in which all jobs take turns.

    A turn is one segment on the compute lane, or one exchange on the exchange lane.

    Args:
        depth: Number of compute segments on the device at once. If None, a number that suits JAX's
            backend is used, which is 2 on all backends so far.
        start: With `together`, the run's initial jobs hold off on their first steps until all of
            them have compiled, so that no job trains while another is still compiling. They wait
            indefinitely for a job that's tracing or compiling, but at most 30 s in total for
            anything else it does before its first step. With `as_ready`, each job begins as soon as
            it can. The results are bitwise identical either way.

    Raises:
        TypeError: `depth` is not a whole number.
        ValueError: `depth` is below 1, or `start` is neither `together` nor `as_ready`.
    """

    depth: int | None = None
    start: Start = "together"
    name: str = field(default="round-robin", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", checked_depth(self.depth))
        checked_start(self.start)

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs)

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        return _in_turn(candidates, turns)

    def share(self, job: int) -> float:
        del job
        return 1.0


@dataclass(frozen=True, slots=True)
class Weighted:
    """Crossover in which each job gets a given share of the device's time and of the link's bytes.

    A job gets its share no matter how large its steps are, and whatever it leaves unused goes to
    the other jobs. Segments and exchanges are never interrupted, so a step may have to wait for a
    segment or an exchange of every other job. To keep that wait short, cut large jobs into segments
    that take no longer than those of the small jobs.

    Args:
        shares: The share of each job, in the order in which the jobs were added. Only their ratios
            matter. Must be identical across ranks.
        joining: The share of each job that joins during the run. If None, the mean of `shares` is
            used.
        depth: As for `RoundRobin`.
        start: As for `RoundRobin`.

    Raises:
        TypeError: `shares` is not a sequence of numbers, `joining` is not a number, or `depth` is
            not a whole number.
        ValueError: A share is not a positive finite number, `depth` is below 1, or `start` is
            neither `together` nor `as_ready`.
    """

    shares: tuple[float, ...]
    _: KW_ONLY
    joining: float | None = None
    depth: int | None = None
    start: Start = "together"
    name: str = field(default="weighted", init=False, repr=False)

    def __post_init__(self) -> None:
        ordered = not isinstance(self.shares, str | Mapping | AbstractSet) and isinstance(
            self.shares, Iterable
        )
        numbers = [*self.shares] if ordered else []
        if not ordered or not all(
            map(_is_number, [*numbers, 1.0 if self.joining is None else self.joining])
        ):
            raise TypeError(
                "`Weighted` takes a number for each job, as in `Weighted((4, 1))`, and optionally "
                f"one for jobs that are added later, got `shares={self.shares!r}` and "
                f"`joining={self.joining!r}`."
            )
        if not numbers or not all(math.isfinite(share) and share > 0 for share in numbers):
            raise ValueError(
                "`shares` of `Weighted` must be positive numbers, one for each job, got "
                f"{self.shares}."
            )
        # The ranks compare the policy's `repr` to make sure that they all use the same policy.
        # Without this conversion, equal shares would look different if one rank passed a tuple and
        # another a list or an array.
        object.__setattr__(self, "shares", tuple(map(float, numbers)))
        if self.joining is not None and not (math.isfinite(self.joining) and self.joining > 0):
            raise ValueError(
                f"`joining` of `Weighted` must be a positive number, got {self.joining}."
            )
        if self.joining is not None:
            object.__setattr__(self, "joining", float(self.joining))
        object.__setattr__(self, "depth", checked_depth(self.depth))
        checked_start(self.start)

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs)

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        return min(candidates, key=lambda job: (turns.start_tag(job), turns.distance(job)))

    def share(self, job: int) -> float:
        if job < len(self.shares):
            return self.shares[job]
        return sum(self.shares) / len(self.shares) if self.joining is None else self.joining


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential:
    """Runs the jobs one after another, each to completion, in the order in which they were added.

    This is the baseline for measuring what crossover gains.

    Args:
        depth: As for `RoundRobin`.

    Raises:
        TypeError: `depth` is not a whole number.
        ValueError: `depth` is below 1.
    """

    depth: int | None = None
    name: str = field(default="sequential", init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", checked_depth(self.depth))

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs[:1])

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        # Only one job runs at a time, so there's usually just one candidate. But a job that's
        # paused in the middle of a call still has to complete that call while the next job is
        # already running.
        return _in_turn(candidates, turns)

    def share(self, job: int) -> float:
        del job
        return 1.0


def checked_depth(depth: Any) -> int | None:
    """Returns a policy's `depth` as an int or None.

    Raises:
        TypeError: It is neither a whole number nor None.
        ValueError: It is below 1.
    """
    if depth is None:
        return None
    if not is_whole(depth):
        raise TypeError(f"`depth` of a policy must be a whole number or None, got {depth!r}.")
    if depth < 1:
        raise ValueError(f"`depth` of a policy must be at least 1, got {depth}.")
    return int(depth)  # so that its `repr`, which ranks compare, is that of an int


def checked_start(start: Any) -> Start:
    """Returns a policy's `start`.

    Raises:
        ValueError: It is neither `together` nor `as_ready`.
    """
    check_choice(start, Start, "`start` of a policy")
    return start


def _in_turn(candidates: Collection[int], turns: Turns) -> int:
    # The first job in round-robin order is nearly always a candidate, so this loop usually stops
    # right away. Taking the minimum of `distance` over all candidates would be shorter, but with 64
    # jobs, it takes as long as everything else we do for an event.
    return next(job for job in turns.round() if job in candidates)


def _is_number(value: object) -> bool:
    """Whether `value` is a real number from Python, NumPy or JAX. Strings and booleans aren't."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return True
