"""Decides when a job's replicas are compared, and warns if the job never exchanges anything.

In data-parallel training, all ranks should hold the same state, bit for bit. If they don't, each
rank trains a model of its own without anybody noticing. So replicas are compared at checkpoints, at
the end of every job and, on request, every n steps. `jaxcross.jobs.replicas` does the comparing.
This module decides which leaves should be equal, when to compare them, and whether a difference is
expected, e.g. between two exchanges of local SGD.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._endings import JobStatus
from jaxcross._pytree import digests, named_leaves, on_host
from jaxcross.checkpoint.rank_local import common_leaves
from jaxcross.errors import ExchangeError
from jaxcross.jobs.latest_state import LatestState, has_deleted
from jaxcross.jobs.replicas import BETWEEN, UNCHANGED, Findings, RankReport, exchange
from jaxcross.world.control_plane import RunOnAllRanks

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

    def __init__(self, job: str, *, rank: int, ranks: int, latest: LatestState) -> None:
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
        together: RunOnAllRanks,
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
            together: Runs work that communicates.
        """
        if self._ranks == 1:
            return
        self._restored, self._start, self._first_step, self._compared = True, state, step, step
        self._every = check_every
        self._paths = _paths(state)
        self._common = [path for path in common_leaves(state) if path not in named]
        if local:
            common = set(self._common)
            varied = {p for p, leaf in named_leaves(state) if p in common and _varied(leaf)}
            mine = RankReport(step, "", digests(state, varied))
            (every,) = together("replicas", lambda control: exchange(control, [mine]))
            first = every[0].digests
            self._common = [
                path for path in first if all(r.digests.get(path) == first[path] for r in every)
            ]
        self.findings.held = None if resumed and not local else step

    def serve(self) -> None:
        """Records that the job trains with a `ParameterServer`."""
        self._exchanged = self._serves = True
        self._start = None

    def stepped(self, step: int, *, local: bool, together: RunOnAllRanks) -> None:
        """Compares replicas after a committed step if that's due, which waits for all ranks.

        Args:
            step: How many steps are committed.
            local: Whether this step exchanged nothing although the job's steps do at other times.
            together: Runs work that communicates.

        Raises:
            ExchangeError: On every rank: replicas differ.
        """
        self._exchanged, self._between, self._start = True, local, None
        if self._due(step) and not local:
            self._compare(step, together)

    def next_batch(self, together: RunOnAllRanks) -> None:
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
            self._compare(self.batches, together)

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

    def _compare(self, count: int, together: RunOnAllRanks) -> None:
        self._compared = count
        mine = self._report(count)
        (every,) = together("replicas", lambda control: exchange(control, [mine]))
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
            for state, step in (self._latest.latest(), (self._latest.state, self._latest.step)):
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
        state, start = self._latest.latest()[0], self._start
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


def _paths(state: Any) -> list[str]:
    return [path for path, _ in named_leaves(state)]


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
