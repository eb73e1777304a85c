"""`JobContext`: the object that a job's function receives, and that the caller of `Runner.add` keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from jaxcross._pytree import PyTree
from jaxcross.checkpoint.rank_local import named_leaves
from jaxcross.errors import JobError, first_line, shortened
from jaxcross.health.abort import print_error
from jaxcross.interleave.instrument import SpanKind
from jaxcross.interleave.vote import JobRequest
from jaxcross.jobs.arguments import checked_early_stopping, checked_evaluation, checked_names
from jaxcross.jobs.batch_loops import BatchLoops
from jaxcross.jobs.early_stopping import Mode
from jaxcross.jobs.host import JobHost
from jaxcross.jobs.latest_state import own_copy
from jaxcross.jobs.lifecycle import JobLifecycle
from jaxcross.jobs.metrics import MetricLog
from jaxcross.jobs.observer import JobObserver
from jaxcross.jobs.resumption import Resumption
from jaxcross.jobs.thread import JobThread
from jaxcross.runtime.job_record import Initial, NonFinite, check_choice
from jaxcross.runtime.step_host import T
from jaxcross.world import World
from jaxcross.world.control_plane import Control


def current_job() -> JobContext | None:
    """Returns the job whose thread calls, if any."""
    thread = threading.current_thread()
    if isinstance(thread, JobThread) and isinstance(thread.job, JobContext):
        return thread.job
    return None


@final
class JobContext:
    """One job on this rank, for its function and for the caller of `Runner.add`.

    Attributes:
        name: Unique in its runner.
        state: The latest state that the job restored, saved or, at its end, returned; a value that its function assigns
            here is as good as saved. After a failure or an interrupt it is that of the last step that all ranks
            committed: if the function did not save it, the part of the step's results that has the structure, shapes
            and types of `state`, or all of them if none or several have. Never one of a step that some rank did not
            commit. A step that exchanges nothing is committed by its rank alone, so that ranks may be left at different
            steps between two exchanges. Where a computation failed on this rank after its step's commit, the arrays
            that it was overwriting may be deleted.
        step: How many steps it has made; the same on every rank whenever its function looks. Counted are the calls of
            the first function with exchanges that it called, those between two exchanges of local SGD included:
            evaluation does not count. A job that trains by a `ParameterServer` counts its own pushes, which differ
            between ranks.
        history: `(step, metrics)` of each `log` that was read back, in order. With `metrics=` and checkpoints it begins
            at step 1 after a restart, too: with rank 0's earlier lines, where a metric inside another is
            `eval/accuracy`.
        examples_per_step: Examples that all ranks together use in a step, the mean of its steps: the leading dimension
            of the first array of a batch, times the ranks. Set it where that is wrong.
        unit: The name of an example in reports: `images` if that array has a height, a width and 1, 3 or 4 channels,
            else `examples`. Set it together with `examples_per_step`.
        nonfinite: Policy for a step whose exchanged values are not all finite.
        status: How it ended: `ended`, `stopped early`, `stopped`, `failed`, `ejected`, or `left out` if some rank never
            added it. None before that.
        error: The reason, if it failed, was ejected or left out.
        done: An event, set once it is over and `state` and `history` are final: `job.done.wait()`.
        skipped: How many of its steps kept the state, earlier runs included; see `nonfinite`. Known once it is over.
        cuts: The number of segments that `cut="auto"` cut each program into, 0 for the cut next to other jobs, so that
            a restart does the same.
        host: Runs the job's steps; for jaxcross itself.
        unread: The error of reading back what it logged, on this rank. All ranks get it after the run.
    """

    def __init__(self, life: JobLifecycle, host: JobHost, metrics: MetricLog, world: World) -> None:
        self.name = life.name
        self._life = life
        self._metrics = metrics
        self._world = world
        self.host = host
        self.history = metrics.history
        self.cuts = host.cuts
        self.done = host.done
        self.status: str | None = None
        self.error: Exception | None = None
        self.unread: Exception | None = None
        self.skipped = 0
        self._loops = BatchLoops(life, host, world, self.finish_step)

    def __repr__(self) -> str:
        error = f" ({shortened(first_line(str(self.error)), 100)})" if self.error else ""
        return f"<job `{self.name}`, {self.status or 'not over'}{error}, after step {self.step}>"

    # For the job's function.

    @property
    def step(self) -> int:
        return self.host.step

    @property
    def state(self) -> PyTree:
        return self.host.latest.state

    @state.setter
    def state(self, state: PyTree) -> None:
        self.host.latest.set(state, self.step)

    @property
    def examples_per_step(self) -> float | None:
        return self.host.examples.per_step

    @examples_per_step.setter
    def examples_per_step(self, examples: float | None) -> None:
        self.host.examples.per_step = examples

    @property
    def unit(self) -> str:
        return self.host.examples.unit

    @unit.setter
    def unit(self, unit: str) -> None:
        self.host.examples.unit = unit

    @property
    def nonfinite(self) -> NonFinite:
        """Policy for a step whose exchanged values are not all finite, on some rank.

        `ignore`, the default, does not look. `raise` and `eject` end the job on every rank with the state of the step
        before; `raise` lets `run()` raise at the end, `eject` only reports it. `skip` goes on with the state as it was.
        Set it before the first step, on every rank alike. To look costs one pass over what was exchanged, on the host.
        """
        return self.host.nonfinite

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_choice(policy, NonFinite, f"`nonfinite` of job `{self.name}`")
        if self.host.registry.any and policy != self.host.nonfinite:
            raise JobError(f"Job `{self.name}`: `nonfinite` was set after its first step. Set it before.")
        self.host.nonfinite = policy

    def log(self, metrics: PyTree) -> None:
        """Keeps a pytree of scalars under the current step. Never waits: it is read back once it is computed.

        Kept are copies: the next step may donate what was logged. Of a random key, its words (`jax.random.key_data`).

        In a sweep that prunes, logging the sweep's metric waits for the other trials and for all ranks, and ends the
        trial there if it is pruned; log it on every rank.
        """
        self._metrics.add(self.step, metrics)

    def batches(self, data: Iterable[Any], steps: int | None = None) -> Iterator[Any]:
        """Returns this rank's batches from `data`, each put on the device ahead of time by a thread of the loop.

        NumPy arrays are copied, unless they are read-only, so that `data` may fill one buffer again and again.
        The loop ends on all ranks at the same step: with the shortest data, or after `steps`. An iterator that raises
        on one rank ends the job on all. Each rank must call `batches` in the same order. `next` waits for the ranks.
        If the loop ends before `data` and `steps` do, the thread closes the iterator (`close()`, if it has one).

        After a restart from a checkpoint, the first call goes on where the job's loop stood then, and `steps` counts
        what came before: an iterator with `get_state` and `set_state` (Grain's, `jaxcross.data`'s) is set to its place,
        from any other the batches that were used are taken and dropped. `data` must be as it was.

        Raises:
            TypeError: `data` is not an iterable or is a single batch, or `steps` is not a whole number.
            ValueError: `steps` is below 0.
            JobError: In the job's own thread, if another one iterated: there the loop ends at once.
        """
        return self._loops.begin(data, steps)

    def every(self, n: int, fn: Callable[[Any], Any], *, rank: int | None = None, name: str = "eval") -> None:
        """Evaluates the job every `n` steps: calls `fn(state)`, and logs the metrics that it returns under `name`.

        The calls are made in the job's function, when it asks `job.batches` for the next batch, saves or returns. They
        are no steps. The state is `job.state`, which the function assigns after each step. After a restart the same
        steps are evaluated, each once in the files of metrics. Call it before the loop, on every rank alike.

        Args:
            n: Steps from one call to the next.
            fn: Returns a dict of numbers, a number, or None to log nothing. On all ranks it may call steps with
                exchanges and `job.batches`; the other jobs go on meanwhile.
            rank: The only rank that calls `fn`, which may then take longer than `stall_timeout_s` and must not
                communicate; the job's other ranks wait, and get its metrics. If None, all ranks call it.
            name: Of this evaluation: metrics are logged as `eval/accuracy`.

        Raises:
            TypeError: `n` is not a whole number, or `fn` cannot be called.
            ValueError: `n` is below 1, `name` is taken, or there is no such rank.
            JobError: In the loop, on every rank: `fn` failed on one, `job.state` was not assigned, or ranks evaluate
                differently. Here: the loop has begun.
        """
        self.host.evaluations.add(checked_evaluation(self.name, n, fn, rank, name))

    def stop_early(
        self,
        metric: str,
        *,
        mode: Mode,
        patience: int | None = None,
        patience_steps: int | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Ends the loop over `job.batches` on all ranks once a metric of an evaluation no longer gets better.

        Decided at each evaluation, by the value of one rank, so that all ranks end after the same step; a restart ends
        there, too. What follows the loop is run, and the job's status is `stopped early`. NaN is never better.

        Args:
            metric: Name of the metric, such as `eval/accuracy` for what `job.every` logs.
            mode: Whether `min` or `max` is better.
            patience: Ends after so many evaluations in a row that are not better than the best one before.
            patience_steps: Ends at the first evaluation so many steps after the best one. Give one of the two.
            min_delta: A value must be better by more than this.

        Raises:
            TypeError: An argument is of another type.
            ValueError: `mode` is another word, an argument is out of range, or the job stops early by a metric already.
            JobError: In the loop, on every rank: no evaluation returns that metric, or ranks decide differently. Here:
                the loop has begun.
        """
        early = checked_early_stopping(
            self.name, metric, mode=mode, patience=patience, patience_steps=patience_steps, min_delta=min_delta
        )
        self.host.evaluations.stop_early(early)

    def restore(self, state: PyTree, *, mode: Initial = "check", rank_local: Sequence[str] = ()) -> PyTree:
        """Returns the state to start from: `state`, once all ranks have agreed on it. Waits for all ranks.

        The result is a copy: the job's step may donate it, and another job start from the same `state`.

        If the runner has checkpoints, and the job one that is complete, the result is what was saved there, in a tree
        made like `state`; `step` and the first `batches` go on from there. `mode` matters then only to what one rank
        saved and several restore: where their own values under `local` differ, it refuses.

        Leaves that `rank_local` names belong to their rank, in every `mode`: they are neither compared nor broadcast,
        here and in later comparisons of replicas. Each rank saves its own, and gets its own back. A checkpoint of
        another number of ranks is refused, because some rank's own would be missing.

        Args:
            state: A pytree of arrays, JAX's or NumPy's, and numbers.
            mode: `check` compares the ranks' values, `broadcast` takes rank 0's, `local` allows each rank its own (a
                model that is spread over ranks, a dropout key). The same on every rank.
            rank_local: Names of leaves of which each rank has its own, such as a data mask: a key or attribute anywhere
                in their path, such as `"mask"`, or the beginning of the path as messages show it, such as
                `"[0]['mask']"`. The same on every rank.

        Raises:
            ValueError: `mode` is another word, or `rank_local` names no leaf of `state`.
            ExchangeError: On every rank, if values (`check`) or shapes (`broadcast`) differ.
            TypeError: `rank_local` holds something other than texts; or, unless `local` without checkpoints, on every
                rank: a leaf is neither an array nor a number.
            JobError: On every rank: the checkpoint is of another model, or of a number of ranks that cannot change; or
                ranks give another `mode` or `rank_local`.
        """
        check_choice(mode, Initial, f"`mode` of `job.restore` in job `{self.name}`")
        names = checked_names(f"`rank_local` of `job.restore` in job `{self.name}`", rank_local)
        named = frozenset(named_leaves(state, names))
        if names:  # before any file is read by them
            self.run_on_all_ranks(f"restore, rank_local={sorted(names)}", lambda _: None)  # ranks compare the label
        resumption, found = self._life.resumption, None
        if resumption is not None:
            found = resumption.restore(state, self.run_on_all_ranks, local=mode == "local", named=named)
        if resumption is not None and found is not None:
            self.host.step = self.host.first_step = resumption.first_step
            driver, record = self._life.running()
            driver.resumed(record, self.step)
            if self._world.rank == 0:
                print_error(f"jaxcross: job `{self.name}` goes on after step {self.step}.")
            self.state = found
        else:
            if mode != "local":
                label = "restore" if mode == "check" else f"restore, mode={mode!r}"  # ranks compare it
                state = self.run_on_all_ranks(
                    label, lambda _: self._world.broadcast_or_check(state, mode=mode, rank_local=named)
                )
            self.state = own_copy(state)
        self._metrics.begin(self.step, None if found is None else self.run_on_all_ranks)
        self.host.replicas.begin(
            self.state,
            self.step,
            local=mode == "local",
            named=named,
            resumed=found is not None,
            together=self.run_on_all_ranks,
        )
        return self.state if resumption is None else self._resume_status(resumption)

    def _resume_status(self, resumption: Resumption) -> PyTree:
        """Returns the state, unless an earlier run stopped the job for good. A paused job stays paused."""
        stopped, paused = resumption.markers(self.run_on_all_ranks)
        if stopped:
            self.stop()
            while True:  # until the vote ends the job, which raises here
                self.run_on_all_ranks("it was stopped", lambda _: None)
        # One rank's request is enough, and a second one might come after a `resume` and undo that.
        if paused and self._world.rank == 0:
            self.pause()
        return self.state

    def save(self, state: PyTree) -> None:
        """Keeps `state` as the job's. If the job ends early, a later committed step's replaces it.

        Does not wait, unless the runner has checkpoints. Then it begins one: it waits for the state's values, for all
        ranks, which must come at the same step, and until the job's previous checkpoint is on disk; a thread off both
        lanes writes. The state may be donated afterwards.

        Raises:
            JobError: With checkpoints, on every rank: `state` is not like the one that was restored, a disk failed, or
                a restart would not know where to go on in the data (training goes through one loop and one function).
            ExchangeError: With checkpoints and `check_replicas`, on every rank: replicas differ.
        """
        self.state = state
        self._evaluate()
        self._save(state)

    def _save(self, state: PyTree) -> None:
        resumption = self._life.resumption
        if resumption is not None:
            # A restart goes on behind this step: what was logged until then must not be lost with the process.
            self.read_back()
            if self.host.observer is not None:
                self.host.observer.saving(self.step)
            every = resumption.save(
                state, self.step, self.run_on_all_ranks, unsavable_reason=self.host.unsavable_reason()
            )
            self.host.replicas.saved(self.step, every)

    def _evaluate(self) -> bool:
        """Makes the evaluations that are due. May wait for all ranks. Returns whether the state is the best so far."""
        improved = self.host.evaluations.run(self.host, self._log_evaluation)
        # While an evaluation is made, the latest loop is its own, and does not end for what an earlier one decided.
        if self.host.evaluations.stop_reason and not self.host.evaluations.running:
            self._loops.end_early()
        return improved

    def _log_evaluation(self, name: str, metrics: PyTree) -> None:
        if self.host.steps_made == 0:  # a run that was killed may have logged it
            self._metrics.drop(self.step, name)
        self.log({name: metrics})

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank's exchange lane, at the same place in the agreed order. Waits for all.

        `work` may communicate through `control` (`allreduce_min`, `allgather_text`), and must do so alike on all ranks.

        Raises:
            JobError: This thread is not the job's own; on every rank: `work` failed on another one, or ranks
                communicate unequally often.
            Exception: Whatever `work` raises.
        """
        return self.host.run_on_all_ranks(label, work)

    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]:
        """Returns a context whose length appears in the report.

        With the kind `host` it may last longer than `stall_timeout_s` while other ranks wait, as an evaluation on one
        rank may.

        Raises:
            ValueError: (when entered) `kind` is not a kind of span.
        """
        return self.host.measure(kind, label)

    # For any holder of the job, in any thread of any rank; one rank's request is enough.

    def stop(self) -> None:
        """Ends this job, on all ranks between the same two of its steps. The others go on. Does not wait.

        `state` will be that of its last committed step. Its function is left where it waits next for a step or a batch.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._request(JobRequest.STOP)

    def pause(self) -> None:
        """Pauses this job, on all ranks between the same two of its steps. Does not wait.

        It keeps its state and takes no turn, on neither lane, until `resume`. Of a `pause` on one rank and a `resume`
        on another at the same time, the `pause` counts. A job that trains by a `ParameterServer` takes no turns: it
        cannot be paused.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._request(JobRequest.PAUSE)

    def resume(self) -> None:
        """Resumes a paused job, on all ranks. Does not wait.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._request(JobRequest.RESUME)

    @property
    def paused(self) -> bool:
        """Whether the job is paused on all ranks."""
        return self._life.record is not None and self._life.record.paused

    def _request(self, request: JobRequest) -> None:
        if self.status is None:  # else it is over, and a request too late
            self._life.request(request)

    # For jaxcross itself.

    def finish_step(self) -> None:
        """Does what is due after the latest step, once its loop's body is over: evaluates, and keeps the best state."""
        if self._evaluate():
            self._save(self.state)

    @property
    def save_every(self) -> int | None:
        """The number of steps after which the plain loop saves, if it does."""
        return None if self._life.resumption is None else self._life.resumption.every

    def observe(self, observer: JobObserver) -> None:
        """Makes `observer` follow the job from here on; in the job's thread."""
        self.host.observer = self._metrics.observer = observer

    def read_back(self) -> None:
        """Puts all that was logged so far into `history`. Waits for the device."""
        self.unread = self._metrics.read_remaining() or self.unread
