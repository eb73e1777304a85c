"""Runs a job's evaluations every n steps, and decides whether to stop the job early.

If some ranks stopped training and others didn't, the latter would hang in the next step. Decisions
therefore have to be the same everywhere, even though an evaluation's metrics may differ between
ranks, and some evaluations only run on a single rank. To make sure of that, the ranks compare their
lists of evaluations before the first step, and any decision is based on one rank's value: that of
the rank that ran the evaluation, or rank 0's if all of them did.

A restarted run has to make the same decisions as an uninterrupted one. For this purpose, each
checkpoint contains notes about

- when each evaluation last ran, so that it isn't repeated, and
- the best metric values so far, which early stopping compares new values to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, final

import jax
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.errors import JobError, quoted
from jaxcross.interleave import SpanKind
from jaxcross.jobs.early_stopping import Best, EarlyStopping, Mode
from jaxcross.jobs.job_state import JobState, has_deleted
from jaxcross.report import flatten_metrics
from jaxcross.world import Control, gather

T = TypeVar("T")

_DONE = "evaluated "  # prefix of the notes that store an evaluation's step
_BEST, _STOP = "best ", "early stopping "


class EvaluatedJob(Protocol):
    """What evaluations need from a job.

    Implemented by `JobEngine` and by the members of a `FusedJob`.
    """

    name: str
    step: int
    latest: JobState

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T: ...
    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A function of the job's state that's called every `n_steps` steps.

    Attributes:
        name: The name under which its metrics are logged.
        n_steps: The interval between calls, in steps.
        fn: The function.
        rank: The only rank that calls the function; None if all ranks do.
    """

    name: str
    n_steps: int
    fn: Callable[[Any], Any]
    rank: int | None

    def provides(self, metric: str) -> bool:
        """Whether this evaluation could return a metric of this name."""
        return metric == self.name or metric.startswith(f"{self.name}/")


@final
class Evaluations:
    """One job's evaluations on one rank.

    Only for use in the job's thread. All decisions are the same on every rank.

    Attributes:
        running: Whether an evaluation is in progress. Steps called during an evaluation don't count
            as steps of the job.
        stop_reason: Why the job should stop early; "" if it shouldn't.
    """

    def __init__(self, job: str, *, rank: int, ranks: int) -> None:
        self._job = job
        self._rank = rank
        self._ranks = ranks
        self._every: dict[str, Evaluation] = {}
        self._early: EarlyStopping | None = None
        self._best: Best | None = None
        self._done: dict[str, int] = {}  # the step of the latest evaluation, by name
        self._begun = False
        # The notes of the checkpoint that the job was resumed from, until it begins.
        self._notes: Mapping[str, str] = {}
        self.running = False
        self.stop_reason = ""

    # Before the first step.

    def add(self, evaluation: Evaluation) -> None:
        """Adds an evaluation.

        Raises:
            ValueError: The name is taken, or there's no such rank.
            JobError: The job's loop has already begun.
        """
        self._check_open("job.every")
        if evaluation.name in self._every:
            raise ValueError(
                f"Job `{self._job}` has an evaluation `{evaluation.name}` already. Pass a "
                "different `name` to `job.every`."
            )
        if evaluation.rank is not None and not 0 <= evaluation.rank < self._ranks:
            raise ValueError(
                f"`rank` of `job.every` in job `{self._job}` must be from 0 to {self._ranks - 1}, "
                f"got {evaluation.rank}."
            )
        self._every[evaluation.name] = evaluation

    def stop_early(self, early: EarlyStopping) -> None:
        """Sets up early stopping.

        Raises:
            ValueError: It was already set up.
            JobError: The job's loop has already begun.
        """
        self._check_open("job.stop_early")
        if self._early is not None:
            raise ValueError(
                f"Job `{self._job}` stops early by `{self._early.best.metric}` already. Call "
                "`job.stop_early` only once."
            )
        self._early = early

    def keep_best(self, metric: str, mode: Mode) -> None:
        """Sets the metric that decides which checkpoint is kept as the best."""
        self._best = Best(metric=metric, mode=mode)

    def resume(self, notes: Mapping[str, str], *, has_best: bool) -> None:
        """Resumes from a checkpoint's notes.

        Pass `has_best=False` if the checkpoint with the best state is no longer on disk. We then
        forget the best value as well; otherwise, the next state to be kept as the best would have
        to beat a state that no longer exists.

        Raises:
            ValueError: The notes weren't written by `to_notes`.
        """
        self._notes = notes
        if has_best and self._best is not None:
            text = notes.get(_BEST + self._best.key)
            if text is not None:
                self._best = self._best.resumed(text)

    def _check_open(self, what: str) -> None:
        if self._begun:
            raise JobError(
                f"Job `{self._job}`: `{what}` was called after the loop over `job.batches` had "
                "begun. Call it before the loop."
            )

    def begin(self, job: EvaluatedJob) -> None:
        """Checks that all ranks have the same evaluations. The first call waits for all ranks.

        Raises:
            JobError: On every rank: the evaluations differ, or none of them could return one of the
                required metrics.
        """
        if self._begun:
            return
        self._begun = True
        if not self._every and not self._decisions:
            return
        mine = [
            *(
                f"job.every({e.n_steps}, rank={e.rank}, name={e.name!r})"
                for e in self._every.values()
            ),
            *(repr(decision) for decision in self._decisions.values()),
        ]
        texts = job.run_on_all_ranks("evaluations", lambda control: gather(control, mine))
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise JobError(
                    f"Job `{self._job}`: the evaluations differ between ranks. Rank 0 has called "
                    f"{texts[0]}, rank {rank} {text}. Call `job.every` and `job.stop_early` with "
                    "the same arguments on every rank."
                )
        for metric, user in self._metrics():
            if not self.provide(metric):
                raise JobError(
                    f"Job `{self._job}`: {user} needs the metric `{metric}`, but the job has no "
                    "evaluation that could return it. Call `job.every(n, fn, "
                    f"name={metric.partition('/')[0]!r})` before the loop."
                )
        self._restore_from_notes()

    def _restore_from_notes(self) -> None:
        for name in self._every:
            step = self._notes.get(_DONE + name, "")
            if step.isdecimal():
                self._done[name] = int(step)
        if self._early is None:
            return
        text = self._notes.get(_STOP + self._early.best.key)
        if text is not None:
            self._early = replace(self._early, best=self._early.best.resumed(text))
            self.stop_reason = self._early.reason(self._done_step(self._early.best.metric))

    def _done_step(self, metric: str) -> int:
        return max(
            (step for name, step in self._done.items() if self._every[name].provides(metric)),
            default=0,
        )

    @property
    def _decisions(self) -> dict[str, Best | EarlyStopping]:
        found = {"`Checkpoints(best=...)`": self._best, "`job.stop_early`": self._early}
        return {user: decision for user, decision in found.items() if decision is not None}

    def _metrics(self) -> Iterator[tuple[str, str]]:
        """Yields each metric that a decision depends on, along with the setting behind it."""
        for user, decision in self._decisions.items():
            yield (decision.best if isinstance(decision, EarlyStopping) else decision).metric, user

    # While the job runs.

    def provide(self, metric: str) -> bool:
        """Whether one of the job's evaluations could return a metric of this name."""
        return any(each.provides(metric) for each in self._every.values())

    @property
    def any(self) -> bool:
        """Whether the job has any evaluations."""
        return bool(self._every)

    def _due(self, step: int) -> list[Evaluation]:
        return [
            e
            for e in self._every.values()
            if step and step % e.n_steps == 0 and self._done.get(e.name) != step
        ]

    def check_step(self, job: EvaluatedJob) -> None:
        """Checks that the job can make its next step. Waits for all ranks before the first step.

        Raises:
            JobError: The job should have stopped early, or has missed an evaluation.
        """
        self.begin(job)
        if self.stop_reason:
            raise JobError(
                f"Job `{self._job}` continues after step {job.step}, where it stopped early: "
                f"{self.stop_reason}. Early stopping ends only the loops over `job.batches` that "
                "are open at the time, so take all batches from a single loop."
            )
        due = self._due(job.step)
        if due:
            raise JobError(
                f"Job `{self._job}` has called its next step before the evaluation "
                f"`{due[0].name}` of step {job.step} could run. Evaluations run when the job asks "
                "for a batch or saves, so take the batches from `job.batches`, or call `job.save`."
            )

    def run(self, job: EvaluatedJob, log: Callable[[str, PyTree], None]) -> bool:
        """Runs the evaluations that are due after the latest step.

        Waits for all ranks if an evaluation runs on a single rank, which has to send its metrics to
        the others, or if a metric decides when to stop or which state is best, because all ranks
        have to use the same value.

        Args:
            job: The job.
            log: Called with each evaluation's name and metrics.

        Returns:
            Whether this is the best state so far and should be saved.

        Raises:
            JobError: On every rank: the function didn't return a required metric or donated the
                state, or the job hasn't set its state since the latest step.
            TypeError: The function returned something other than metrics.
        """
        if self.running:
            return False
        self.begin(job)
        improved = False
        step = job.step
        for each in self._due(step):
            self.running = True
            try:
                values = self._make(each, job)
            finally:
                self.running = False
            # Only record the evaluation as done once it has been logged. In a sweep with a pruner,
            # `log` waits for the other trials and may raise an exception to end the job. The
            # evaluation then isn't recorded, and a restart runs it again.
            if values is not None:
                log(each.name, values)
            self._done[each.name] = step
            improved |= self._decide(each, step, values)
        return improved

    def _make(self, each: Evaluation, job: EvaluatedJob) -> PyTree:
        state = job.latest.state
        known_step = job.latest.step
        if known_step != job.step or has_deleted(state):
            raise JobError(
                f"Job `{self._job}`: evaluation `{each.name}` of step {job.step} needs the state, "
                f"which the job's function last set at step {known_step}. Assign `job.state = "
                "state` after each step."
            )
        alone = each.rank is not None
        decides = any(each.provides(metric) for metric, _ in self._metrics())
        values = None
        if alone and each.rank == self._rank:
            with job.measure("host", each.name):  # tells the watchdog that this may take long
                values = self._on_host(each, each.fn(state))
        elif not alone:
            values = each.fn(state)
            self._check(each, values)
            values = self._on_host(each, values) if decides else values
        if has_deleted(state):
            raise JobError(
                f"Job `{self._job}`: evaluation `{each.name}` of step {job.step} has donated the "
                "state, which the next step needs. Compile it without `donate_argnums`."
            )
        if alone or decides:
            every = job.run_on_all_ranks(
                f"evaluation {each.name}", lambda control: gather(control, values)
            )
            values = every[each.rank or 0]
        return values

    def _on_host(self, each: Evaluation, values: PyTree) -> PyTree:
        self._check(each, values)
        return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), values)

    def _check(self, each: Evaluation, values: PyTree) -> None:
        good = values is None or isinstance(
            values, Mapping | int | float | np.generic | np.ndarray | jax.Array
        )
        if not good or (
            isinstance(values, Mapping) and not all(isinstance(key, str) for key in values)
        ):
            raise TypeError(
                f"Job `{self._job}`: evaluation `{each.name}` must return a dict of metrics by "
                f"name, a number or None, got a `{type(values).__name__}`."
            )

    def _decide(self, each: Evaluation, step: int, values: PyTree) -> bool:
        found = dict(flatten_metrics({each.name: values}))
        improved = False
        if self._best is not None and each.provides(self._best.metric):
            self._best = self._best.update(step, self._number(each, found, self._best.metric))
            improved = self._best.value is not None and self._best.step == step
        if self._early is not None and each.provides(self._early.best.metric):
            value = self._number(each, found, self._early.best.metric)
            self._early = replace(self._early, best=self._early.best.update(step, value))
            self.stop_reason = self._early.reason(step)
        return improved

    def _number(self, each: Evaluation, found: Mapping[str, Any], metric: str) -> float:
        try:
            return float(found[metric])  # `found` has NaN and infinities as strings
        except (KeyError, TypeError, ValueError):
            user = next(user for name, user in self._metrics() if name == metric)
            raise JobError(
                f"Job `{self._job}`: evaluation `{each.name}` of step {self._done[each.name]} has "
                f"no number `{metric}`, which {user} needs. It returned "
                f"{quoted(found) or 'nothing'}. Return that metric from every evaluation."
            ) from None

    # For checkpoints.

    @property
    def best_step(self) -> int | None:
        """The step of the best state so far; None if there is none, or best states aren't kept."""
        return None if self._best is None or self._best.value is None else self._best.step

    def to_notes(self) -> dict[str, str]:
        """Returns what a restart needs to know, as notes for a checkpoint."""
        if not self._begun:
            return dict(self._notes)
        notes = {_DONE + name: str(step) for name, step in self._done.items()}
        if self._early is not None:
            notes[_STOP + self._early.best.key] = self._early.best.to_text()
        if self._best is not None:
            notes[_BEST + self._best.key] = self._best.to_text()
        return notes
