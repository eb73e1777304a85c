"""`JobContext`: the object that's passed to a job's function and returned by `Runner.add`.

This class merely validates arguments; the actual work happens in the job's `JobEngine`.
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
    """One job on this rank, as seen by its function and by the caller of `Runner.add`.

    Attributes:
        name: The job's name, unique within its runner.
        state: The latest state that the job restored, saved or (at the end) returned. Assigning to
            it has the same effect as `save` if the runner has no checkpoints. After a failure or an
            interrupt, this is the state after the last step that all ranks committed. If the
            function didn't save that state, we look for it among the step's results: it's the
            element with the same structure, shapes and types as the previous `state`, or all of the
            results if there isn't exactly one such element. Results of a step that some rank didn't
            commit never end up here. Each rank commits steps without exchanges on its own, so
            between two exchanges, ranks may end at different steps. If a computation fails on this
            rank after the step was committed, the arrays it was overwriting may have been deleted.
        step: How many steps the job has made. Whenever the job's function reads it, the value is
            the same on every rank. What counts as a step is a call of the first function with
            exchanges that the job calls; this includes the function's local steps (e.g. between two
            exchanges of local SGD), but not calls of other functions, such as one for evaluation.
            In a job that trains with a `ParameterServer`, each rank counts its own pushes, so the
            number differs between ranks.
        history: The `(step, metrics)` pairs of all `log` calls that have been read back so far, in
            order. With both `metrics=` and checkpoints, a restarted run's history still starts from
            step 1, because the earlier metrics are read from rank 0's files. In these, nested
            metrics have flat names such as `eval/accuracy`.
        examples_per_step: How many examples all ranks together use per step, averaged over the
            job's steps. By default, that's the leading dimension of the first array in a batch,
            times the number of ranks. Set it if this guess is wrong.
        unit: What reports call an example: `images` if the first array in a batch has a height, a
            width and 1, 3 or 4 channels, `examples` otherwise. Set it together with
            `examples_per_step`.
        nonfinite: What to do when a step's exchanged values aren't all finite.
        status: How the job ended: `ended`, `stopped early`, `stopped`, `failed`, `ejected`, or
            `left out` if some rank never added it. None until the job has ended.
        error: Why the job failed, was ejected or was left out, if any of these happened.
        done: An event that's set once the job has ended and `state` and `history` are final; wait
            for it with `job.done.wait()`.
        skipped: How many of the job's steps were skipped, i.e. left the state unchanged, including
            those of earlier runs; see `nonfinite`. Known once the job has ended.
        rank_local: The `rank_local` names passed to `restore`, i.e. the leaves that differ between
            ranks by design.
    """

    __slots__ = ("__weakref__", "_engine")  # so that a misspelt attribute is an error

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return shown(self)

    # For anyone who holds the job.

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
        """What to do when a step's exchanged values aren't all finite on some rank.

        `ignore`, the default, doesn't check at all. `raise` and `eject` end the job on every rank
        and roll back to the state before the step; `raise` makes `run()` raise an error at the end,
        while `eject` merely reports it. `skip` rolls back as well, but carries on. Set this before
        the first step, to the same value on every rank. The check costs one pass over the exchanged
        values on the host.
        """
        return self._engine.nonfinite

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_choice(policy, NonFinite, f"`nonfinite` of job `{self.name}`")
        if self._engine.registry.any and policy != self._engine.nonfinite:
            raise JobError(
                f"Job `{self.name}`: `nonfinite` was set after its first step. Set it at the "
                "beginning of the job's function."
            )
        self._engine.nonfinite = policy

    # For the job's function.

    def log(self, metrics: PyTree) -> None:
        """Records a pytree of scalars for the current step.

        It's fine to log in every step, because this doesn't wait for the values to be computed.
        Instead, it makes a copy on the device (the next step may donate the originals) and reads
        that back once it's available. For random keys, the raw key data are recorded
        (`jax.random.key_data`).

        The exception is a sweep with a pruner. There, logging the sweep's metric waits for the
        other trials and for all ranks, since the pruner needs to compare this trial with the
        others. If it decides to prune this trial, the call raises an exception that ends the job's
        function. In such a sweep, log the metric on every rank.
        """
        self._engine.metrics.add(self.step, metrics)

    def batches(self, data: Iterable[Any], steps: int | None = None) -> Iterator[Any]:
        """Returns an iterator over this rank's batches, prefetched onto the device.

        A background thread reads batches ahead of time and transfers them to the device. NumPy
        arrays are copied first unless they're read-only, so your iterator is free to reuse its
        buffers.

        The loop ends at the same step on all ranks: after `steps` batches, or as soon as any rank
        runs out of data. If reading the data raises an error on one rank, the job fails on all of
        them. All ranks must call `batches` in the same order, and `next` waits for all ranks. If
        the loop ends before `data` is exhausted and before `steps` is reached, the iterator is
        closed if it has a `close()` method.

        After a restart from a checkpoint, the first call picks up where the job's loop left off,
        and the batches before that position count towards `steps`. Pass the same `data` as before.
        Iterators that have `get_state` and `set_state` methods, such as those of Grain and
        `jaxcross.data`, jump straight to the position; any other iterator is read from the
        beginning, dropping the batches that were already used.

        Raises:
            TypeError: `data` isn't an iterable or is a single batch, or `steps` isn't a whole
                number.
            ValueError: `steps` is negative.
            JobError: A thread other than the job's own iterated over the batches. The loop in that
                thread ends immediately, and the error is raised in the job's own thread.
        """
        return self._engine.batch_loops.begin(data, steps)

    def every(
        self, n: int, fn: Callable[[Any], Any], *, rank: int | None = None, name: str = "eval"
    ) -> None:
        """Evaluates the job every `n` steps: calls `fn(state)` and logs the metrics it returns.

        Evaluations run in the job's own thread, at the point where its function requests the next
        batch from `job.batches`, saves, or returns. They don't count as steps. `fn` is called with
        `job.state`, so make sure that the job's function assigns the new state to it after each
        step. Restarts change neither the steps at which evaluations run nor the metrics files,
        where every evaluation appears exactly once. Call `every` before the loop, with the same
        arguments on every rank.

        Args:
            n: The interval between evaluations, in steps.
            fn: Returns a dict of numbers, a single number, or None to log nothing. If it's called
                on all ranks, it can use steps with exchanges and `job.batches`, and other jobs keep
                running in the meantime.
            rank: The only rank on which to call `fn`; None to call it on all ranks. On a single
                rank, `fn` may take longer than `stall_timeout_s` but must not communicate, and the
                job waits on the other ranks until they receive the metrics.
            name: The evaluation's name, used as a prefix for its metrics, e.g. `eval/accuracy`.

        Raises:
            TypeError: `n` isn't a whole number, or `fn` can't be called.
            ValueError: `n` is below 1, `name` is taken, or there's no such rank.
            JobError: The loop has already begun. Also raised later, in the loop and on every rank,
                if `fn` failed on some rank, `job.state` wasn't assigned, or the ranks' evaluations
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

        Metrics may differ between ranks, so one rank's value decides for all of them after each
        evaluation. As a result, all ranks end the loop after the same step, and so does a restarted
        run. The code after your loop still runs, and the job's status is `stopped early`. A NaN
        never counts as an improvement.

        Args:
            metric: The name of a metric logged by `job.every`, such as `eval/accuracy`.
            mode: Whether `min` or `max` is better.
            patience: Stop after this many evaluations in a row without an improvement on the best
                value.
            patience_steps: Stop at the first evaluation that comes at least this many steps after
                the best evaluation so far. Pass either this or `patience`.
            min_delta: A value only counts as an improvement if it's better by more than this.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `mode` is neither `min` nor `max`, an argument is out of range, or early
                stopping was already set up for this job.
            JobError: The loop has already begun. Also raised later, in the loop and on every rank,
                if no evaluation returns that metric or the ranks would decide differently.
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

        The returned state never shares arrays with the state you pass. The job's step can safely
        donate its arrays, and you can pass the same initial state to several jobs.

        If the runner has a complete checkpoint of this job, you get the saved state instead, in a
        tree with the structure of `state`; the `step` attribute and the first `batches` call resume
        from there as well. `mode` is ignored in that case, with one exception: if a checkpoint
        saved by a single rank is restored on several ranks with `local`, `restore` raises an error
        unless all ranks passed the same values.

        Use `rank_local` to name leaves that differ between ranks by design, e.g. a data mask.
        Regardless of `mode`, these leaves are neither compared nor broadcast, and later replica
        comparisons leave them out as well. Each rank saves and restores its own values. Restoring
        on a different number of ranks raises an error, because some ranks would have no values to
        restore.

        Args:
            state: A pytree of JAX arrays, NumPy arrays and numbers. It may also have static leaves,
                such as functions and strings: these must be the same on all ranks, and aren't saved
                in checkpoints.
            mode: `check` compares the ranks' values, `broadcast` takes rank 0's values, and `local`
                lets each rank keep its own, e.g. for a model that's sharded over ranks or for
                dropout keys. The same on every rank.
            rank_local: Names of the leaves that differ between ranks by design. A name is either a
                key or attribute that occurs anywhere in the leaf's path, such as `"mask"`, or the
                beginning of the path as it's written in error messages, such as `"[0]['mask']"`.
                The same on every rank.
            check_replicas: Compare the ranks' copies of the state at this interval, in steps. A
                comparison costs one pass over the state on the host and an all-reduce of 16 bytes.
                If the copies differ, the job ends with an `ExchangeError` on every rank, while the
                other jobs carry on. If None, copies are compared only at checkpoints and at the end
                of the job, and a difference merely leads to a warning and a line in the report.
                Leaves that are rank-local, whether they're named in `rank_local` or declared by an
                exchange strategy, aren't compared; see `docs/reference/faults.md`. The same on
                every rank.

        Raises:
            ValueError: `mode` isn't one of these values, a name in `rank_local` matches no leaf of
                `state`, or `check_replicas` isn't a whole number of at least 1.
            ExchangeError: On every rank: the values (with `check`) or the shapes (with `broadcast`)
                differ.
            TypeError: `rank_local` contains something other than strings. Also, on every rank: a
                leaf is neither an array nor a number, and can't be static, unless `mode` is `local`
                and there are no checkpoints.
            JobError: On every rank: the checkpoint belongs to a different model, or was saved with
                a different number of ranks and can't be restored with this one, or `mode`,
                `rank_local` or `check_replicas` differ between ranks.
        """
        what = f"of `job.restore` in job `{self.name}`"
        check_choice(mode, RestoreMode, f"`mode` {what}")
        names = checked_names(f"`rank_local` {what}", rank_local)
        interval = checked_interval(f"`check_replicas` {what}", check_replicas)
        return self._engine.restore(state, mode=mode, rank_local=names, check_replicas=interval)

    def save(self, state: PyTree) -> None:
        """Sets the job's state to `state`, and writes a checkpoint if the runner has them enabled.

        Without checkpoints, this returns immediately. With checkpoints, it's a collective call that
        all ranks must make at the same step. It blocks until the state has been computed, all ranks
        have joined in, and the job's previous checkpoint is on disk; the new checkpoint is then
        written in the background while training continues. Once the call has returned, the step is
        free to donate the state.

        If the job ends early, the state is replaced by that of a later committed step, if there is
        one.

        Raises:
            JobError: With checkpoints, on every rank: `state` doesn't have the same form as the
                restored state, a disk failed, or a restart wouldn't be able to find its position in
                the data (training must use a single loop and a single function).
            ExchangeError: With checkpoints and `check_replicas`, on every rank: replicas differ.
        """
        self._engine.save(state)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` in the exchange lane of every rank. Waits for all ranks.

        Use this if your job needs to communicate outside of its steps, e.g. to compare a setting
        across ranks. All jobs share the same connection between ranks, so their communication has
        to happen in the same order everywhere. Just like for a step, the ranks agree on when to run
        `work`.

        Inside `work`, communicate through `control.allreduce_min` and `control.allgather_text`. All
        ranks must make the same calls in the same order.

        Raises:
            JobError: This isn't the job's own thread. Also, on every rank: `work` failed on another
                rank, or some ranks made more calls to `control` than others.
            Exception: Whatever `work` raises.
        """
        return self._engine.run_on_all_ranks(label, work)

    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]:
        """Returns a context manager whose duration shows up in the report.

        Use `kind="host"` for lengthy work on a single rank, such as an evaluation, while the other
        ranks wait. It tells the watchdog, which would otherwise raise an error if a rank doesn't
        respond within `stall_timeout_s`, that this rank is busy rather than stuck.

        Raises:
            ValueError: On entering the context: `kind` isn't a valid kind of span.
        """
        return self._engine.measure(kind, label)

    # Requests. Any thread that holds the job may call these, and it's enough to do so on one rank.

    def stop(self) -> None:
        """Ends this job on all ranks, between the same two steps. Doesn't wait.

        Other jobs are unaffected. The next time the job's function waits for a step or a batch, an
        exception is raised there to end the function. After that, `state` is the state after the
        last step that all ranks committed.

        Raises:
            JobError: `runner.run()` hasn't begun.
        """
        self._engine.request(JobRequest.STOP)

    def pause(self) -> None:
        """Pauses this job on all ranks, between the same two steps. Doesn't wait.

        A paused job keeps its state, but its steps aren't scheduled until you call `resume`. If
        ranks request a pause and a resumption at the same time, the pause wins. Jobs that train
        with a `ParameterServer` can't be paused, since the runner doesn't schedule their steps.

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
    """Returns the one-line `repr` of a `Job` or `JobContext`."""
    error = f" ({shortened(first_line(str(job.error)), 100)})" if job.error else ""
    return f"<job `{job.name}`, {job.status or 'not over'}{error}, after step {job.step}>"
