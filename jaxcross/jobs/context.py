"""`JobContext`: the object that a job's function receives and that `Runner.add` returns.

It checks the arguments of its methods, and leaves the rest to the job's `JobEngine`.
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
        state: The latest state that the job restored, saved or, at its end, returned. Assigning a
            value here is as good as saving it without checkpoints. After a failure or an interrupt,
            this is the state after the last step that all ranks committed. If the function didn't
            save that state, it's the part of the step's results with the structure, shapes and
            types of the previous `state`, or all results if no part or more than one part matches.
            It's never from a step that some rank didn't commit. A step that exchanges nothing is
            committed by its rank alone, so ranks may end at different steps between two exchanges.
            If a computation failed on this rank after its step was committed, the arrays that it
            was overwriting may be deleted.
        step: How many steps the job has made. The same on every rank whenever the job's function
            reads it. Steps are the calls of the first function with exchanges that the job called,
            including calls between two exchanges of local SGD, so evaluation doesn't count. A job
            that trains with a `ParameterServer` counts its own pushes, which differ between ranks.
        history: `(step, metrics)` of each `log` call that has been read back, in order. With
            `metrics=` and checkpoints, it begins at step 1 even after a restart, because rank 0's
            earlier lines are read in. In those, a nested metric has a flat name such as
            `eval/accuracy`.
        examples_per_step: How many examples all ranks together use per step, averaged over the
            job's steps: the leading dimension of the first array in a batch, times the number of
            ranks. Set it if that's wrong.
        unit: What reports call an example: `images` if that first array has a height, a width and
            1, 3 or 4 channels, otherwise `examples`. Set it together with `examples_per_step`.
        nonfinite: What to do with a step whose exchanged values aren't all finite.
        status: How the job ended: `ended`, `stopped early`, `stopped`, `failed`, `ejected`, or
            `left out` if some rank never added it. None before that.
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

        Never waits: the values are read back once they're computed. They're copied, so the next
        step may donate the arrays that you log. For a random key, the key's words are logged
        (`jax.random.key_data`).

        There's one exception: in a sweep that prunes, logging the sweep's metric waits for the
        other trials and for all ranks, and ends the trial right there if it's pruned. Log that
        metric on every rank.
        """
        self._engine.metrics.add(self.step, metrics)

    def batches(self, data: Iterable[Any], steps: int | None = None) -> Iterator[Any]:
        """Returns an iterator over this rank's batches, prefetched onto the device.

        A thread of the loop puts each batch on the device ahead of time. NumPy arrays are copied
        unless they're read-only, so `data` may keep reusing one buffer.

        The loop ends on all ranks at the same step: when the shortest data ends, or after `steps`.
        If an iterator raises on one rank, the job ends on all ranks. Each rank must call `batches`
        in the same order, and `next` waits for all ranks. If the loop ends before `data` and
        `steps` do, its thread calls the iterator's `close()`, if there is one.

        After a restart from a checkpoint, the first call resumes where the job's loop was, and
        `steps` includes the batches before that. If the iterator has `get_state` and `set_state`,
        as those of Grain and `jaxcross.data` do, its position is set directly. From any other
        iterator, the batches that were already used are read and dropped. `data` must be the same
        as before.

        Raises:
            TypeError: `data` isn't an iterable or is a single batch, or `steps` isn't a whole
                number.
            ValueError: `steps` is below 0.
            JobError: Another thread iterated over the batches. The error is raised in the job's own
                thread; in the other thread, the loop just ends at once.
        """
        return self._engine.batch_loops.begin(data, steps)

    def every(
        self, n: int, fn: Callable[[Any], Any], *, rank: int | None = None, name: str = "eval"
    ) -> None:
        """Evaluates the job every `n` steps: calls `fn(state)` and logs the metrics it returns.

        The calls happen in the job's own thread, when its function requests the next batch from
        `job.batches`, saves, or returns. They don't count as steps. `fn` receives `job.state`, so
        the job's function must assign that after each step. After a restart, the same steps are
        evaluated, and each evaluation appears once in the metrics files. Call `every` before the
        loop, with the same arguments on every rank.

        Args:
            n: The number of steps from one call to the next.
            fn: Returns a dict of numbers, a number, or None to log nothing. If all ranks call it,
                it may use steps with exchanges and `job.batches`; the other jobs continue
                meanwhile.
            rank: The only rank that calls `fn`. The call may then take longer than
                `stall_timeout_s`, but must not communicate; the job's other ranks wait for it and
                receive its metrics. If None, all ranks call `fn`.
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

        The decision is made at each evaluation from a single rank's value, so all ranks end after
        the same step. A restarted run ends there too. The code after the loop still runs, and the
        job's status is `stopped early`. NaN never counts as an improvement.

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
            ValueError: `mode` is neither word, an argument is out of range, or the job already
                stops early by a metric.
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

        The result is a copy, so the job's step may donate it, and several jobs may start from the
        same `state`.

        If the runner has checkpoints and there's a complete one of this job, the result is the
        saved state, in a tree with the structure of `state`, and `step` and the first `batches`
        call resume from there. In that case, `mode` only matters for a checkpoint that a single
        rank saved and several ranks restore: if their own values under `local` differ, restoring is
        refused.

        Leaves that `rank_local` names belong to their rank, whatever the `mode`: they're neither
        compared nor broadcast, here or in later comparisons of replicas. Each rank saves its own
        version and gets it back. A checkpoint from a different number of ranks is refused, because
        some rank's version would be missing.

        Args:
            state: A pytree of JAX arrays, NumPy arrays and numbers.
            mode: `check` compares the ranks' values, `broadcast` takes rank 0's values, and `local`
                lets each rank have its own, e.g. a model that's sharded over ranks or a dropout
                key. The same on every rank.
            rank_local: Names of leaves of which each rank has its own version, such as a data mask.
                A name is either a key or attribute anywhere in the leaf's path, such as `"mask"`,
                or the beginning of the path as messages show it, such as `"[0]['mask']"`. The same
                on every rank.
            check_replicas: Compare the ranks' copies of the state at this interval, in steps. A
                comparison costs one pass over the state on the host and an all-reduce of 16 bytes.
                If the copies differ, the job ends with an `ExchangeError` on every rank and the
                other jobs continue. If None, copies are compared only at checkpoints and at the
                job's end, and a difference only results in a warning and a line in the report.
                Leaves named by `rank_local` aren't compared, and neither are leaves that an
                exchange strategy declares rank-local; see `docs/reference/faults.md`. The same on
                every rank.

        Raises:
            ValueError: `mode` isn't one of these words, `rank_local` names no leaf of `state`, or
                `check_replicas` isn't a whole number of at least 1.
            ExchangeError: On every rank, if values (`check`) or shapes (`broadcast`) differ.
            TypeError: `rank_local` contains something other than strings. Also, on every rank: a
                leaf is neither an array nor a number, unless `mode` is `local` and there are no
                checkpoints.
            JobError: On every rank: the checkpoint belongs to a different model or was saved with a
                number of ranks that can't change, or ranks passed different values for `mode`,
                `rank_local` or `check_replicas`.
        """
        what = f"of `job.restore` in job `{self.name}`"
        check_choice(mode, RestoreMode, f"`mode` {what}")
        names = checked_names(f"`rank_local` {what}", rank_local)
        interval = checked_interval(f"`check_replicas` {what}", check_replicas)
        return self._engine.restore(state, mode=mode, rank_local=names, check_replicas=interval)

    def save(self, state: PyTree) -> None:
        """Makes `state` the job's state, and begins a checkpoint if the runner has any.

        Doesn't wait unless the runner has checkpoints. With checkpoints, it waits until the state's
        values are computed, until all ranks have called it, which they must do at the same step,
        and until the job's previous checkpoint is on disk. A thread outside of both lanes does the
        writing. The step may donate the state afterwards.

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

        It runs at the same place in the agreed order on every rank. `work` may communicate through
        `control` (`allreduce_min`, `allgather_text`), but must then make the same calls on all
        ranks.

        Raises:
            JobError: This thread isn't the job's own. Also, on every rank: `work` failed on another
                rank, or the ranks made different numbers of calls to `control`.
            Exception: Whatever `work` raises.
        """
        return self._engine.run_on_all_ranks(label, work)

    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]:
        """Returns a context manager whose duration appears in the report.

        With `kind="host"`, the body may take longer than `stall_timeout_s` while other ranks wait
        for it, e.g. for an evaluation on one rank.

        Raises:
            ValueError: On entering the context: `kind` isn't a kind of span.
        """
        return self._engine.measure(kind, label)

    # For anyone who holds the job, in any thread and on any rank; one rank's request is enough.

    def stop(self) -> None:
        """Ends this job on all ranks, between the same two steps. Doesn't wait.

        The other jobs continue. `state` will be that of the job's last committed step. The job's
        function is left at the point where it next waits for a step or a batch.

        Raises:
            JobError: `runner.run()` hasn't begun.
        """
        self._engine.request(JobRequest.STOP)

    def pause(self) -> None:
        """Pauses this job on all ranks, between the same two steps. Doesn't wait.

        The job keeps its state and takes no turns on either lane until `resume`. If one rank calls
        `pause` and another calls `resume` at the same time, `pause` wins. A job that trains with a
        `ParameterServer` can't be paused, because it takes no turns.

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
