"""`JobContext`: the object that a job's function receives and that `Runner.add` returns.

This class only checks the arguments of its methods. The work is done by the job's `JobEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, final

from jaxcross._arguments import check_choice, check_type
from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree
from jaxcross.errors import JobError, first_line, shortened
from jaxcross.interleave import JobRequest, SpanKind
from jaxcross.jobs.arguments import (
    checked_early_stopping,
    checked_evaluation,
    checked_examples,
    checked_interval,
    checked_names,
)
from jaxcross.jobs.early_stopping import Mode
from jaxcross.program import NonFinite
from jaxcross.runtime import RestoreMode
from jaxcross.world import Control

if TYPE_CHECKING:
    from jaxcross.jobs.engine import JobDone, JobEngine

T = TypeVar("T")


@final
class JobContext:
    """One job on this rank, as its function and the caller of `Runner.add` use it.

    Attributes:
        name: The job's name, unique in its runner.
        state: The latest state that the job restored, saved or, at its end, returned. If the runner
            has no checkpoints, assigning a value here has the same effect as `save`. After a
            failure or an interrupt, this is the state after the last step that all ranks committed.
            If the function didn't save that state, it's the part of the step's results with the
            structure, shapes and types of the previous `state`, or all results if no part or more
            than one part matches. The state never contains results of a step that some rank didn't
            commit. A step without exchanges is committed by each rank on its own, so between two
            exchanges, ranks may end at different steps. If a computation fails on this rank after
            the step was committed, the arrays that the computation was overwriting may have been
            deleted.
        step: How many steps the job has made. The same on every rank whenever the job's function
            reads it. We count the calls of a single function: the first one with exchanges that the
            job calls. Local steps of this function, e.g. between two exchanges of local SGD, count
            too, whereas calls of an evaluation function don't. In a job that trains with a
            `ParameterServer`, each rank counts its own pushes, so the number differs between ranks.
        history: `(step, metrics)` of each `log` call that has been read back, in order. If the
            runner has both `metrics=` and checkpoints, the history of a restarted run still begins
            at step 1, because the earlier metrics are read from rank 0's files. In these, a nested
            metric has a flat name such as `eval/accuracy`.
        examples_per_step: How many examples all ranks together use per step, averaged over the
            job's steps: the leading dimension of the first array in a batch, times the number of
            ranks. Set it if that's wrong.
        unit: The word that reports use for an example: `images` if the first array of a batch has a
            height, a width and 1, 3 or 4 channels, otherwise `examples`. Set it together with
            `examples_per_step`.
        nonfinite: What to do with a step whose exchanged values aren't all finite.
        status: How the job ended: `ended`, `stopped early`, `stopped`, `failed`, `ejected`, or
            `left out` if some rank never added it. None while the job hasn't ended.
        error: The reason, if the job failed, was ejected or was left out.
        done: An event that's set once the job has ended and `state` and `history` are final:
            `job.done.wait()`.
        skipped: How many of the job's steps kept the state, including those of earlier runs; see
            `nonfinite`. Known once the job has ended.
        rank_local: The `rank_local` names that were passed to `restore`: the leaves of which each
            rank has its own version.
    """

    __slots__ = ("__weakref__", "_engine")  # so that a misspelt attribute is an error

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return shown(self)

    # For any caller that has the job.

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def state(self) -> PyTree:
        return self._engine.latest.state

    @state.setter
    def state(self, state: PyTree) -> None:
        self._engine.latest.set(state, self.step)

    @property
    def step(self) -> int:
        return self._engine.step

    @property
    def history(self) -> list[tuple[int, PyTree]]:
        return self._engine.history

    @property
    def examples_per_step(self) -> float | None:
        return self._engine.examples.per_step

    @examples_per_step.setter
    def examples_per_step(self, examples: float | None) -> None:
        self._engine.examples.per_step = checked_examples(self.name, examples)

    @property
    def unit(self) -> str:
        return self._engine.examples.unit

    @unit.setter
    def unit(self, unit: str) -> None:
        check_type(unit, str, f"`unit` of job `{self.name}`")
        self._engine.examples.unit = unit

    @property
    def status(self) -> JobStatus | None:
        return self._engine.status

    @property
    def error(self) -> Exception | None:
        return self._engine.error

    @property
    def done(self) -> JobDone:
        return self._engine.done

    @property
    def skipped(self) -> int:
        return self._engine.skipped

    @property
    def rank_local(self) -> tuple[str, ...]:
        return self._engine.rank_local

    @property
    def nonfinite(self) -> NonFinite:
        """What to do with a step whose exchanged values aren't all finite on some rank.

        `ignore`, the default, doesn't check. `raise` and `eject` both end the job on every rank
        with the state from before that step; with `raise`, `run()` raises an error at the end,
        whereas `eject` only reports it. `skip` keeps the state from before the step and continues.
        Set it before the first step, to the same value on every rank. The check costs one pass over
        the exchanged values on the host.
        """
        return self._engine.nonfinite

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_choice(policy, NonFinite, f"`nonfinite` of job `{self.name}`")
        if self._engine.registry.any and policy != self._engine.nonfinite:
            raise JobError(
                f"Job `{self.name}`: `nonfinite` was set after its first step. Set it before."
            )
        self._engine.nonfinite = policy

    # For the job's function.

    def log(self, metrics: PyTree) -> None:
        """Records a pytree of scalars under the current step.

        You can log in every step, because this doesn't wait until the values have been computed. It
        makes a copy of them on the device, since the next step may donate the original arrays, and
        reads the copy back once it has been computed. If you log a random key, its raw data are
        recorded (`jax.random.key_data`).

        There's one exception: in a sweep with a pruner, a call that logs the sweep's metric waits
        for the other trials and for all ranks, because the pruner compares this trial with the
        others. If the pruner decides to end this trial early, the call raises an exception that
        ends the job's function. In such a sweep, log the metric on every rank.
        """
        self._engine.metrics.add(self.step, metrics)

    def batches(self, data: Iterable[Any], steps: int | None = None) -> Iterator[Any]:
        """Returns an iterator over this rank's batches, prefetched onto the device.

        A separate thread reads the batches ahead of time and puts them on the device. It copies
        NumPy arrays first, unless they're read-only, so your iterator may reuse the same buffer for
        every batch.

        The loop ends at the same step on all ranks: after `steps` batches, or once the first rank
        has run out of data. If the data raise an error on one rank, the job fails on all ranks. All
        ranks must call `batches` in the same order, and `next` waits for all ranks. If the loop
        ends before `data` is exhausted and before `steps` is reached, the thread calls the
        iterator's `close()` method, if it has one.

        After a restart from a checkpoint, the first call resumes where the job's loop was, and
        `steps` includes the batches before that position. So pass the same `data` as before.
        Iterators with the methods `get_state` and `set_state`, such as those of Grain and
        `jaxcross.data`, jump to the position directly. Any other iterator is read from its
        beginning, and the batches that were already used are dropped.

        Raises:
            TypeError: `data` isn't an iterable or is a single batch, or `steps` isn't a whole
                number.
            ValueError: `steps` is below 0.
            JobError: A thread other than the job's own iterated over the batches. In that thread,
                the loop ends immediately; the error is raised in the job's own thread.
        """
        return self._engine.batch_loops.begin(data, steps)

    def every(
        self, n: int, fn: Callable[[Any], Any], *, rank: int | None = None, name: str = "eval"
    ) -> None:
        """Evaluates the job every `n` steps: calls `fn(state)` and logs the metrics it returns.

        Evaluations run in the job's own thread, at the moment when its function requests the next
        batch from `job.batches`, saves, or returns. They don't count as steps. Since `fn` receives
        `job.state`, the job's function must assign the new state to `job.state` after each step.
        After a restart, evaluations still happen at the same steps, and each of them appears only
        once in the metrics files. Call `every` before the loop, with the same arguments on every
        rank.

        Args:
            n: The interval between two evaluations, in steps.
            fn: Returns a dict of numbers, a number, or None to log nothing. If all ranks call it,
                it may use steps with exchanges and `job.batches`; the other jobs continue
                meanwhile.
            rank: The only rank that calls `fn`. If you pass it, `fn` may take longer than
                `stall_timeout_s`, but must not communicate. The job waits on the other ranks until
                they receive the metrics. If None, all ranks call `fn`.
            name: The name of this evaluation. Its metrics are logged as, e.g., `eval/accuracy`.

        Raises:
            TypeError: `n` isn't a whole number, or `fn` can't be called.
            ValueError: `n` is below 1, `name` is taken, or there's no such rank.
            JobError: The loop has already begun. Also raised later, in the loop and on every rank:
                `fn` failed on some rank, `job.state` wasn't assigned, or the ranks' evaluations
                differ.
        """
        self._engine.evaluations.add(checked_evaluation(self.name, n, fn, rank, name))

    def stop_early(
        self,
        metric: str,
        *,
        mode: Mode,
        patience: int | None = None,
        patience_steps: int | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Ends the loop over `job.batches` once an evaluation's metric stops improving.

        The metric may differ between ranks, so after each evaluation we use one rank's value to
        decide for all of them. Therefore all ranks end the loop after the same step, and a
        restarted run ends it after that step too. The code after your loop still runs, and the
        job's status is `stopped early`. A metric that is NaN never counts as an improvement.

        Args:
            metric: The name of the metric, such as `eval/accuracy` for a metric that `job.every`
                logs.
            mode: Whether `min` or `max` is better.
            patience: End after this many evaluations in a row that don't improve on the best one.
            patience_steps: End at the first evaluation that comes at least this many steps after
                the best one. Pass either this or `patience`.
            min_delta: A value must be better by more than this to count as an improvement.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `mode` is neither `min` nor `max`, an argument is out of range, or early
                stopping was already set for this job.
            JobError: The loop has already begun. Also raised later, in the loop and on every rank:
                no evaluation returns that metric, or the ranks would decide differently.
        """
        early = checked_early_stopping(
            self.name,
            metric,
            mode=mode,
            patience=patience,
            patience_steps=patience_steps,
            min_delta=min_delta,
        )
        self._engine.evaluations.stop_early(early)

    def restore(
        self,
        state: T,
        *,
        mode: RestoreMode = "check",
        rank_local: Sequence[str] = (),
        check_replicas: int | None = None,
    ) -> T:
        """Returns the state to start from: `state`, or the newest checkpoint. Waits for all ranks.

        The arrays of the returned state are never those that you passed. So the job's step may
        donate them without invalidating yours, and you can pass the same initial state to several
        jobs.

        If the runner has a complete checkpoint of this job, you get the saved state instead, in a
        tree with the structure of `state`. The attribute `step` and the first `batches` call then
        resume from there as well. In that case, `mode` is used only if a single rank has saved the
        checkpoint and several ranks restore it: with `local`, if the ranks' own values differ,
        `restore` raises an error.

        Some leaves have a different value on each rank on purpose, e.g. a data mask. List their
        names in `rank_local`. Regardless of the `mode`, these leaves aren't compared or broadcast,
        neither here nor when replicas are compared later. Each rank saves its own value and
        restores that value. If the number of ranks has changed since the checkpoint was saved,
        there's no value for some rank, so restoring raises an error.

        Args:
            state: A pytree of JAX arrays, NumPy arrays and numbers.
            mode: `check` compares the ranks' values, `broadcast` takes rank 0's values, and `local`
                lets each rank have its own, e.g. a model that's sharded over ranks or a dropout
                key. The same on every rank.
            rank_local: Names of leaves of which each rank has its own version, such as a data mask.
                A name is either a key or attribute anywhere in the leaf's path, such as `"mask"`,
                or the beginning of the path in the form used by error messages, such as
                `"[0]['mask']"`. The same on every rank.
            check_replicas: Compare the ranks' copies of the state at this interval, in steps. A
                comparison costs one pass over the state on the host and an all-reduce of 16 bytes.
                If the copies differ, the job ends with an `ExchangeError` on every rank and the
                other jobs continue. If None, copies are compared only at checkpoints and at the
                job's end, and a difference only results in a warning and a line in the report.
                Leaves that are named in `rank_local`, or that an exchange strategy declares
                rank-local, aren't compared; see `docs/reference/faults.md`. The same on every rank.

        Raises:
            ValueError: `mode` isn't one of these values, a name in `rank_local` matches no leaf of
                `state`, or `check_replicas` isn't a whole number of at least 1.
            ExchangeError: On every rank, if values (`check`) or shapes (`broadcast`) differ.
            TypeError: `rank_local` contains something other than strings. Also, on every rank: a
                leaf is neither an array nor a number, unless `mode` is `local` and there are no
                checkpoints.
            JobError: On every rank: the checkpoint belongs to a different model, or was saved with
                a different number of ranks and can't be restored with this one, or the ranks passed
                different values for `mode`, `rank_local` or `check_replicas`.
        """
        what = f"of `job.restore` in job `{self.name}`"
        check_choice(mode, RestoreMode, f"`mode` {what}")
        names = checked_names(f"`rank_local` {what}", rank_local)
        interval = checked_interval(f"`check_replicas` {what}", check_replicas)
        return self._engine.restore(state, mode=mode, rank_local=names, check_replicas=interval)

    def save(self, state: PyTree) -> None:
        """Sets the job's state to `state`, and writes a checkpoint if the runner keeps any.

        Without checkpoints, this doesn't wait. With checkpoints, all ranks must call it at the same
        step, and it waits for three things: until the state has been computed, until all ranks have
        made the call, and until the job's previous checkpoint is on disk. The new checkpoint is
        written by a separate thread while training continues. After the call, the step may donate
        the state.

        If the job ends early, the state of a later committed step replaces the saved one.

        Raises:
            JobError: With checkpoints, on every rank: `state` doesn't have the form of the restored
                state, a disk failed, or a restart couldn't find its position in the data (training
                must use a single loop and a single function).
            ExchangeError: With checkpoints and `check_replicas`, on every rank: replicas differ.
        """
        self._engine.save(state)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank's exchange lane. Waits for all ranks.

        Use this if your job has to communicate outside of its steps, e.g. to compare a setting
        between ranks. Several jobs share one connection between ranks, so their communication needs
        the same order on every rank. The ranks agree on when `work` runs, just as they do for a
        step.

        In `work`, communicate through `control.allreduce_min` and `control.allgather_text`. All
        ranks must make the same calls in the same order.

        Raises:
            JobError: This thread isn't the job's own. Also, on every rank: `work` failed on another
                rank, or the ranks made different numbers of calls to `control`.
            Exception: Whatever `work` raises.
        """
        return self._engine.run_on_all_ranks(label, work)

    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]:
        """Returns a context manager whose duration appears in the report.

        Use `kind="host"` if a single rank works for a long time, e.g. on an evaluation, while the
        other ranks wait for it. The watchdog, which otherwise raises an error if a rank doesn't
        respond for `stall_timeout_s`, then knows that this rank is busy rather than stuck.

        Raises:
            ValueError: On entering the context: `kind` isn't a kind of span.
        """
        return self._engine.measure(kind, label)

    # Requests: any thread that has the job may call these, and a call on one rank is enough.

    def stop(self) -> None:
        """Ends this job on all ranks, between the same two steps. Doesn't wait.

        Only this job ends, and the other jobs continue. The next time the job's function waits for
        a step or a batch, an exception is raised there, which ends the function. Afterwards,
        `state` is the state after the last step that all ranks committed.

        Raises:
            JobError: `runner.run()` hasn't begun.
        """
        self._engine.request(JobRequest.STOP)

    def pause(self) -> None:
        """Pauses this job on all ranks, between the same two steps. Doesn't wait.

        A paused job keeps its state, but none of its steps are scheduled until you call `resume`.
        If different ranks request a pause and a resumption at the same time, the job is paused. A
        job that trains with a `ParameterServer` can't be paused, because the runner doesn't
        schedule its steps.

        Raises:
            JobError: `runner.run()` hasn't begun.
        """
        self._engine.request(JobRequest.PAUSE)

    def resume(self) -> None:
        """Resumes a paused job on all ranks. Doesn't wait.

        Raises:
            JobError: `runner.run()` hasn't begun.
        """
        self._engine.request(JobRequest.RESUME)

    @property
    def paused(self) -> bool:
        """Whether the job is paused on all ranks."""
        return self._engine.paused


def shown(job: Any) -> str:
    """Returns the one-line `repr` of a `Job` or a `JobContext`."""
    error = f" ({shortened(first_line(str(job.error)), 100)})" if job.error else ""
    return f"<job `{job.name}`, {job.status or 'not over'}{error}, after step {job.step}>"
