"""`Job`: a job of `jaxcross.run`, which is the plain loop `state, metrics = step(state, batch)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxcross._arguments import check_choice
from jaxcross.jobs.arguments import (
    check_loop,
    checked_early_stopping,
    checked_evaluation,
    checked_names,
)
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.early_stopping import Mode
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.runtime.job_record import Initial, NonFinite


class Job:
    """One job of `jaxcross.run`: the plain loop `state, metrics = step(state, batch)`.

    Attributes:
        name: Unique among the jobs.
        state: The latest state; final after the run. Same on all ranks for data-parallel steps.
        step: Steps done.
        history: `(step, metrics)` of each step that was read back, as in `JobContext`; complete
            after the run.

    Args:
        name: Unique among the jobs.
        step: A `crossover` step that returns `(state, metrics)`.
        state: The initial state, equal on all ranks unless `initial` says otherwise.
        batches: This rank's batches.
        steps: Ends after so many steps, or with the shortest rank's data.
        nonfinite: What becomes of a step whose exchanged values are not all finite: `ignore`,
            `raise`, `skip` or `eject`; see `JobContext.nonfinite`.
        initial: `check` compares the ranks' initial states, `broadcast` takes rank 0's, `local`
            allows each its own values, as dropout keys; see `JobContext.restore`. The same on every
            rank.
        rank_local: Names of leaves of which each rank has its own, such as a data mask; see
            `JobContext.restore`. The same on every rank.

    Raises:
        TypeError: An argument is of another type.
        ValueError: `name` is empty, `steps` is below 0, or `nonfinite` or `initial` is another
            word.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Any, Any], Any],
        state: Any,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        nonfinite: NonFinite = "ignore",
        initial: Initial = "check",
        rank_local: Sequence[str] = (),
    ) -> None:
        check_loop(name, step, batches, steps)
        check_choice(nonfinite, NonFinite, f"`nonfinite` of job `{name}`")
        check_choice(initial, Initial, f"`initial` of job `{name}`")
        self.name, self.state, self.step = name, state, 0
        self.history: list[tuple[int, Any]] = []
        self._function, self._batches, self._steps = step, batches, steps
        self._nonfinite: NonFinite = nonfinite
        self._initial: Initial = initial
        self._rank_local = checked_names(f"`rank_local` of job `{name}`", rank_local)
        self._settings: list[Callable[[Evaluations], None]] = []

    def every(
        self, n: int, fn: Callable[[Any], Any], *, rank: int | None = None, name: str = "eval"
    ) -> None:
        """Evaluates the job every `n` steps of the run: see `JobContext.every`. Call it before the
        run.

        Raises:
            TypeError, ValueError: An argument is of another type, or out of range.
        """
        evaluation = checked_evaluation(self.name, n, fn, rank, name)
        self._settings.append(lambda evaluations: evaluations.add(evaluation))

    def stop_early(
        self,
        metric: str,
        *,
        mode: Mode,
        patience: int | None = None,
        patience_steps: int | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Ends the job once a metric of `every` no longer gets better: see `JobContext.stop_early`.
        For before the run.

        Raises:
            TypeError, ValueError: An argument is of another type, or out of range.
        """
        early = checked_early_stopping(
            self.name,
            metric,
            mode=mode,
            patience=patience,
            patience_steps=patience_steps,
            min_delta=min_delta,
        )
        self._settings.append(lambda evaluations: evaluations.stop_early(early))

    def _run(self, job: JobContext) -> Any:
        job.nonfinite, self.history = self._nonfinite, job.history
        self.state = job.restore(self.state, mode=self._initial, rank_local=self._rank_local)
        every = job.save_every
        self.step = job.step
        for apply in self._settings:
            apply(job.host.evaluations)
        for batch in job.batches(self._batches, self._steps):
            result = self._function(self.state, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(
                    f"`step` of job `{self.name}` must return a pair `(state, metrics)`, got a "
                    f"{f'tuple of {len(result)}' if isinstance(result, tuple) else f'`{type(result).__name__}`'}."
                    " Metrics may be an empty dict."
                )
            self.state, metrics = result
            job.state, self.step = self.state, self.step + 1
            job.log(metrics)
            if every is not None and self.step % every == 0:
                job.save(self.state)
        return self.state


def check_batches_apart(jobs: Iterable[Job]) -> None:
    """Makes sure that no two jobs take batches from one iterator.

    Raises:
        ValueError: Two do.
    """
    seen: dict[int, str] = {}
    for job in jobs:
        if (
            isinstance(job._batches, Iterator)
            and (other := seen.setdefault(id(job._batches), job.name)) != job.name
        ):
            raise ValueError(
                f"`batches` of jobs `{other}` and `{job.name}` are one iterator, so that each "
                "batch would go to one of them, to whichever asks first. Give each job its own."
            )
