"""What a rank is doing, and the watchdogs' joint report about a stuck wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Something a rank is doing: waiting for other ranks, computing, compiling, ...

    Attributes:
        job: Name of the job, or "" for an activity that belongs to no job.
        step: The job's step, counted from 1, or 0 before the first step.
        segment: Index of the segment in its program, or -1 if there's none.
        what: `exchange`, `vote`, `compute`, `compile`, ...
        number: Position in the shared sequence, i.e. among the waits that all ranks enter in the
            same order. 0 if the activity isn't part of it.
        since_s: When it began, as measured by `time.monotonic` on this rank.
        local: Whether the end of the activity depends on this rank alone. If so, no other rank can
            be to blame if it takes too long.
    """

    job: str
    step: int
    segment: int
    what: str
    number: int
    since_s: float
    local: bool = False

    @classmethod
    def now(
        cls,
        what: str,
        *,
        job: str = "",
        step: int = 0,
        segment: int = -1,
        number: int = 0,
        local: bool = False,
    ) -> Self:
        """Returns an activity that begins now."""
        return cls(
            job=job,
            step=step,
            segment=segment,
            what=what,
            number=number,
            since_s=time.monotonic(),
            local=local,
        )

    def __str__(self) -> str:
        parts = [f"job {self.job!r}"] if self.job else []
        parts += [f"step {self.step}"] if self.job or self.step else []
        parts += [f"segment {self.segment}"] if self.segment >= 0 else []
        return f"{', '.join(parts)} ({self.label})" if parts else self.label

    @property
    def label(self) -> str:
        """The kind of activity, as it appears in reports."""
        return f"own {self.what}" if self.local else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What a rank's watchdog answers when another rank's watchdog asks what it's doing.

    Attributes:
        entered: How many waits of the shared sequence the rank has entered so far.
        waits: All waits that the rank is currently in.
        asking: Whether the rank is about to report a stuck wait itself.
        recent_local: Jobs whose local wait ended recently.
    """

    entered: int
    waits: tuple[Activity, ...]
    asking: bool = False
    recent_local: frozenset[str] = frozenset()

    def may_be_late(self, job: str | None = None) -> bool:
        """Whether the rank is, or recently was, in a local wait of the job, e.g. for data.

        With None, local waits of any job count.
        """
        local = self.recent_local.union(wait.job for wait in self.waits if wait.local)
        return bool(local) if job is None else job in local


def missing_ranks(
    job: str,
    what: str,
    ranks: Iterable[int],
    answers: Mapping[int, RankStatus | None],
    *,
    excuse_local: bool,
) -> dict[int, str] | None:
    """Returns the ranks that haven't entered a wait, each with the reason, or None if all have.

    Ranks that haven't answered don't count as missing. If all missing ranks are excused, the result
    is empty rather than None.

    Args:
        job: The job that waits, or "" for none.
        what: The name of the wait.
        ranks: The ranks that must enter the wait.
        answers: The status of each rank, or None for ranks that didn't answer.
        excuse_local: Whether to excuse ranks that are, or recently were, in a local wait.
    """
    late = {}
    for rank in ranks:
        status = answers.get(rank)
        if status is not None and not any(
            (wait.job, wait.what) == (job, what) for wait in status.waits
        ):
            late[rank] = status
    if not late:
        return None
    return {
        r: "it has not reached that point"
        for r, status in late.items()
        if not (excuse_local and status.may_be_late())
    }


def stall_report(
    rank: int,
    wait: Activity,
    waited_s: float,
    answers: Mapping[int, RankStatus | None],
    waiting_for: Mapping[int, str] | None = None,
) -> str:
    """Returns the report about a stuck wait. Pure.

    Args:
        rank: The rank that reports.
        wait: The stuck wait.
        waited_s: How long it has taken so far.
        answers: The status of every other rank, or None for ranks that didn't answer.
        waiting_for: The ranks that hold up the wait, each with the reason. Needed if the wait isn't
            part of the shared sequence. May contain the reporting rank.
    """
    lines = [f"jaxcross: rank {rank} has waited {waited_s:.0f} s in {wait}."]
    late = late_ranks(wait, answers, waiting_for)
    for r in late:
        status = answers.get(r)
        if status is None:  # the reporting rank itself
            assert waiting_for is not None
            lines.append(f"  rank {r} is late itself: {waiting_for[r]}.")
            continue
        where = f"it is in {status.waits[-1]}" if status.waits else "it is in no exchange"
        if waiting_for is None:
            lines.append(
                f"  rank {r} has not arrived: {where}, after {status.entered} of {wait.number} "
                "exchanges."
            )
        else:
            lines.append(f"  rank {r} has not arrived: {waiting_for[r]}; {where}.")
    unanswered = [r for r, status in answers.items() if status is None]
    lines += [
        f"  rank {r} does not answer: it has ended, or its interpreter is blocked."
        for r in unanswered
    ]
    different = _different_waits(wait, answers)
    if different:
        lines += [f"  rank {r} waits in {other}." for r, other in different]
        lines.append(
            "  The ranks wait for different things. Did shapes or types of a step's arguments "
            "change on some ranks only, as in a shorter last batch? Those ranks then have to agree "
            "on the step again, while the others continue with it. Change shapes and types on all "
            "ranks in the same step."
        )
    elif not late and not unanswered:
        lines.append(
            "  All ranks have arrived: MPI or the network is stuck, or the work that they do "
            "together. Look at their stacks."
        )
    lines.append(
        "  Remedy: look at the stacks of the late ranks. If they are merely slow (compilation, "
        "input, evaluation, disks), raise `initialize(stall_timeout_s=...)`."
    )
    return "\n".join(lines)


def late_ranks(
    wait: Activity,
    answers: Mapping[int, RankStatus | None],
    waiting_for: Mapping[int, str] | None = None,
) -> list[int]:
    """Returns the ranks that hold up a wait.

    Most waits are numbered, because all ranks enter them in the same order. So a rank that has
    entered fewer of them than this rank hasn't arrived at this wait yet, and is holding it up.

    A few waits have no number. For these, the caller works out which ranks are to blame and passes
    them as `waiting_for`. Ranks that didn't answer are left out, because they're reported
    separately.
    """
    if waiting_for is not None:
        return [r for r in sorted(waiting_for) if r not in answers or answers[r] is not None]
    return [r for r, s in sorted(answers.items()) if s is not None and s.entered < wait.number]


def _different_waits(
    wait: Activity, answers: Mapping[int, RankStatus | None]
) -> list[tuple[int, Activity]]:
    """Returns ranks that are in a different wait with the same number, along with that wait."""
    return [
        (rank, other)
        for rank, status in sorted(answers.items())
        if status is not None
        for other in status.waits
        if other.number == wait.number > 0
        and (other.what, other.segment) != (wait.what, wait.segment)
    ]
