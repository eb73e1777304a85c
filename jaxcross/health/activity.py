"""What a rank is in, and what can be told from what several ranks say of themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Something that a rank is in.

    Attributes:
        job: Name of the job, or "" for what belongs to none.
        step: Step of the job, from 1; 0 before the first one.
        segment: Index of the segment in its program, -1 for none.
        what: `exchange`, `vote`, `compute`, `compile`, ...
        number: Which in the sequence of waits that all ranks share; 0 for what is no such wait.
        since_s: Since when, in this rank's `time.monotonic`.
        own: Whether its end is this rank's own affair: then no other rank is to blame for it.
    """

    job: str
    step: int
    segment: int
    what: str
    number: int
    since_s: float
    own: bool = False

    @classmethod
    def now(
        cls, what: str, *, job: str = "", step: int = 0, segment: int = -1, number: int = 0, own: bool = False
    ) -> Self:
        """What begins now."""
        return cls(job=job, step=step, segment=segment, what=what, number=number, since_s=time.monotonic(), own=own)

    def __str__(self) -> str:
        parts = [f"job {self.job!r}"] if self.job else []
        parts += [f"step {self.step}"] if self.job or self.step else []
        parts += [f"segment {self.segment}"] if self.segment >= 0 else []
        return f"{', '.join(parts)} ({self.said})" if parts else self.said

    @property
    def said(self) -> str:
        """What it is, in words."""
        return f"own {self.what}" if self.own else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """How far a rank is.

    Attributes:
        entered: Waits of the sequence that all ranks share which it has entered.
        waits: Those of all kinds which it is in.
        asking: Whether it is about to report.
        lately: Jobs of which a wait that was this rank's own affair has ended a short while ago.
    """

    entered: int
    waits: tuple[Activity, ...]
    asking: bool = False
    lately: frozenset[str] = frozenset()

    def excused(self, job: str | None = None) -> bool:
        """Whether others must be patient with what the rank does, or did just now, in this job or in any."""
        own = self.lately.union(wait.job for wait in self.waits if wait.own)
        return bool(own) if job is None else job in own


def missing(
    job: str, what: str, ranks: Iterable[int], answers: Mapping[int, RankStatus | None], *, patient: bool
) -> dict[int, str] | None:
    """Of the ranks that must come to a wait, those that have not, and why; None if all are there. A `patient` wait
    excuses ranks that are in waits of their own.
    """
    late = {
        r: s
        for r in ranks
        if (s := answers.get(r)) is not None and not any((w.job, w.what) == (job, what) for w in s.waits)
    }
    return {r: "it has not come so far" for r, s in late.items() if not (patient and s.excused())} if late else None


def explain(
    rank: int,
    wait: Activity,
    waited_s: float,
    answers: Mapping[int, RankStatus | None],
    awaited: Mapping[int, str] | None = None,
) -> str:
    """The report of a stuck wait. Pure.

    Args:
        rank: The rank that reports.
        wait: What it is stuck in.
        waited_s: For how long.
        answers: Every other rank's standing; None where none came.
        awaited: The ranks that it waits for and why, itself perhaps, where the order of waits does not tell.
    """
    lines = [f"jaxcross: rank {rank} has waited {waited_s:.0f} s in {wait}."]
    late = late_ranks(wait, answers, awaited)
    for r in late:
        standing = answers.get(r)
        if standing is None:  # this rank
            assert awaited is not None
            lines.append(f"  rank {r} is late itself: {awaited[r]}.")
            continue
        where = f"it is in {standing.waits[-1]}" if standing.waits else "it is in no exchange"
        if awaited is None:
            lines.append(f"  rank {r} has not arrived: {where}, after {standing.entered} of {wait.number} exchanges.")
        else:
            lines.append(f"  rank {r} has not arrived: {awaited[r]}; {where}.")
    silent = [r for r, standing in answers.items() if standing is None]
    lines += [f"  rank {r} does not answer: it has ended, or its interpreter is blocked." for r in silent]
    unlike = _unlike_waits(wait, answers)
    if unlike:
        lines += [f"  rank {r} waits in {other}." for r, other in unlike]
        lines.append(
            "  The ranks wait for different things. Did shapes or types of a step's arguments change on some ranks "
            "only, as in a shorter last batch? There the step is agreed on anew, while the others go on with it."
        )
    elif not late and not silent:
        lines.append(
            "  All ranks have arrived: MPI or the network is stuck, or what they do together. Look at their stacks."
        )
    lines.append(
        "  Remedy: look at the stacks of the late ranks. If they are merely slow (compilation, input, evaluation, "
        "disks), raise `initialize(stall_timeout_s=...)`."
    )
    return "\n".join(lines)


def late_ranks(
    wait: Activity, answers: Mapping[int, RankStatus | None], awaited: Mapping[int, str] | None = None
) -> list[int]:
    """Ranks that are `awaited` and did not fail to answer, or have not entered this wait: all ranks enter theirs in one
    order.
    """
    if awaited is not None:
        return [r for r in sorted(awaited) if r not in answers or answers[r] is not None]
    return [r for r, s in sorted(answers.items()) if s is not None and s.entered < wait.number]


def _unlike_waits(wait: Activity, answers: Mapping[int, RankStatus | None]) -> list[tuple[int, Activity]]:
    """Ranks whose wait of the same number is for something else, and that wait."""
    return [
        (rank, other)
        for rank, standing in sorted(answers.items())
        if standing is not None
        for other in standing.waits
        if other.number == wait.number > 0 and (other.what, other.segment) != (wait.what, wait.segment)
    ]
