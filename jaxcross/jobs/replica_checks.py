"""One job's replicas: when they are compared, and a warning if the job never exchanges anything."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import digests, on_host
from jaxcross.checkpoint.rank_gather import RunOnAllRanks
from jaxcross.checkpoint.rank_local import common_leaves
from jaxcross.errors import ExchangeError
from jaxcross.jobs.latest_state import LatestState, has_deleted
from jaxcross.jobs.replicas import BETWEEN, UNCHANGED, Findings, RankReport, exchange

_log = logging.getLogger("jaxcross")


class ReplicaChecks:
    """One job's, on one rank; used by the job's thread, and by the runner after it.

    Whether and when ranks communicate follows from counts of steps and batches, which are the same
    on every rank.

    Args:
        job: The job's name.
        rank: This rank.
        ranks: How many there are; a single one compares nothing.
        latest: The job's state and the results of its steps.

    Attributes:
        findings: Of all comparisons.
        batches: How many its loops have taken.
        end: This rank's report on the last state, for `settle`; None if there is nothing to report.
    """

    def __init__(self, job: str, *, rank: int, ranks: int, latest: LatestState) -> None:
        self._job, self._rank, self._ranks, self._latest = job, rank, ranks, latest
        self._every: int | None = None
        self.findings = Findings(job)
        self.batches = 0
        self.end: RankReport | None = None
        self._restored = self._exchanged = self._serves = False
        self._between = False  # the latest step was a local one: others exchange
        self._start: Any = None  # the state that it restored, until the first exchange
        self._first_step = self._compared = 0
        self._paths: list[str] = []
        self._common: list[str] = []
        self._looked = False  # whether its first batch has led to an exchange
        self._warned = False  # that replicas differ, or that there is nothing to compare

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
        """Notes which leaves of a restored state are common to all ranks. Waits for all ranks if it
        is `local`.

        A state that is not `local` is meant to be the same on every rank. Local states may be parts
        of one model: only leaves that are equal on all ranks are common, and leaves of zeros or
        ones are not evidence, since parts begin with them as well.

        Args:
            state: The state.
            step: Steps that led to it.
            local: Whether each rank has restored its own.
            named: Paths of the leaves that the job names as rank-local: these are not compared.
            check_every: Compare after so many steps, and fail if replicas differ; if None, compare
                at checkpoints and at the end only, and warn.
            resumed: Whether it comes from a checkpoint.
            together: Runs what communicates.
        """
        if self._ranks == 1:
            return
        self._restored, self._start, self._first_step, self._compared = True, state, step, step
        self._every = check_every
        self._paths = _paths(state)
        self._common = [path for path in common_leaves(state) if path not in named]
        if local:
            common = set(self._common)
            mine = RankReport(
                step,
                "",
                digests(state, {p for p, leaf in _leaves(state) if p in common and _varied(leaf)}),
            )
            (every,) = together("replicas", lambda control: exchange(control, [mine]))
            first = every[0].digests
            self._common = [
                path for path in first if all(r.digests.get(path) == first[path] for r in every)
            ]
        self.findings.held = None if resumed and not local else step

    def serve(self) -> None:
        """Notes that the job trains by a `ParameterServer`."""
        self._exchanged = self._serves = True
        self._start = None

    def stepped(self, step: int, *, local: bool, together: RunOnAllRanks) -> None:
        """Compares replicas after a committed step if that is due, and then waits for all ranks.

        Args:
            step: How many steps are committed.
            local: Whether nothing was exchanged in this one because another one exchanges.
            together: Runs what communicates.

        Raises:
            ExchangeError: On every rank: replicas differ.
        """
        self._exchanged, self._between, self._start = True, local, None
        if self._due(step) and not local:
            self._compare(step, together)

    def next_batch(self, together: RunOnAllRanks) -> None:
        """Warns once of a job that has not exchanged anything, before its next batch. Compares its
        replicas if that is due, and then waits for all ranks. Batches count as its steps.

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
        """Compares replicas by the digests that the ranks have gathered for a checkpoint.

        Raises:
            ExchangeError: On every rank: replicas differ, and they are to be checked.
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
        """Reads a finished job's last state for `end`; warns if the job has trained and never
        exchanged anything.

        Waits for the state to be computed. Does not communicate.
        """
        if self._ranks == 1:
            return
        if self._restored:
            self.end = self._report(step if self._exchanged else self.batches)
        alone = not self._exchanged and how in ("ended", "stopped") and self._trains()
        if alone:
            self._warn_of_no_exchange("came to its end", "has trained")
        self._start = None

    def settle(self, every: list[RankReport]) -> ExchangeError | None:
        """Adds the comparison of the last state. Returns an error, the same on every rank, if the
        job is to fail.
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
        """This rank's report on the newest state that is like the one restored. Waits until that is
        computed.
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
        except Exception as error:  # of memory perhaps; the others wait for this report
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
        """Why a difference would be no fault; the same on every rank."""
        return BETWEEN if self._between else ""

    def _unknown(self) -> str:
        """Why there is nothing to compare whatever the state is; the same on every rank."""
        if self._serves:
            return "it trains by a `ParameterServer`"
        return "" if self._common else "each of its leaves is a rank's own"

    def _trains(self) -> bool | None:
        """Whether the job changes a state; None where nothing shows it.

        A job that has restored a state and hands over none changes it for certain only if it
        donates it.
        """
        state, start = self._latest.latest()[0], self._start
        if not self._restored:
            return any(_floats(leaf) for leaf in jax.tree.leaves(state))
        if has_deleted(start) or has_deleted(state):
            return True
        try:
            return None if state is start else not _same(start, state)
        except Exception:  # a state that cannot be read; `end` says so
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


def _leaves(state: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def _paths(state: Any) -> list[str]:
    return [path for path, _ in _leaves(state)]


def _varied(leaf: Any) -> bool:
    """Whether it is a numeric array with elements that are not all the same."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return False
    array = on_host(leaf).reshape(-1)
    return array.size > 1 and array.dtype.kind not in "OSU" and bool((array != array[0]).any())


def _floats(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _same(start: Any, state: Any) -> bool:
    """Whether all leaves have the same values, to the bit."""
    old, new = jax.tree.leaves(start), jax.tree.leaves(state)
    return len(old) == len(new) and all(
        x is y or _equal(on_host(x), on_host(y)) for x, y in zip(old, new, strict=True)
    )


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x.tobytes() == y.tobytes() or np.array_equal(x, y)
