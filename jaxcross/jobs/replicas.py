"""Checks that all ranks hold the same state of a job.

In data-parallel training, all ranks should hold the same state, bit for bit. If they don't, each
rank trains a model of its own without anybody noticing. So replicas are compared at checkpoints, at
the end of every job and, on request, every n steps. `ReplicaChecks` decides which leaves should be
equal, when to compare them, and whether a difference is expected, e.g. between two exchanges of
local SGD. It also warns if the job never exchanges anything.

In a comparison, each rank reports a digest per leaf. That costs one small all-reduce if all ranks
report the same, and only otherwise a gather of the digests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._endings import JobStatus
from jaxcross._pytree import digests, leaves_with_paths, on_host
from jaxcross.checkpoint import common_leaves
from jaxcross.errors import ExchangeError
from jaxcross.jobs.job_state import JobState, has_deleted
from jaxcross.program import hash_62
from jaxcross.world import Control, RunOnAllRanks, gather

BETWEEN = "its last step stands between two exchanges, where ranks may differ"
"""Why a difference is expected. Replicas that are equal anyway are still reported as equal."""

UNCHANGED = "its state is the one that it began with"
"""Why a job without training has nothing to compare. Reports don't mention it."""

_log = logging.getLogger("jaxcross")


class ReplicaChecks:
    """The replica checks of one job on one rank.

    Used by the job's thread, and by the runner after it. Whether and when ranks communicate depends
    only on numbers of steps and batches, which are the same on every rank.

    Args:
        job: The job's name.
        rank: This rank.
        ranks: The number of ranks. A single rank compares nothing.
        latest: The job's state and the results of its steps.

    Attributes:
        findings: The results of all comparisons.
        batches: How many batches the job's loops have taken.
        end: This rank's report on the last state, for `settle`; None if there's nothing to report.
    """

    def __init__(self, job: str, *, rank: int, ranks: int, latest: JobState) -> None:
        self._job, self._rank, self._ranks, self._latest = job, rank, ranks, latest
        self._every: int | None = None
        self.findings = Findings(job)
        self.batches = 0
        self.end: RankReport | None = None
        self._restored = self._exchanged = self._serves = False
        self._between = False  # the latest step was a local one, and others exchange
        self._start: Any = None  # the restored state, until the first exchange
        self._first_step = self._compared = 0
        self._paths: list[str] = []
        self._common: list[str] = []
        self._looked = False  # whether we've checked that the first batch led to an exchange
        self._warned = False  # whether we've warned that replicas differ or can't be compared

    def begin(
        self,
        state: Any,
        step: int,
        *,
        local: bool,
        named: Collection[str],
        check_every: int | None,
        resumed: bool,
        run_on_all_ranks: RunOnAllRanks,
    ) -> None:
        """Records which leaves of a restored state are common to all ranks.

        Waits for all ranks if the state is `local`. A state that isn't `local` is meant to be the
        same on every rank. A local state may be a shard of a model, so only the leaves that are
        equal on all ranks count as common. Leaves whose elements are all the same, e.g. zeros or
        ones, are ignored: shards often start out with those, so being equal tells us nothing.

        Args:
            state: The state.
            step: The number of steps that led to it.
            local: Whether each rank has restored its own state.
            named: Paths of the leaves that the job names as rank-local. They aren't compared.
            check_every: The number of steps after which to compare, and to fail if replicas differ.
                If None, compare only at checkpoints and at the end, and only warn.
            resumed: Whether the state comes from a checkpoint.
            run_on_all_ranks: Runs work that communicates.
        """
        if self._ranks == 1:
            return
        self._restored, self._start, self._first_step, self._compared = True, state, step, step
        self._every = check_every
        self._paths = _paths(state)
        self._common = [path for path in common_leaves(state) if path not in named]
        if local:
            common = set(self._common)
            varied = {p for p, leaf in leaves_with_paths(state) if p in common and _varied(leaf)}
            mine = RankReport(step, "", digests(state, varied))
            (every,) = run_on_all_ranks("replicas", lambda control: exchange(control, [mine]))
            first = every[0].digests
            self._common = [
                path for path in first if all(r.digests.get(path) == first[path] for r in every)
            ]
        self.findings.held = None if resumed and not local else step

    def serve(self) -> None:
        """Records that the job trains with a `ParameterServer`."""
        self._exchanged = self._serves = True
        self._start = None

    def stepped(self, step: int, *, local: bool, run_on_all_ranks: RunOnAllRanks) -> None:
        """Compares replicas after a committed step if that's due, which waits for all ranks.

        Args:
            step: How many steps are committed.
            local: Whether this step exchanged nothing although the job's steps do at other times.
            run_on_all_ranks: Runs work that communicates.

        Raises:
            ExchangeError: On every rank: replicas differ.
        """
        self._exchanged, self._between, self._start = True, local, None
        if self._due(step) and not local:
            self._compare(step, run_on_all_ranks)

    def next_batch(self, run_on_all_ranks: RunOnAllRanks) -> None:
        """Warns once, before the next batch, if the job hasn't exchanged anything.

        As long as the job exchanges nothing, each batch counts as a step: if a comparison is due,
        this makes it, and waits for all ranks.

        Raises:
            ExchangeError: On every rank: replicas differ.
        """
        if self._ranks == 1 or self._exchanged:
            return
        if not self._looked:
            self._looked = True
            trains = self._trains()
            if trains is not False:
                self._warn_of_no_exchange("has used its first batch", "trains" if trains else "")
        if self._due(self.batches):
            self._compare(self.batches, run_on_all_ranks)

    def saved(self, step: int, every: list[dict[str, str]] | None) -> None:
        """Compares replicas by the digests that the ranks gathered for a checkpoint.

        Raises:
            ExchangeError: On every rank: replicas differ, and the job checks them.
        """
        if self._ranks > 1 and every is not None:
            common, why = set(self._common), self._unknown() or self._uncertain
            self._add(
                [
                    RankReport(step, why, {path: d for path, d in rank.items() if path in common})
                    for rank in every
                ]
            )

    def finish(self, how: str, step: int) -> None:
        """Sets `end` from a finished job's last state.

        Also warns if the job has trained but never exchanged anything. Waits for the state to be
        computed, but doesn't communicate.
        """
        if self._ranks == 1:
            return
        if self._restored:
            self.end = self._report(step if self._exchanged else self.batches)
        went_well = how in (JobStatus.ENDED, JobStatus.STOPPED)
        if not self._exchanged and went_well and self._trains():
            self._warn_of_no_exchange("came to its end", "has trained")
        self._start = None

    def settle(self, every: list[RankReport]) -> ExchangeError | None:
        """Adds the comparison of the last state.

        Returns:
            An error, the same on every rank, if the job should fail.
        """
        try:
            self._add(every)
        except ExchangeError as error:
            return error
        return None

    def _due(self, count: int) -> bool:
        every = self._every
        return every is not None and count // every > self._compared // every

    def _compare(self, count: int, run_on_all_ranks: RunOnAllRanks) -> None:
        self._compared = count
        mine = self._report(count)
        (every,) = run_on_all_ranks("replicas", lambda control: exchange(control, [mine]))
        self._add(every)

    def _add(self, every: list[RankReport]) -> None:
        self.findings.unit = "step" if self._exchanged else "batch"
        if self.findings.add(every, len(self._paths)) is not None:
            if self._every is not None:
                raise ExchangeError(self.findings.message())
            self._warn(self.findings.message())
        elif (
            self._every is not None
            and self.findings.unknown
            and not (self._unknown() or self._between)
        ):
            self._warn(f"Job `{self._job}`: replicas {self.findings.text}.")

    def _report(self, count: int) -> RankReport:
        """Returns this rank's report on the newest state that has the leaves of the restored one.

        Waits until that state is computed.
        """
        why = self._unknown()
        if why:
            return RankReport(count, why, {})
        try:
            for state, step in (self._latest.newest(), (self._latest.state, self._latest.step)):
                stale = step <= self._first_step if self._exchanged else state is self._start
                if not stale and not has_deleted(state) and _paths(state) == self._paths:
                    found = digests(state, set(self._common))
                    return RankReport(step if self._exchanged else count, self._uncertain, found)
            if not self._exchanged and self._latest.state is self._start:
                return RankReport(count, UNCHANGED, {})
        except Exception as error:  # e.g. out of memory; other ranks wait for this report
            return RankReport(
                count,
                f"rank {self._rank} cannot read its state ({type(error).__name__}: {error})",
                {},
            )
        return RankReport(
            count,
            "its function neither returned nor saved a state like the one that it restored",
            {},
        )

    @property
    def _uncertain(self) -> str:
        """Why a difference would be expected; the same on every rank."""
        return BETWEEN if self._between else ""

    def _unknown(self) -> str:
        """Why nothing can be compared, whatever the state is; the same on every rank."""
        if self._serves:
            return "it trains by a `ParameterServer`"
        return "" if self._common else "each of its leaves is a rank's own"

    def _trains(self) -> bool | None:
        """Whether the job changes a state; None if we can't tell.

        If a job has restored a state but never hands one over, we can only be certain if the
        restored state was donated.
        """
        state, start = self._latest.newest()[0], self._start
        if not self._restored:
            return any(_floats(leaf) for leaf in jax.tree.leaves(state))
        if has_deleted(start) or has_deleted(state):
            return True
        try:
            return None if state is start else not _same(start, state)
        except Exception:  # the state can't be read, which `end` reports
            return None

    def _warn_of_no_exchange(self, when: str, trains: str) -> None:
        if self._rank == 0:
            each = f"each of the {self._ranks} ranks {trains or 'trains'} a model of its own"
            _log.warning(
                "Job `%s` %s and has not exchanged anything with other ranks%s%s. Put "
                '`@jaxcross.crossover(axes="batch")` on its step in place of `jax.jit`, and '
                '`grads = jax.lax.pmean(grads, "batch")` into it. A job that only evaluates needs '
                "neither.",
                self._job,
                when,
                ": " if trains else ". If it trains, ",
                each,
            )

    def _warn(self, text: str) -> None:
        if self._rank == 0 and not self._warned:
            self._warned = True
            _log.warning("%s", text)


class RankReport(NamedTuple):
    """One rank's report for a comparison.

    Attributes:
        step: The step of the state.
        why: Why there's nothing to compare, or `BETWEEN`, or "".
        digests: The digests of the leaves to compare, by path.
    """

    step: int
    why: str
    digests: dict[str, str]

    def number(self) -> int:
        """Returns a hash of the report that fits into a reduction."""
        return hash_62(self.text())

    def text(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self)


def exchange(control: Control, reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Returns the reports of every rank: a list for each subject, by rank. Waits for all ranks.

    Every rank passes its reports on the same subjects, in the same order.
    """
    numbers = np.array([report.number() for report in reports], np.int64)
    low, high = np.split(control.allreduce_min(np.concatenate([numbers, -numbers])), 2)
    differ = np.flatnonzero(low != -high).tolist()
    every = [[report] * control.size for report in reports]
    if differ:
        for n, *found in zip(differ, *gather(control, [reports[n] for n in differ]), strict=True):
            every[n] = [RankReport(*report) for report in found]
    return every


class ReplicaDifference(NamedTuple):
    """The first leaf that differs, and two ranks between which it differs."""

    path: str
    ranks: tuple[int, int]


def judge(reports: Sequence[RankReport]) -> ReplicaDifference | str | None:
    """Returns a difference, why nothing is known, or None if all reports are equal. Pure."""
    first = reports[0]
    if why := next((report.why for report in reports if report.why not in ("", BETWEEN)), ""):
        return why
    if any(report.step != first.step for report in reports):
        return (
            f"its ranks are at different steps, {', '.join(str(report.step) for report in reports)}"
        )
    for path, digest in first.digests.items():
        for rank, report in enumerate(reports):
            if report.digests.get(path) != digest:
                return first.why or ReplicaDifference(path, (0, rank))
    return None


class Findings:
    """The results of one job's comparisons so far; the same on every rank.

    Attributes:
        text: The text for the report: `equal`, `differ ...`, `not compared: ...`, or "".
        difference: What the latest comparison found, if replicas differ.
        unknown: Whether the latest comparison had nothing to compare.
        unit: What is counted: `step`, or `batch` in a job that hasn't exchanged anything.
        held: The number of steps after which replicas were last known to be equal, or None.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.text = ""
        self.held: int | None = None
        self.difference: ReplicaDifference | None = None
        self.unknown = False
        self.unit = "step"
        self.step = 0

    def add(self, reports: Sequence[RankReport], leaves: int) -> ReplicaDifference | None:
        """Adds a comparison of a state with `leaves` leaves, and returns the difference, if any."""
        found, self.step = judge(reports), reports[0].step
        self.difference = found if isinstance(found, ReplicaDifference) else None
        self.unknown = isinstance(found, str)
        last = (
            "; never found equal in this run"
            if self.held is None
            else f"; equal {self._when(self.held)}"
        )
        if isinstance(found, ReplicaDifference):
            here, there = found.ranks
            self.text = (
                f"differ after {self.unit} {self.step}, first {_leaf(found.path)} on ranks {here} "
                f"and {there}{last}"
            )
        elif found == UNCHANGED:
            self.text, self.unknown = "", False
        elif found is not None:
            self.text = f"not compared: {found}{last}"
        else:
            compared = len(reports[0].digests)
            self.text = "equal" if compared == leaves else f"equal in {compared} of {leaves} leaves"
            self.held = self.step
        return self.difference

    def message(self) -> str:
        """Returns the difference in full, for an error or a warning."""
        assert self.difference is not None
        path, (here, there) = self.difference
        held = "They were never found equal in this run"
        if self.held is not None:
            held = f"They were equal {self._when(self.held)}"
        own = path and (
            f" If each rank is to have its own `{path}`, name it: `job.restore(state, "
            "rank_local=...)`, or `jaxcross.Job(..., rank_local=...)`."
        )
        return (
            f"Job `{self._job}`: its replicas differ after {self.unit} {self.step}, first in "
            f"{_leaf(path)} on ranks {here} and {there}. {held}. Each rank trains a model of its "
            "own. Look for what differs between ranks: gradients without `jax.lax.pmean`, a "
            f"learning rate, a seed, a step that is a plain `jax.jit`.{own}"
        )

    def _when(self, count: int) -> str:
        return f"after {self.unit} {count}" if count else "at the start"


def _leaf(path: str) -> str:
    """Returns a leaf's path for messages. A state that's a single array has an empty path."""
    return f"`{path}`" if path else "its only leaf"


def _paths(state: Any) -> list[str]:
    return [path for path, _ in leaves_with_paths(state)]


def _varied(leaf: Any) -> bool:
    """Whether a leaf is a numeric array whose elements aren't all the same."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return False
    array = on_host(leaf).reshape(-1)
    return array.size > 1 and array.dtype.kind not in "OSU" and bool((array != array[0]).any())


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _same(start: Any, state: Any) -> bool:
    """Whether all leaves have the same values."""
    old, new = jax.tree.leaves(start), jax.tree.leaves(state)
    return len(old) == len(new) and all(
        x is y or _equal(on_host(x), on_host(y)) for x, y in zip(old, new, strict=True)
    )


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x.tobytes() == y.tobytes() or np.array_equal(x, y)
