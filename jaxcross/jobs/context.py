"""What a job's function receives, and what the caller of `Runner.add` keeps of the job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from jaxcross.errors import JobError
from jaxcross.interleave.instrument import Span, SpanKind
from jaxcross.interleave.vote import JobRequest
from jaxcross.jobs.arguments import check_batches
from jaxcross.jobs.data_position import START
from jaxcross.jobs.latest_state import own_copy
from jaxcross.jobs.lifecycle import JobLifecycle
from jaxcross.jobs.prefetch import Prefetcher, to_device
from jaxcross.jobs.resumption import Resumption
from jaxcross.runtime.job_record import Initial, NonFinite, check_choice
from jaxcross.runtime.step_host import Agreement, T
from jaxcross.world.control_plane import Control


class JobContext(JobLifecycle):
    """One job on this rank: what its function is given, and what the caller of `Runner.add` keeps.

    Attributes:
        name: Unique in its runner.
        state: The latest state that the job restored, saved or, at its end, returned; what its function assigns here is
            as good as saved. After a failure or an interrupt it is that of the last step that all ranks committed: if
            the function did not save it, the part of the step's results that has the structure, shapes and types of
            `state`, or all of them if none or several have. Never one of a step that some rank did not commit; what
            exchanges nothing is committed by its rank alone, so that ranks may be left at different steps between two
            exchanges.
        step: How many steps it has made; the same on every rank whenever its function looks. Counted are the calls of
            the first function with exchanges that it called, those between two exchanges of local SGD included:
            evaluation does not count. A job that trains by a `ParameterServer` counts its own pushes, which differ
            between ranks.
        history: `(step, metrics)` of each `log` that was read back, in order.
        examples_per_step: Examples that all ranks together use in a step, the mean of its steps: the leading dimension
            of the first array of a batch, times the ranks. Set it where that is not so.
        unit: What reports call an example: `images` if that array has a height, a width and 1, 3 or 4 channels, else
            `examples`. Set it together with `examples_per_step`.
        how: How it left: `ended`, `stopped`, `failed`, `ejected`, or `left out` if some rank never added it. None
            before that.
        error: Why, if it failed, was ejected or left out.
        left: An event, set once it has left and `state` and `history` are final: `job.left.wait()`.
        skipped: How many of its steps kept the state; see `nonfinite`.
        cuts: Into how many pieces `cut="auto"` cut which program, 0 as beside other jobs, for a restart to do the same.
    """

    # For the job's function.

    @property
    def state(self) -> Any:
        return self._kept.state

    @state.setter
    def state(self, state: Any) -> None:
        self._kept.give(state, self.step)

    @property
    def nonfinite(self) -> NonFinite:
        """What becomes of a step whose exchanged values are not all finite, on some rank.

        `ignore`, the default, does not look. `raise` and `eject` end the job on every rank with the state of the step
        before; `raise` lets `run()` raise at the end, `eject` only reports it. `skip` goes on with the state as it was.
        Set it before the first step, on every rank alike. To look costs one pass over what was exchanged, on the host.
        """
        return self._nonfinite

    @nonfinite.setter
    def nonfinite(self, policy: NonFinite) -> None:
        check_choice(policy, NonFinite, f"`nonfinite` of job `{self.name}`")
        if self._calls.any and policy != self._nonfinite:
            raise JobError(f"Job `{self.name}`: `nonfinite` was set after its first step. Set it before.")
        self._nonfinite = policy

    def log(self, metrics: Any) -> None:
        """Keeps a pytree of scalars under the current step. Never waits: it is read back once it is computed.

        Kept are copies: the next step may donate what was logged. Of a random key, its words (`jax.random.key_data`).
        """
        self._metrics.add(self.step, metrics)

    def batches(self, data: Iterable[Any], steps: int | None = None) -> Iterator[Any]:
        """This rank's batches from `data`, each put on the device by a thread of its own before it is wanted.

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
        driver = self._running()
        check_batches(self.name, data, steps)
        if self._stray_loop():
            return iter(())
        # Here and not where a loop ends: what is left early, a garbage collector may end in any thread.
        self._feeds = [feed for feed in self._feeds if not feed.closed]
        feed = Prefetcher(
            driver=driver, job=self._number, stream=self._streams, beside=[feed.stream for feed in self._feeds],
            data=data, steps=steps, prepare=to_device,
            start=START if self._resumption is None else self._resumption.next_place(),
            resumable=self._resumption is not None,
        )  # fmt: skip
        self._streams += 1
        self._feeds.append(feed)
        if self._resumption is not None:
            self._resumption.begun(feed)
        return self._measured(feed)

    def _stray_loop(self) -> bool:
        """Whether a loop over batches must end at once, because another thread runs it. The job fails for it, where
        its own thread can tell: raised here, where perhaps nobody catches it, it would end the other jobs as well.
        """
        error = self._stray("`job.batches`", "iterated")
        if error is None:
            return False
        seat = self._seat
        if self._strayed is not None or self._driver is None or seat is None or seat.how == "ended":
            raise error  # a loop around the loop, or nobody left to tell
        self._strayed = error
        return True

    def _measured(self, feed: Prefetcher) -> Iterator[Any]:
        used = False
        try:
            while not self._stray_loop():
                if used:  # else it may be the second of two that are read side by side
                    self.replicas.next_batch(self.run_on_all_ranks)
                start_ns = time.monotonic_ns()
                batch = next(feed, _END)
                if batch is _END:
                    return
                self._measured_since(start_ns, "input")
                self.replicas.batches += 1
                self._in_batch, unit = _examples(batch, self._world.size)
                if self.examples_per_step is None:
                    self.examples_per_step, self.unit = self._in_batch, unit
                    self._mean_examples = self.examples_per_step
                yield batch
                used = True
        finally:
            feed.close()

    def restore(self, state: Any, *, mode: Initial = "check") -> Any:
        """The state to start from: `state`, after all ranks have made sure that they mean the same. Waits for all.

        Returned is a copy: the job's step may donate it, and another job start from the same `state`.

        If the runner has checkpoints, and the job one that is whole, returned is what was saved there, in a tree made
        like `state`; `step` and the first `batches` go on from there. `mode` matters then only to what one rank saved
        and several restore: where their own values under `local` differ, it refuses.

        Args:
            state: A pytree of arrays, JAX's or NumPy's, and numbers.
            mode: `check` compares the ranks' values, `broadcast` takes rank 0's, `local` allows each rank its own (a
                model that is spread over ranks, a dropout key). The same on every rank.

        Raises:
            ValueError: `mode` is none of these.
            ExchangeError: On every rank, if values (`check`) or shapes (`broadcast`) differ.
            TypeError: Unless `local` without checkpoints, on every rank: a leaf is no array and no number.
            JobError: On every rank: the checkpoint is of another model, or of a number of ranks that cannot change.
        """
        check_choice(mode, Initial, f"`mode` of `job.restore` in job `{self.name}`")
        resumption, found = self._resumption, None
        if resumption is not None:
            found = resumption.restore(state, self.run_on_all_ranks, local=mode == "local")
        if resumption is not None and found is not None:
            self.step = resumption.first_step
            self._running().resumed(self._number, self.step)
            self.state = found
        else:
            if mode != "local":
                label = "restore" if mode == "check" else f"restore, mode={mode!r}"  # ranks compare it
                state = self.run_on_all_ranks(label, lambda _: self._world.broadcast_or_check(state, mode=mode))
            self.state = own_copy(state)
        self.replicas.begin(
            self.state, self.step, local=mode == "local", resumed=found is not None, together=self.run_on_all_ranks
        )
        return self.state if resumption is None else self._stand(resumption)

    def _stand(self, resumption: Resumption) -> Any:
        """The state, unless an earlier run has stopped the job for good. If it rested there, it rests before its first
        step.
        """
        stopped, paused = resumption.markers(self.run_on_all_ranks)
        if stopped:
            self.stop()
            while True:  # until the vote says so
                self.run_on_all_ranks("it was stopped", lambda _: None)
        if paused and self._world.rank == 0:  # a second wish would come after somebody's `resume`, perhaps
            self.pause()
        return self.state

    def save(self, state: Any) -> None:
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
        if self._resumption is not None:
            every = self._resumption.save(
                state, self.step, self.run_on_all_ranks, unsavable_reason=self._unsavable_reason()
            )
            self.replicas.saved(self.step, every)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank's exchange lane, at the same place in the agreed order. Waits for all.

        `work` may communicate through `control` (`allreduce_min`, `allgather_text`), and must do so alike on all ranks.

        Raises:
            JobError: This thread is not the job's own; on every rank: `work` failed on another one, or ranks talk
                unequally often.
            Exception: Whatever `work` raises.
        """
        driver = self._running()
        if error := self._stray("`job.run_on_all_ranks` or `job.restore`", "called"):
            raise error
        return driver.together(self._number, label, work)

    # For `jaxcross.step`: see `jaxcross.runtime.step_host.StepHost`.

    @property
    def in_run(self) -> bool:
        return True

    def cut_before_restart(self, key: str) -> int | None:
        """Returns the number of segments that the step with this key was cut into in an earlier run, if known."""
        return self.cuts.get(key)

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Notes the number of segments for a restart."""
        self.cuts[key] = n_segments

    def agree(self, agreement: Agreement) -> None:
        """Makes an agreement of all ranks. Waits for them.

        Raises:
            JobError, ExchangeError: On every rank: `nonfinite` or the exchanges differ.
        """

        def work(control: Control) -> None:
            self.check_alike(control)
            agreement.in_run(control)

        self.run_on_all_ranks(agreement.label, work)

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """A context whose length the report and the flight recorder show as compilation of `name`."""
        with self._world.flight.during("compile", job=self.name, step=self.step), self.measure("compile", name):
            yield

    @contextmanager
    def measure(self, kind: SpanKind, label: str = "") -> Iterator[None]:
        """A context whose length appears in the report.

        With the kind `host` it may last longer than `stall_timeout_s` while other ranks wait, as an evaluation on one
        rank may.

        Raises:
            ValueError: `kind` is not a kind of span.
        """
        check_choice(kind, SpanKind, f"`kind` of `job.measure` in job `{self.name}`")
        start_ns = time.monotonic_ns()
        busy = self._world.watching(
            job=self.name, step=self.step, segment=-1, what=label or "work", own=True, awaited=lambda _: {}
        )
        try:
            with busy if kind == "host" else nullcontext():
                yield
        finally:
            self._measured_since(start_ns, kind, label)

    def _measured_since(self, start_ns: int, kind: SpanKind, label: str = "") -> None:
        self._listeners.span(
            Span(
                rank=self._world.rank, job=self.name, step=self.step, segment=-1, kind=kind, lane=0,
                start_ns=start_ns, end_ns=time.monotonic_ns(), ready_ns=start_ns, label=label,
            )
        )  # fmt: skip

    # For whoever holds the job, in any thread of any rank; one rank's wish is enough.

    def stop(self) -> None:
        """Ends this job, on all ranks between the same two of its steps. The others go on. Does not wait.

        `state` will be that of its last committed step. Its function is left where it waits next for a step or a batch.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._request(JobRequest.STOP)

    def pause(self) -> None:
        """Lets this job rest, on all ranks between the same two of its steps. Does not wait.

        It keeps its state and takes no turn, on neither lane, until `resume`. Of a `pause` on one rank and a `resume`
        on another at the same time, the `pause` counts. A job that trains by a `ParameterServer` takes no turns: it
        cannot be paused.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._request(JobRequest.PAUSE)

    def resume(self) -> None:
        """Lets a paused job go on, on all ranks. Does not wait.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._request(JobRequest.RESUME)

    @property
    def paused(self) -> bool:
        """Whether all ranks know that it is paused."""
        return self._seat is not None and self._seat.paused

    def _request(self, request: JobRequest) -> None:
        driver, seat = self._driver, self._seat
        if seat is None and self.how is None:
            raise JobError(f"Job `{self.name}` is not running: it can be stopped or paused during `runner.run()` only.")
        if driver is not None and seat is not None:  # else it has left
            driver.request(seat, request)


_END = object()


def _examples(batch: Any, ranks: int) -> tuple[float | None, str]:
    """How many examples all ranks together use in a step, and what they are."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim]
    if not shapes:
        return None, "examples"
    # Channels last, as in Flax, or first; an image is larger than its channels are many.
    sizes = [
        (shape[1:3], shape[3]) if shape[3] < shape[1] else (shape[2:], shape[1])
        for shape in shapes[:1]
        if len(shape) == 4
    ]
    images = any(min(size) > 4 and channels in (1, 3, 4) for size, channels in sizes)
    return float(shapes[0][0] * ranks), "images" if images else "examples"
