"""Checks that all ranks have the same state.

In data-parallel training, the state should be the same on all ranks, bit for bit. If it isn't, e.g.
because somebody forgot to average a gradient, each rank is training a different model without any
error to tell you. That's why we compare the ranks' copies of the state ("replicas") at every
checkpoint, at the end of each job and, if the user asks for it, every n steps. `ReplicaChecks`
decides which leaves should be equal, when to compare them, and whether a difference is to be
expected, as it would be between two exchanges of local SGD. It also warns if a job never exchanges
anything.

Sending entire states between ranks would be slow. Instead, each rank computes a digest for each
leaf, then hashes all of these into a single number, which takes only one small all-reduce to
compare. The digests themselves are exchanged only if that number differs, to find out which leaf is
to blame.
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
"""A reason for replicas to differ. If they happen to be equal, they're still reported as equal."""

UNCHANGED = "its state is the one that it began with"
"""The reason why there's nothing to compare in a job that doesn't train. Not shown in reports."""

_log = logging.getLogger("jaxcross")


class ReplicaChecks:
    """One job's replica checks on one rank.

    Not thread-safe: for use by the job's thread and, after that thread has ended, by the runner.

    Comparing replicas is a collective operation, which all ranks must perform at the same point. To
    decide whether a comparison is due, we therefore look only at the number of steps or batches,
    which is the same on every rank, and never at the state itself, which might not be.

    Args:
        job: The job's name.
        rank: This rank.
        ranks: The number of ranks. With a single rank, nothing is compared.
        latest: The job's state and the results of its latest step.

    Attributes:
        findings: The results of all comparisons.
        batches: How many batches the job's loops have taken.
        end: This rank's report on the job's last state, for `settle`. None if there's nothing to
            report.
    """

    def __init__(self, job: str, *, rank: int, ranks: int, latest: JobState) -> None:
        self._job = job
        self._rank = rank
        self._ranks = ranks
        self._latest = latest
        self._every: int | None = None
        self.findings = Findings(job)
        self.batches = 0
        self.end: RankReport | None = None
        self._restored = self._exchanged = self._serves = False
        self._between = False  # the latest step was local, but other steps exchange
        self._start: Any = None  # the restored state, until the first exchange
        self._first_step = self._compared = 0
        self._paths: list[str] = []
        self._common: list[str] = []
        self._looked = False  # whether we've checked for an exchange after the first batch
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
        """Determines which leaves of a restored state should stay equal on all ranks.

        Normally, that's all leaves that training keeps equal (see `common_leaves`). A `local`
        state, however, may be a shard of a model, whose leaves differ between ranks by design. In
        that case, we compare the ranks' initial values and assume that leaves which start out equal
        should stay equal. This doesn't apply to leaves filled with a single value, e.g. zeros or
        ones: model shards are often initialized like that, so finding them equal tells us nothing.

        Waits for all ranks if the state is `local`.

        Args:
            state: The state.
            step: The number of steps the job has made so far.
            local: Whether each rank has restored its own state.
            named: Paths of the leaves that the job declares as rank-local. They aren't compared.
            check_every: The interval between comparisons, in steps. If given, the job fails if
                replicas differ. If None, replicas are compared only at checkpoints and at the end,
                and a difference merely causes a warning.
            resumed: Whether the state comes from a checkpoint.
            run_on_all_ranks: Used to communicate.
        """
        if self._ranks == 1:
            return
        self._restored = True
        self._start = state
        self._first_step = step
        self._compared = step
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
        """Compares replicas after a committed step, if a comparison is due.

        Waits for all ranks if it compares.

        Args:
            step: How many steps have been committed.
            local: Whether this step had no exchange, although other steps of this job do.
            run_on_all_ranks: Used to communicate.

        Raises:
            ExchangeError: On every rank: replicas differ.
        """
        self._exchanged = True
        self._between = local
        self._start = None
        if self._due(step) and not local:
            self._compare(step, run_on_all_ranks)

    def next_batch(self, run_on_all_ranks: RunOnAllRanks) -> None:
        """Warns, at most once, if the job has used its first batch without exchanging anything.

        Only functions with exchanges count as steps, so as long as a job hasn't exchanged anything,
        the interval of `check_replicas` is measured in batches. If a comparison is due after this
        batch, we perform it here and wait for all ranks.

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
        """Compares replicas, given the digests that were gathered from all ranks for a checkpoint.

        Raises:
            ExchangeError: On every rank: replicas differ, and the job checks them.
        """
        if self._ranks > 1 and every is not None:
            common = set(self._common)
            why = self._unknown() or self._uncertain
            self._add(
                [
                    RankReport(step, why, {path: d for path, d in rank.items() if path in common})
                    for rank in every
                ]
            )

    def finish(self, how: str, step: int) -> None:
        """Sets `end` to a report on the last state of a job that has ended.

        Also warns if the job has been training without ever exchanging anything. Waits for the
        state to be computed, but doesn't communicate.
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
        """Adds the comparison of the job's last state, given the reports of all ranks.

        Returns:
            The error that the job should fail with, or None. The same on every rank.
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
        """Reports on the newest state whose leaves match those of the restored state.

        Waits for that state to be computed.
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
        except Exception as error:  # e.g. out of memory; the other ranks need a report anyway
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
        """The reason why replicas may differ right now, or "". The same on every rank."""
        return BETWEEN if self._between else ""

    def _unknown(self) -> str:
        """The reason why replicas can't be compared at all, or "". The same on every rank."""
        if self._serves:
            return "it trains by a `ParameterServer`"
        return "" if self._common else "all of its leaves are rank-local"

    def _trains(self) -> bool | None:
        """Whether the job trains, i.e. changes its state. None if we can't tell.

        We find out by comparing the restored state with the newest state. If the job never sets or
        returns a new state, there's nothing to compare, and all we have to go by is whether the
        restored state was donated: if it was, the job trains; otherwise, we can't tell.
        """
        state = self._latest.newest()[0]
        start = self._start
        if not self._restored:
            return any(_floats(leaf) for leaf in jax.tree.leaves(state))
        if has_deleted(start) or has_deleted(state):
            return True
        try:
            return None if state is start else not _same(start, state)
        except Exception:  # `end` will report that we can't read the state
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
        step: The step at which the state was set.
        why: The reason why there's nothing to compare, `BETWEEN` if a difference is to be expected,
            or "".
        digests: The digests of the leaves to compare, by path.
    """

    step: int
    why: str
    digests: dict[str, str]

    def number(self) -> int:
        """Hashes the report into a number that's small enough for an all-reduce."""
        return hash_62(self.text())

    def text(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self)


def exchange(control: Control, reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Exchanges reports between ranks. Waits for all ranks.

    All ranks must pass the same number of reports in the same order, e.g. one per job.

    Returns:
        For each report passed, the list of its counterparts on all ranks, by rank.
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
    """The first leaf that differs between ranks, and two ranks where it differs."""

    path: str
    ranks: tuple[int, int]


def judge(reports: Sequence[RankReport]) -> ReplicaDifference | str | None:
    """Returns the first difference, the reason why nothing can be compared, or None. Pure."""
    first = reports[0]
    why = next((report.why for report in reports if report.why not in ("", BETWEEN)), "")
    if why:
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
    """The results of one job's comparisons so far. The same on every rank.

    Attributes:
        text: The text for the report: `equal`, `differ ...`, `not compared: ...`, or "".
        difference: The difference found by the latest comparison; None if there was none.
        unknown: Whether the latest comparison had nothing to compare.
        unit: What `step` counts: `step`, or `batch` in a job that hasn't exchanged anything.
        held: The step at which replicas were last found equal, or None.
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
        """Adds the comparison of a state with `leaves` leaves. Returns the difference, if any."""
        found = judge(reports)
        self.step = reports[0].step
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
            self.text = ""
            self.unknown = False
        elif found is not None:
            self.text = f"not compared: {found}{last}"
        else:
            compared = len(reports[0].digests)
            self.text = "equal" if compared == leaves else f"equal in {compared} of {leaves} leaves"
            self.held = self.step
        return self.difference

    def message(self) -> str:
        """Describes the latest difference, for an error or a warning."""
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
    """Returns how messages refer to a leaf. If the state is a single array, its path is empty."""
    return f"`{path}`" if path else "its only leaf"


def _paths(state: Any) -> list[str]:
    return [path for path, _ in leaves_with_paths(state)]


def _varied(leaf: Any) -> bool:
    """Whether a leaf is a numeric array with at least two different values."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return False
    array = on_host(leaf).reshape(-1)
    return array.size > 1 and array.dtype.kind not in "OSU" and bool((array != array[0]).any())


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _same(start: Any, state: Any) -> bool:
    old, new = jax.tree.leaves(start), jax.tree.leaves(state)
    return len(old) == len(new) and all(
        x is y or _equal(on_host(x), on_host(y)) for x, y in zip(old, new, strict=True)
    )


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x.tobytes() == y.tobytes() or np.array_equal(x, y)
