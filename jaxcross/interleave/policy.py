"""Policies, which decide whose turn it is on a lane.

The same policy serves both lanes of every rank. Its only inputs are job numbers and the lane's past
use. A job's number is its place in the order in which jobs were added or joined, and is never
reused.
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
"""Whether jobs in crossover make their first steps once all are ready, or each as soon as it is."""


@runtime_checkable
class Policy(Protocol):
    """The rule by which jobs get turns. It's immutable and uses neither a clock nor random numbers.

    A policy must decide from its arguments alone, because the exchange lanes of all ranks ask it
    the same question and must get the same answer.

    A policy may also have the attributes `depth` and `start`, which mean the same as for
    `RoundRobin`. Without them, the run uses the defaults.
    """

    @property
    def name(self) -> str:
        """A short name for reports."""
        ...

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        """Selects the jobs that may run now, at least one.

        Args:
            jobs: The jobs that have neither ended nor been paused, in ascending order.
        """
        ...

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        """Returns the job that gets the next turn.

        No candidate may be passed over forever.

        Args:
            candidates: The jobs to choose from, at least one.
            turns: The past turns on this lane.
        """
        ...

    def share(self, job: int) -> float:
        """Returns the job's share of a lane, relative to the other jobs' shares."""
        ...


class Turns:
    """The past turns on one lane, accounted for by start-time fair queueing.

    See Goyal, Vin and Cheng, SIGCOMM 1996, section 2. Each job has a tag, which advances by what
    the job uses of the lane, divided by its share. `Weighted` takes the job with the lowest tag.
    Fair queueing in its usual form orders turns by the tags of their ends, so it has to know how
    long a turn will take. Here, a turn is ordered by the tag of its start, so it can be charged
    once it's over, when we've measured how long it took.

    Attributes:
        policy: Decides whose turn it is.
        jobs: The jobs on the lane, in ascending order.
        last: The job that had the previous turn, or -1 before the first turn.
    """

    def __init__(self, policy: Policy, jobs: int) -> None:
        self.policy, self.jobs, self.last = policy, list(range(jobs)), -1
        self._virtual_time = 0.0  # the start tag of the latest turn
        self._finish_tags = dict.fromkeys(self.jobs, 0.0)

    def add(self, job: int) -> None:
        """Adds a job. It gets no credit for the time before it joined."""
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
        """Returns the start tag of the job's next turn: its past use of the lane over its share.

        A job that was idle doesn't catch up, because its tag is at least the lane's virtual time.
        """
        return max(self._virtual_time, self._finish_tags[job])

    def distance(self, job: int) -> int:
        """Returns how many turns away the job's turn is in round-robin order."""
        return (bisect_left(self.jobs, job) - bisect_right(self.jobs, self.last)) % len(self.jobs)

    def round(self) -> Iterator[int]:
        """Yields all jobs in round-robin order, starting after the last turn."""
        first = bisect_right(self.jobs, self.last)
        yield from self.jobs[first:]
        yield from self.jobs[:first]

    def begin(self, job: int) -> None:
        """Begins a turn of the job."""
        self.last = job
        self._virtual_time = self._finish_tags[job] = self.start_tag(job)

    def charge(self, job: int, amount: float) -> None:
        """Charges a job for its use of the lane, in bytes or nanoseconds.

        Use the same unit in all calls.
        """
        if job in self._finish_tags:
            # A job's last segments may complete after it has left.
            self._finish_tags[job] += amount / self.policy.share(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """Crossover in which all jobs run and take turns.

    A turn is one segment on the compute lane, or one exchange on the exchange lane.

    Args:
        depth: Number of compute segments on the device at once. If None, the number that suits
            JAX's backend; so far, this is 2 on every backend.
        start: With `together`, the jobs that begin the run make their first steps only once all of
            them have compiled theirs, so that no job trains while another one compiles. They wait
            for a job as long as it traces and compiles, but for at most 30 s while it does anything
            else before its first step. With `as_ready`, each job begins as soon as it can. The
            results are bitwise identical either way.

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

    A job gets its share no matter how large its steps are; whatever it doesn't use goes to the
    other jobs. A segment or an exchange in progress isn't interrupted, so a job's step waits for at
    most one segment or exchange of each other job. To keep that wait short, cut large jobs into
    segments no longer than the small job's.

    Args:
        shares: The share of each job, in the order in which the jobs were added. Only their ratios
            matter. Must be identical across ranks.
        joining: The share of each job that joins during the run. If None, the mean of `shares`.
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
                "`Weighted` takes a share for each job, as in `Weighted((4, 1))`, got "
                f"`shares={self.shares!r}` and `joining={self.joining!r}`."
            )
        if not numbers or not all(math.isfinite(share) and share > 0 for share in numbers):
            raise ValueError(
                "`shares` of `Weighted` must be positive numbers, one for each job, got "
                f"{self.shares}."
            )
        # Ranks compare their policies' printed forms. Convert the shares, so that a list or an
        # array on one rank prints like an equal tuple on another.
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
    """Runs one whole training loop after the other, in the order in which jobs were added.

    This is the baseline that crossover is compared with.

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
        # After a pause there can be several: the job that runs now, and the one that ran until the
        # pause and still has to finish its call.
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
    return int(depth)  # ranks compare what a policy prints


def checked_start(start: Any) -> Start:
    """Returns a policy's `start`.

    Raises:
        ValueError: It is neither `together` nor `as_ready`.
    """
    check_choice(start, Start, "`start` of a policy")
    return start


def _in_turn(candidates: Collection[int], turns: Turns) -> int:
    # Nearly always, the first job is a candidate. With 64 jobs, taking the minimum over all
    # distances would cost as much as the rest of the event.
    return next(job for job in turns.round() if job in candidates)


def _is_number(value: object) -> bool:
    """Whether `value` is a real number of Python, NumPy or JAX. Texts and booleans aren't."""
    if isinstance(value, bool | str | bytes):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return True
