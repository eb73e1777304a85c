"""The `run` function: runs plain loops of the form `state, metrics = step(state, batch)`.

The user creates a `Job` object for each loop before the run, and reads results from it during and
after the run. A `JobContext`, on the other hand, belongs to one particular runner and doesn't exist
until the run has begun. A `Job` therefore doesn't store any results itself, but delegates to
another object: a `JobStandIn` before the run or if the job is fused with others, and the run's
`JobContext` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack, final

from jaxcross._arguments import check_choice, check_type
from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree
from jaxcross.errors import JobError, shortened
from jaxcross.jobs.arguments import (
    RunOptions,
    check_loop,
    check_options,
    checked_early_stopping,
    checked_evaluation,
    checked_examples,
    checked_interval,
    checked_names,
)
from jaxcross.jobs.context import JobContext, shown
from jaxcross.jobs.early_stopping import Mode
from jaxcross.jobs.engine import JobDone
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.jobs.fused import FusedJob, Fusion
from jaxcross.jobs.runner import Runner, raise_first
from jaxcross.program import NonFinite
from jaxcross.report import Report
from jaxcross.runtime import RestoreMode


def run(jobs: Sequence[Job | FusedJob], **options: Unpack[RunOptions]) -> Report:
    """Runs plain training loops that share this rank's device. Waits for all ranks.

    Args:
        jobs: The jobs, the same on every rank.
        options: `world`, `policy`, `checkpoints`, `metrics`, `instruments`, `memory`, `events` and
            `progress`, as for `Runner`.

    Returns:
        The report, which is the same on every rank.

    Raises:
        TypeError: `jobs` isn't a list of `Job` objects, or another argument has the wrong type.
        ValueError: Two jobs take their batches from the same iterator, or `checkpoints` were
            requested for fused jobs, which can't be saved.
        Exception: Any other error raised by `Runner` or `Runner.run`.

    Example:
        >>> report = jaxcross.run([jaxcross.Job("a", step, state, batches, steps=100)])
    """
    check_options("run", options, RunOptions)
    found = list(jobs) if isinstance(jobs, Iterable) else []
    if not isinstance(jobs, Iterable) or not all(isinstance(job, Job | FusedJob) for job in found):
        raise TypeError(
            f"`jobs` must be a list of `jaxcross.Job`s, got {shortened(repr(jobs), 100)}."
        )
    fused = [job for job in found if isinstance(job, FusedJob)]
    check_batches_apart(
        each for job in found for each in (job.members if isinstance(job, FusedJob) else (job,))
    )
    if fused and options.get("checkpoints") is not None:
        raise ValueError(
            f"`checkpoints` cannot keep the fused job `{fused[0].name}`, because its jobs could "
            "not be restored one by one. Run the jobs without `jaxcross.fuse`, or without "
            "`checkpoints`."
        )
    with Runner(**options) as runner:
        contexts = {job: runner.add(job.name, job._run) for job in found}
        for job, context in contexts.items():
            job._attach(context)
        try:
            report = runner.run()
        finally:
            for job in fused:
                job._finish(contexts[job])
        raise_first([error for job in fused for error in job.errors])
        return replace(report, fusion=jobs.reasons) if isinstance(jobs, Fusion) else report


class Job:
    """One job of `jaxcross.run`: the plain loop `state, metrics = step(state, batch)`.

    You can use a `Job` like the `JobContext` of a hand-written training loop, since its attributes
    and methods have the same names and meanings. It lacks the methods that only a job's own
    function can call, i.e. `log`, `batches`, `restore`, `save`, `run_on_all_ranks` and `measure`.
    Wherever the documentation of `JobContext` mentions the job's function, this means the plain
    loop.

    Attributes:
        name: The job's name, unique among the jobs.
        state: The latest state, or the initial state until the run has restored one. For
            data-parallel steps, it's identical on all ranks.
        step: How many steps the job has made. As in `JobContext.step`, calls of a step without
            exchanges don't count.
        history: A list of `(step, metrics)` pairs, one for each step whose metrics have been read
            back. Complete after the run.
        examples_per_step: How many examples all ranks together use per step.
        unit: What reports call an example.
        nonfinite: What to do when a step's exchanged values aren't all finite.
        rank_local: Names of the leaves that differ between ranks by design.
        status: How the job ended, or None if it hasn't yet.
        error: Why the job failed or was ejected, if it was.
        done: An event that's set once the job has ended and `state` and `history` are final; wait
            for it with `job.done.wait()`.
        skipped: How many of the job's steps were skipped, i.e. left the state unchanged.
        paused: Whether the job is paused on all ranks.

    Args:
        name: The job's name, unique among the jobs.
        step: A `crossover` step that returns `(state, metrics)`.
        state: The initial state, identical on all ranks unless `mode` says otherwise.
        batches: This rank's batches.
        steps: How many steps to make at most; None for no limit. Either way, the loop ends when the
            first rank runs out of data.
        nonfinite: What to do when a step's exchanged values aren't all finite: `ignore`, `raise`,
            `skip` or `eject`; see `JobContext.nonfinite`.
        mode: With `check`, the ranks compare their initial states; with `broadcast`, they all use
            rank 0's; with `local`, each rank keeps its own, e.g. for dropout keys. See
            `JobContext.restore`. The same on every rank.
        rank_local: Names of the leaves that differ between ranks by design, such as a data mask;
            see `JobContext.restore`. The same on every rank.
        check_replicas: Compare the ranks' copies of the state at this interval, in steps, and fail
            on every rank if they differ; see `JobContext.restore`. The same on every rank.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `name` is empty, `steps` is negative, `nonfinite` or `mode` isn't one of the
            values above, or `check_replicas` isn't a whole number of at least 1.
    """

    __slots__ = (  # so that a misspelt attribute is an error
        "__weakref__",
        "_batches",
        "_check_replicas",
        "_face",
        "_function",
        "_mode",
        "_results",
        "_settings",
        "_shown",
        "_steps",
        "name",
        "rank_local",
    )

    def __init__(
        self,
        name: str,
        step: Callable[[Any, Any], Any],
        state: Any,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        nonfinite: NonFinite = "ignore",
        mode: RestoreMode = "check",
        rank_local: Sequence[str] = (),
        check_replicas: int | None = None,
    ) -> None:
        check_loop(name, step, batches, steps)
        check_choice(nonfinite, NonFinite, f"`nonfinite` of job `{name}`")
        check_choice(mode, RestoreMode, f"`mode` of job `{name}`")
        self.name = name
        self.rank_local = checked_names(f"`rank_local` of job `{name}`", rank_local)
        self._function = step
        self._batches = batches
        self._steps = steps
        self._mode: RestoreMode = mode
        self._check_replicas = checked_interval(f"`check_replicas` of job `{name}`", check_replicas)
        self._settings: list[Callable[[Evaluations], None]] = []
        self._shown: dict[str, Any] = {}  # `examples_per_step` and `unit`, if the user has set them
        # The object that we ask for the job's status, error and settings, and that receives
        # requests such as `stop`. Just before the run, the initial `JobStandIn` is swapped for the
        # job's `JobContext`.
        self._face: JobStandIn | JobContext = JobStandIn(name, state, nonfinite=nonfinite)
        # The object that we ask for the job's state, steps and history. This is swapped a bit later
        # than `_face`: at the start of a run, the context has no state until the job has restored
        # one, and we want users to see the initial state until then.
        self._results: JobStandIn | JobContext = self._face

    def __repr__(self) -> str:
        return shown(self)

    @property
    def state(self) -> PyTree:
        return self._results.state

    @state.setter
    def state(self, state: PyTree) -> None:
        self._results.state = state

    @property
    def step(self) -> int:
        return self._results.step

    @property
    def history(self) -> list[tuple[int, Any]]:
        return self._results.history

    @property
    def examples_per_step(self) -> float | None:
        return self._face.examples_per_step

    @examples_per_step.setter
    def examples_per_step(self, examples: float | None) -> None:
        examples = checked_examples(self.name, examples)
        self._shown["examples_per_step"] = examples
        self._face.examples_per_step = examples

    @property
    def unit(self) -> str:
        return self._face.unit

    @unit.setter
    def unit(self, unit: str) -> None:
        check_type(unit, str, f"`unit` of job `{self.name}`")
        self._shown["unit"] = unit
        self._face.unit = unit

    @property
    def nonfinite(self) -> NonFinite:
        """What to do when a step's exchanged values aren't all finite.

        See `JobContext.nonfinite`. Set this before the first step, to the same value on every rank.
        """
        return self._face.nonfinite

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_choice(policy, NonFinite, f"`nonfinite` of job `{self.name}`")
        self._face.nonfinite = policy

    @property
    def status(self) -> JobStatus | None:
        return self._face.status

    @property
    def error(self) -> Exception | None:
        return self._face.error

    @property
    def done(self) -> JobDone:
        return self._face.done

    @property
    def skipped(self) -> int:
        return self._face.skipped

    @property
    def paused(self) -> bool:
        """Whether the job is paused on all ranks."""
        return self._face.paused

    def every(
        self, n: int, fn: Callable[[Any], Any], *, rank: int | None = None, name: str = "eval"
    ) -> None:
        """Evaluates the job every `n` steps of the run. Call this before the run.

        See `JobContext.every` for the arguments.

        Raises:
            TypeError, ValueError: An argument has the wrong type or is out of range.
            JobError: The run has begun.
        """
        evaluation = checked_evaluation(self.name, n, fn, rank, name)
        if self._in_run:
            raise JobError(
                f"Job `{self.name}`: `job.every` was called after the run had begun. Call it "
                "before the run."
            )
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
        """Ends the job once a metric of `every` stops improving. Call this before the run.

        See `JobContext.stop_early` for the arguments.

        Raises:
            TypeError, ValueError: An argument has the wrong type or is out of range.
            JobError: The run has begun.
        """
        early = checked_early_stopping(
            self.name,
            metric,
            mode=mode,
            patience=patience,
            patience_steps=patience_steps,
            min_delta=min_delta,
        )
        if self._in_run:
            raise JobError(
                f"Job `{self.name}`: `job.stop_early` was called after the run had begun. Call it "
                "before the run."
            )
        self._settings.append(lambda evaluations: evaluations.stop_early(early))

    def stop(self) -> None:
        """Ends this job on all ranks, between the same two steps. Doesn't wait.

        See `JobContext.stop`.

        Raises:
            JobError: The run hasn't begun, or the job is fused with others.
        """
        self._face.stop()

    def pause(self) -> None:
        """Pauses this job on all ranks, between the same two steps. Doesn't wait.

        See `JobContext.pause`.

        Raises:
            JobError: The run hasn't begun, or the job is fused with others.
        """
        self._face.pause()

    def resume(self) -> None:
        """Resumes a paused job on all ranks. Doesn't wait.

        Raises:
            JobError: The run hasn't begun, or the job is fused with others.
        """
        self._face.resume()

    @property
    def _in_run(self) -> bool:
        face = self._face
        if isinstance(face, JobStandIn):
            begun = bool(face.fused_into)
        else:
            begun = face._engine.record is not None
        return begun and not face.done.is_set()

    def _attach(self, job: JobContext) -> None:
        """Delegates to `job`, which runs `_run`, from now on. Called just before the run."""
        if self._in_run:
            raise JobError(
                f"Job `{self.name}` is in a run already. Wait until it has ended "
                "(`job.done.wait()`), or make another `jaxcross.Job` for the second run."
            )
        before = self._face
        self._face = job
        job.nonfinite = before.nonfinite
        if not before.done.is_set():  # another thread may already be waiting for it
            job._engine.done = before.done
        for name, value in self._shown.items():
            setattr(job, name, value)

    def _fuse(self, into: str) -> JobStandIn:
        """Delegates to a new `JobStandIn` from now on, whose results come from a fused job.

        Called just before the run.

        Args:
            into: The name of the fused job.
        """
        stand_in = JobStandIn(
            self.name, self.state, nonfinite=self._face.nonfinite, fused_into=into
        )
        if not self.done.is_set():
            stand_in.done = self.done
        self._face = self._results = stand_in
        return stand_in

    def _run(self, job: JobContext) -> Any:
        """Trains the job to the end. This is the function that the runner calls."""
        job.restore(
            self.state,
            mode=self._mode,
            rank_local=self.rank_local,
            check_replicas=self._check_replicas,
        )
        self._results = job  # drops the initial state
        every = job._engine.save_every
        batches = job.step
        for apply in self._settings:
            apply(job._engine.evaluations)
        for batch in job.batches(self._batches, self._steps):
            result = self._function(job.state, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                got = f"`{type(result).__name__}`"
                if isinstance(result, tuple):
                    got = f"tuple of {len(result)}"
                raise TypeError(
                    f"`step` of job `{self.name}` must return a pair `(state, metrics)`, got a "
                    f"{got}. Metrics may be an empty dict."
                )
            job.state, metrics = result
            batches += 1
            job.log(metrics)
            if every is not None and batches % every == 0:
                job.save(job.state)
        return job.state


@final
class JobStandIn:
    """Takes the place of a `Job`'s `JobContext` before the run and if a fused job trains it.

    Attributes:
        fused_into: The name of the fused job that trains this job; "" before the run.

    The other attributes are the same as in `JobContext`.
    """

    paused = False
    skipped = 0

    def __init__(
        self, name: str, state: PyTree, *, nonfinite: NonFinite, fused_into: str = ""
    ) -> None:
        self.name = name
        self.state = state
        self.nonfinite: NonFinite = nonfinite
        self.fused_into = fused_into
        self.step = 0
        self.history: list[tuple[int, Any]] = []
        self.status: JobStatus | None = None
        self.error: Exception | None = None
        self.done = JobDone()
        self.examples_per_step: float | None = None
        self.unit = "examples"

    def stop(self) -> None:
        self._refuse()

    def pause(self) -> None:
        self._refuse()

    def resume(self) -> None:
        self._refuse()

    def _refuse(self) -> None:
        """Raises the error for a request, or ignores the request if the job has ended."""
        if self.status is not None:
            return
        if self.fused_into:
            raise JobError(
                f"Job `{self.name}` cannot be stopped or paused alone, because it is trained by "
                f"the fused job `{self.fused_into}`. Run it without `jaxcross.fuse`."
            )
        raise JobError(
            f"Job `{self.name}` is not running. Stop or pause it during `jaxcross.run`, not before."
        )


def check_batches_apart(jobs: Iterable[Job]) -> None:
    """Checks that no two jobs take their batches from the same iterator.

    Raises:
        ValueError: Two jobs have the same iterator.
    """
    seen: dict[int, str] = {}
    for job in jobs:
        if not isinstance(job._batches, Iterator):
            continue
        other = seen.setdefault(id(job._batches), job.name)
        if other != job.name:
            raise ValueError(
                f"`batches` of jobs `{other}` and `{job.name}` are the same iterator, so each "
                "batch would only go to whichever job asks first. Give each job its own iterator."
            )
