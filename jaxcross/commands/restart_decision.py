"""Judges how a run of `jaxcross launch` ended, and decides if and where to restart it. Pure.

After losing a rank or a host, we restart the run from its checkpoints. We don't restart it if a
person or a batch system stopped it (which was presumably intentional), or if the script raised an
exception (which would most likely happen again).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jaxcross._endings import ExitKind
from jaxcross.errors import quoted

if TYPE_CHECKING:
    from jaxcross.report import RankRecord, SavedPart

_BY_SIGNAL = 128
_STOPPED = (130, 143)
_STOPPED_RECORDS = (ExitKind.INTERRUPTED, ExitKind.TERMINATED, ExitKind.ABORTED, ExitKind.LEFT)
"""The possible last records of ranks in a run that was stopped. Any other last record means that
the run crashed, even if its exit code is in `_STOPPED`.
"""
# If a rank was killed by a signal, MPICH's `mpirun` exits with the number of that signal.
_KILLED = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended.

    Attributes:
        kind: `done` if it succeeded, `stopped` if a signal stopped it, `own` if the script raised
            an exception or returned an exit code, `lost` if we lost a rank or a host.
        reason: The reason, as a clause.
    """

    kind: Literal["done", "stopped", "own", "lost"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointProgress:
    """Each job's newest checkpoint, and how many runs in a row have failed to produce a new one.

    Attributes:
        newest: For each job, the newest checkpoint that is complete on all ranks.
        idle_runs: Number of runs that have ended since the last new checkpoint.
    """

    newest: Mapping[str, SavedPart]
    idle_runs: int = 0

    def after(self, records: Sequence[RankRecord]) -> CheckpointProgress:
        """Returns the progress after another run with the event files `records`."""
        complete = complete_checkpoints(records)
        newer = {
            job: part
            for job, part in complete.items()
            if job not in self.newest or part.name > self.newest[job].name
        }
        if not newer:
            return replace(self, idle_runs=self.idle_runs + 1)
        return CheckpointProgress(newest={**self.newest, **newer})

    def __str__(self) -> str:
        if not self.newest:
            return "from the start: there is no checkpoint yet"
        steps = ", ".join(
            f"job {job!r} after step {part.step}" for job, part in sorted(self.newest.items())
        )
        return f"from the checkpoints of {steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """What to do next, and why.

    Attributes:
        action: `restart`, `wait` (for hosts, then restart), or `end`.
        reason: The reason, as a sentence without a full stop.
        hosts: The hosts to start ranks on; empty if no hosts were named.
    """

    action: Literal["restart", "wait", "end"]
    reason: str
    hosts: Sequence[str] = ()


def complete_checkpoints(records: Sequence[RankRecord]) -> dict[str, SavedPart]:
    """Returns each job's newest complete checkpoint.

    A checkpoint is complete once every rank has written or read its part.
    """
    jobs = {job for record in records for job in record.saved}
    oldest = {
        job: min((record.saved[job] for record in records), key=lambda part: part.name)
        for job in jobs
        if all(job in record.saved for record in records)
    }
    return {
        job: replace(part, any_ranks=all(record.saved[job].any_ranks for record in records))
        for job, part in oldest.items()
    }


def judge_end(
    code: int, *, stopped: bool, records: Sequence[RankRecord], missing: Sequence[str] = ()
) -> RunEnd:
    """Returns how a run ended.

    Args:
        code: The exit code of `mpirun`.
        stopped: Whether the launcher received a signal to stop.
        records: The ranks' event files.
        missing: The hosts that don't answer.
    """
    from jaxcross.report import first_to_end

    if code == 0:
        return RunEnd(kind="done")
    kinds = {record.exit_kind for record in records}
    signalled = kinds & {ExitKind.TERMINATED, ExitKind.INTERRUPTED}
    if stopped or (signalled and not kinds & {"", ExitKind.REPORTED}):
        return RunEnd(kind="stopped", reason="a signal stopped it")
    for record in records:
        if record.script_raised:
            return RunEnd(kind="own", reason=record.text)
    by_rank = {record.rank: record for record in records}
    waited_for = [by_rank[rank] for record in records for rank in record.lost if rank in by_rank]
    if waited_for and all(record.exit_kind == ExitKind.LEFT for record in waited_for):
        return RunEnd(kind="own", reason="the script of a rank ended before the others'")
    if kinds & {"", ExitKind.REPORTED, ExitKind.FAILED, ExitKind.ABORTED}:
        return RunEnd(kind="lost", reason=first_to_end(records).partition(". ")[0].rstrip("."))
    if missing:
        return RunEnd(kind="lost", reason=f"no answer from {_listed(missing)}")
    if code > _BY_SIGNAL or code in _KILLED:
        return RunEnd(kind="lost", reason=f"a rank was killed outside of a run (exit code {code})")
    where = "" if records else ", before any rank came to `jaxcross.initialize()`"
    return RunEnd(kind="own", reason=f"the script ended with exit code {code}{where}")


def stop_text(code: int, stops: int, records: Sequence[RankRecord]) -> str:
    """Says how a run was stopped if the ranks can't have reported it, otherwise "". Pure.

    Args:
        code: The exit code.
        stops: How many signals to stop the launcher has received.
        records: The ranks' event files; empty if no rank ever joined.
    """
    if code not in _STOPPED:
        return ""
    if not records:
        return "stopped before the start"
    return "stopped at once by a second signal" if stops > 1 else ""


def is_explained(code: int, records: Sequence[RankRecord]) -> bool:
    """Whether the ranks' own output explains how the run ended. Pure.

    True if all ranks finished, if they were stopped, or if one of them raised an exception.
    """
    if code == 0 or code in _STOPPED:
        return all(record.exit_kind in _STOPPED_RECORDS for record in records)
    return (
        code < _BY_SIGNAL
        and bool(records)
        and all(record.exit_kind in (*_STOPPED_RECORDS, ExitKind.FAILED) for record in records)
    )


def decide(
    end: RunEnd,
    progress: CheckpointProgress,
    *,
    max_restarts: int,
    hosts: Sequence[str] = (),
    missing: Sequence[str] = (),
    last: Sequence[str] = (),
    same_ranks: bool = False,
) -> RestartDecision:
    """Decides what to do after a run.

    Args:
        end: How the run ended.
        progress: The checkpoints after the run.
        max_restarts: How many restarts in a row may fail to produce a new checkpoint.
        hosts: All hosts that the user named.
        missing: The hosts that don't answer.
        last: The hosts of the run that just ended.
        same_ranks: Whether to wait for a missing host even if we could resume with fewer ranks.
    """
    if end.kind != "lost":
        return RestartDecision(action="end", reason=f"not restarted: {end.reason or 'it is done'}")
    if progress.idle_runs > max_restarts:
        runs = f"{progress.idle_runs} runs in a row" if progress.idle_runs > 1 else "the run"
        return RestartDecision(
            action="end", reason=f"not restarted: {runs} ended without a new checkpoint"
        )
    count = f"{progress.idle_runs} of {max_restarts} restarts without a new checkpoint"
    left = [host for host in hosts if host not in missing]
    fixed = sorted(job for job, part in progress.newest.items() if not part.any_ranks)
    if fixed and set(last) <= set(left):  # the last run may not have used all hosts
        return RestartDecision(
            action="restart", reason=f"continues {progress} ({count})", hosts=last
        )
    if not missing:
        return RestartDecision(
            action="restart", reason=f"continues {progress} ({count})", hosts=hosts
        )
    if left and progress.newest and not fixed and not same_ranks:
        share = "the data is divided among fewer ranks"
        return RestartDecision(
            action="restart",
            reason=f"continues {progress}, without {_listed(missing)}: {share} ({count})",
            hosts=left,
        )
    why = "there is no checkpoint from which fewer ranks could continue"
    if not left:
        why = "no host answers"
    elif same_ranks:
        why = "`--same-ranks` was given"
    elif fixed:
        why = (
            f"each rank has its own values in the checkpoint of job {fixed[0]!r}, which needs as "
            "many ranks"
        )
    return RestartDecision(
        action="wait", reason=f"waits for {_listed(missing)}: {why}", hosts=last if fixed else hosts
    )


def _listed(hosts: Sequence[str]) -> str:
    return f"host{'s' if len(hosts) > 1 else ''} {quoted(hosts)}"
