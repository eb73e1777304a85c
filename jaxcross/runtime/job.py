"""What a job's function receives, and what the caller of `Runner.add` keeps of the job."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NoReturn, get_args

import jax
import numpy as np

from jaxcross.checkpoint.talk import Together
from jaxcross.errors import JobError
from jaxcross.program.execution import Compiled
from jaxcross.program.segments import Program
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.events import Listeners, Span, SpanKind
from jaxcross.runtime.explain import describe
from jaxcross.runtime.feed import Feed, to_device
from jaxcross.runtime.job_waits import after_run
from jaxcross.runtime.kept import Kept, own_copy
from jaxcross.runtime.meeting import meet
from jaxcross.runtime.messages import Leaving
from jaxcross.runtime.metrics import MetricLog
from jaxcross.runtime.outline import Outline
from jaxcross.runtime.place import START
from jaxcross.runtime.resumption import Resumption
from jaxcross.runtime.seat import NonFinite, Seat, Stopped
from jaxcross.runtime.threads import JobThread, current_job
from jaxcross.runtime.vote import Wish, point_hash
from jaxcross.world.control import Control


def outline_of(program: Program) -> Outline:
    """What the interleaver knows of a program."""
    # Where the exchanges are parted into segments matters too: each segment is one place in the agreed order.
    layout = tuple(len(s.exchanges) for s in program.collectives)
    return Outline(
        kinds=tuple(s.kind for s in program.segments),
        needs=program.needs(),
        after_commit=program.after_commit,
        nbytes=tuple(s.nbytes for s in program.segments),
        local_step=program.local_step,
        signature=point_hash(program.exchange_hash(), layout),
        text=f"{program.exchange_signature()}\nexchanges of each segment: {layout}",
    )


class JobContext:
    """One job on this rank: what its function is given, and what the caller of `Runner.add` keeps.

    Attributes:
        name: Unique in its runner.
        state: The latest state that the job restored, saved or, at its end, returned; what its function assigns here is
            as good as saved. After a failure or an interrupt it is that of the last step that all ranks committed: if
            the function did not save it, the part of the step's results that has the structure, shapes and types of
            `state`, or all of them if none or several have. Never one of a step that some rank did not commit; what
            exchanges nothing is committed by its rank alone, so that ranks may be left at unlike steps between two
            exchanges.
        step: How many steps it has made; the same on every rank whenever its function looks. Counted are the calls of
            the first function with exchanges that it called, those between two exchanges of local SGD included:
            evaluation does not count. A job that trains by a `ParameterServer` counts its own pushes, which differ
            between ranks.
        history: `(step, metrics)` of each `log` that was read back, in order.
        examples_per_step: Examples that all ranks together use in a step: the leading dimension of the first array of
            a batch, times the ranks. Set it where that is not so.
        how: How it left: `ended`, `stopped`, `failed`, `ejected`, or `left out` if some rank never added it. None
            before that.
        error: Why, if it failed, was ejected or left out.
        left: Set once it has left and `state` and `history` are final: `job.left.wait()`.
        skipped: How many of its steps kept the state; see `nonfinite`.
        cuts: Which number of pieces `cut="auto"` found for which program, for a restart to find the same.
    """

    def __init__(
        self, name: str, fn: Callable[..., Any], arguments: Mapping[str, Any], *, listeners: Listeners, world: Any
    ) -> None:
        self.name = name
        self.step = 0
        self._metrics = MetricLog(lambda step, loss: listeners.note(job=name, kind="loss", step=step, value=loss))
        self.history = self._metrics.history
        self.examples_per_step: float | None = None
        self.error: Exception | None = None
        self.how: str | None = None
        self.left = threading.Event()
        self.skipped = 0
        self._unwound = False
        self._nonfinite: NonFinite = "ignore"
        self.cuts: dict[str, int] = {}
        self._kept = Kept()
        self._fn, self._arguments, self._listeners, self._world = fn, arguments, listeners, world
        self._driver: Driver | None = None
        self._seat: Seat | None = None
        self._counted: str | None = None
        self._outlines: dict[int, tuple[Compiled, Outline]] = {}
        self._programs: dict[int, Program] = {}
        self._feeds: list[Feed] = []
        self._resumption: Resumption | None = None  # if there are checkpoints
        self._strayed: JobError | None = None  # its batches were asked for in another thread

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
        if policy not in get_args(NonFinite):
            raise ValueError(f"Job `{self.name}`: `nonfinite` is `{policy!r}`, not one of {get_args(NonFinite)}")
        if self._outlines and policy != self._nonfinite:
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
            JobError: In the job's own thread, if another one iterated: there the loop ends at once.
        """
        driver = self._running()
        if self._stray_loop():
            return iter(())
        feed = Feed(
            driver=driver, job=self._number, stream=len(self._feeds), data=data, steps=steps, prepare=to_device,
            start=START if self._resumption is None else self._resumption.next_place(),
            resumable=self._resumption is not None,
        )  # fmt: skip
        self._feeds.append(feed)
        return self._measured(feed)

    def restore(self, state: Any, *, mode: Literal["check", "broadcast", "local"] = "check") -> Any:
        """The state to start from: `state`, after all ranks have made sure that they mean the same. Waits for all.

        Returned is a copy: the job's step may donate it, and another job start from the same `state`.

        If the runner has checkpoints, and the job one that is whole, returned is what was saved there, in a tree made
        like `state`; `step` and the first `batches` go on from there. `mode` matters then only to what one rank saved
        and several restore: where their own values under `local` differ, it refuses.

        Args:
            state: A pytree of arrays, JAX's or NumPy's, and numbers.
            mode: `check` compares the ranks' values, `broadcast` takes rank 0's, `local` allows each rank its own (a
                model that is spread over ranks).

        Raises:
            ExchangeError: On every rank, if values (`check`) or shapes (`broadcast`) differ.
            TypeError: Unless `local` without checkpoints, on every rank: a leaf is no array and no number.
            JobError: On every rank: the checkpoint is of another model, or of a number of ranks that cannot change.
        """
        if self._resumption is not None:
            found = self._resumption.restore(state, self.together, local=mode == "local")
            if found is not None:
                self.step = self._resumption.first_step
                self._running().resumed(self._number, self.step)
                self.state = found
                return self._stand(self._resumption)
        if mode != "local":
            state = self.together("restore", lambda _: self._world.broadcast_or_check(state, mode=mode))
        self.state = own_copy(state)
        return self.state if self._resumption is None else self._stand(self._resumption)

    def _stand(self, resumption: Resumption) -> Any:
        """The state, unless an earlier run has stopped the job for good. If it rested there, it rests before its first
        step.
        """
        stopped, paused = resumption.standing(self.together)
        if stopped:
            self.stop()
            while True:  # until the vote says so
                self.together("it was stopped", lambda _: None)
        if paused and self._world.rank == 0:  # a second wish would come after somebody's `resume`, perhaps
            self.pause()
        return self.state

    def save(self, state: Any) -> None:
        """Keeps `state` as the job's. If the job ends early, a later committed step's replaces it.

        Does not wait, unless the runner has checkpoints. Then it begins one: it waits for the state's values, for all
        ranks, which must come at the same step, and until the job's previous checkpoint is on disk; a thread off both
        lanes writes. The state may be donated afterwards.

        Raises:
            JobError: With checkpoints, on every rank: `state` is not like the one that was restored, or a disk failed.
        """
        self.state = state
        if self._resumption is not None:
            self._resumption.save(state, self.step, self.together, unfit=self._unfit())

    def together(self, label: str, work: Callable[[Any], Any]) -> Any:
        """Runs `work(control)` on every rank's exchange lane, at the same place in the agreed order. Waits for all.

        `work` may communicate through `control` (`allreduce_min`, `allgather_text`), and must do so alike on all ranks.

        Raises:
            JobError: This thread is not the job's own; on every rank: `work` failed on another one, or ranks talk
                unequally often.
            Exception: Whatever `work` raises.
        """
        driver = self._running()
        if error := self._stray("`job.together` or `job.restore`", "called"):
            raise error
        return driver.together(self._number, label, work)

    @contextmanager
    def measure(self, kind: SpanKind, label: str = "") -> Iterator[None]:
        """A context whose length appears in the report.

        With the kind `host` it may last longer than `watchdog_s` while other ranks wait, as an evaluation on one rank.
        """
        start_ns = time.monotonic_ns()
        busy = self._world.watching(
            job=self.name, step=self.step, segment=-1, what=label or "work", own=True, awaited=lambda _: {}
        )
        try:
            with busy if kind == "host" else nullcontext():
                yield
        finally:
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
        self._wish(Wish.STOP)

    def pause(self) -> None:
        """Lets this job rest, on all ranks between the same two of its steps. Does not wait.

        It keeps its state and takes no turn, on neither lane, until `resume`. Of a `pause` on one rank and a `resume`
        on another at the same time, the `pause` counts. A job that trains by a `ParameterServer` takes no turns: it
        cannot be paused.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._wish(Wish.PAUSE)

    def resume(self) -> None:
        """Lets a paused job go on, on all ranks. Does not wait.

        Raises:
            JobError: `runner.run()` has not begun.
        """
        self._wish(Wish.RESUME)

    @property
    def paused(self) -> bool:
        """Whether all ranks know that it is paused."""
        return self._seat is not None and self._seat.paused

    def _wish(self, wish: Wish) -> None:
        driver, seat = self._driver, self._seat
        if seat is None and self.how is None:
            raise JobError(f"Job `{self.name}` is not running: it can be stopped or paused during `runner.run()` only.")
        if driver is not None and seat is not None:  # else it has left
            driver.wish(seat, wish)

    # For `jaxcross.step`.

    @property
    def sole(self) -> bool:
        """Whether it has been its runner's only job, so that nothing runs beside it; as of the latest `together`, so
        that all ranks say the same.
        """
        return self._seat is not None and self._seat.sole

    def check_alike(self, control: Control) -> None:
        """Makes sure that all ranks want the same of this job. Waits for all ranks.

        Raises:
            JobError: On every rank: `nonfinite` differs.
        """
        number = get_args(NonFinite).index(self._nonfinite)
        low, high = control.allreduce_min(np.array([number, -number], np.int64))
        if low != -high:
            said = ", ".join(f"`{text}` on rank {n}" for n, text in enumerate(control.allgather_text(self._nonfinite)))
            raise JobError(
                f"Job `{self.name}`: `nonfinite` is {said}. Ranks would drift apart: set the same on every rank."
            )

    def first_use(self, program: Program) -> bool:
        """Whether this job has not asked about `program` before. The same on every rank."""
        new = id(program) not in self._programs
        self._programs[id(program)] = program  # keeps it alive, hence its id unique
        return new

    def call(self, compiled: Compiled, flat_inputs: list[Any]) -> Any:
        """One step of a `crossover` function in this job: waits until its last segment was dispatched.

        Raises:
            JobError, ExchangeError: The step failed on some rank; on every rank, and the job is over.
        """
        driver = self._running()
        known = self._outlines.get(id(compiled))
        if known is None:
            # The pair keeps `compiled` alive, hence its id unique.
            known = self._outlines[id(compiled)] = (compiled, outline_of(compiled.program))
        execution = compiled.execution(flat_inputs)
        if self._nonfinite != "ignore":
            execution.watch()
        outputs = driver.call(self._number, known[1], execution, self._nonfinite)
        if known[1].is_step:
            if self._counted is None:
                self._counted = compiled.program.name
            if compiled.program.name == self._counted:
                self.step += 1
                if self._resumption is not None:
                    self._resumption.stepped(self._feeds)
        self._kept.committed(outputs, self.step)
        return outputs

    # For `jaxcross.server`.

    @property
    def stopping(self) -> bool:
        """Whether the job is to stop. Ranks learn it one after the other."""
        return self._running().stopping(self._number)

    def served(self, *, start_ns: int, pushed_ns: int, end_ns: int, nbytes: int) -> None:
        """Counts a step that a parameter server exchanged, and reports its parts: until the push, and from there."""
        self.step += 1
        parts: tuple[tuple[SpanKind, int, int, int, int], ...] = (
            ("compute", 0, start_ns, pushed_ns, 0),
            ("collective", 1 + self._number, pushed_ns, end_ns, nbytes),
        )
        for segment, (kind, lane, begin_ns, finish_ns, size) in enumerate(parts):
            self._listeners.span(
                Span(
                    rank=self._world.rank, job=self.name, step=self.step, segment=segment, kind=kind, lane=lane,
                    start_ns=begin_ns, end_ns=finish_ns, ready_ns=begin_ns, nbytes=size, label="parameter server",
                )
            )  # fmt: skip

    # For the runner.

    @property
    def _number(self) -> int:
        return -1 if self._seat is None else self._seat.number

    @property
    def order(self) -> float:
        """Its place among the jobs of the run, the same on all ranks; behind all others if it never joined."""
        return self._number if self._number >= 0 else float("inf")

    @property
    def steps_made(self) -> int:
        """How many of its steps it made in this run."""
        return self.step if self._resumption is None else self.step - self._resumption.first_step

    @property
    def save_every(self) -> int | None:
        """After how many steps the plain loop is to save, if at all."""
        return None if self._resumption is None else self._resumption.every

    def attach(self, driver: Driver, seat: Seat, resumption: Resumption | None = None) -> None:
        """The run begins, or the job is added to it: this is its seat."""
        self._driver, self._seat, self._resumption = driver, seat, resumption
        seat.abandon = self.abandon
        if resumption is not None:
            # Before any job saves what it did with this knowledge.
            seat.tell_left, seat.tell_paused = self._tell_left, resumption.paused

    def _tell_left(self, how: Leaving, asked: bool) -> None:
        # One that a `ParameterServer` has stopped has come to its end as far as the vote knows.
        how = "stopped" if self._unwound and how == "ended" else how
        if self._resumption is not None and (how != "stopped" or asked):
            self._resumption.left(how)

    def thread(self) -> threading.Thread:
        """A new thread that will run the job."""
        return JobThread(self)

    def main(self) -> None:
        """The body of the job's thread. Whatever the function raises becomes the job's failure on all ranks.

        Waits, after the function, until the job is over on every rank.
        """
        driver, seat = self._running(), self._seat
        assert seat is not None
        try:
            result = self._fn(self, **self._arguments)
            self._running()
            if result is not None:
                self.state = result
            del result
            self._save_last(self.together)
        except Stopped as stopped:
            self._unwound = True
            _forget_locals(stopped)
            driver.job_returned(seat.number)
        except BaseException as error:
            driver.job_raised(seat.number, self._strayed or error, f"after step {self.step}")
            _forget_locals(error)
        else:
            driver.job_returned(seat.number)
        self._vanish(driver, seat)

    def abandon(self) -> NoReturn:
        """The job is over, but its function catches what says so, and calls again. Its thread is left behind."""
        driver, seat = self._running(), self._seat
        assert seat is not None
        _log.warning(
            "Job `%s` is over (%s), but its function catches every exception and goes on: its thread stays, asleep. "
            "Let `except` name what it expects.", self.name, describe(seat.error) if seat.error else "stopped",
        )  # fmt: skip
        self._unwound = True
        driver.job_returned(seat.number)
        self._vanish(driver, seat)
        thread = threading.current_thread()
        assert isinstance(thread, JobThread)
        thread.living.discard(thread)
        driver.leave_behind(thread)
        while True:
            threading.Event().wait()

    def _vanish(self, driver: Driver, seat: Seat) -> None:
        for feed in self._feeds:
            feed.close()
        seat.left.wait()
        self.close()
        driver.vacate(seat.number)

    def close(self) -> None:
        """The job is over: reads back what is left, and lets go of all but its state. Waits for the device."""
        if self.left.is_set():
            return
        seat = self._seat
        if seat is not None:
            # One that a `ParameterServer` has stopped has come to its end as far as the vote knows.
            how = "stopped" if self._unwound and seat.how == "ended" else seat.how
            self.how, self.error, self.skipped = how or "left out", seat.error, seat.skipped
            if self.error is not None:
                _forget_locals(self.error)
            if how != "ended":
                self._kept.settle()
            self._kept.release()
            seat.abandon = seat.tell_left = seat.tell_paused = _no_function
        failure = self._metrics.settle()
        if failure is not None and self.error is None:  # of a failed step's metrics the job's own error says more
            self.error = JobError(f"Job `{self.name}`: what it logged cannot be read back: {failure}")
            self.error.__cause__ = failure
        # The arguments hold data and steps, the steps their constants, and the feeds perhaps a batch.
        self._driver, self._fn, self._arguments = None, _no_function, {}
        self._outlines, self._programs, self._feeds = {}, {}, []
        self.left.set()

    def _unfit(self) -> str:
        """Why the state cannot be resumed from, if so."""
        if self.steps_made and self._counted is None:
            return "the job trains by a `ParameterServer`, which has a state of its own on every rank"
        return "" if self._kept.step == self.step else "its function neither returned nor saved its latest state"

    def _save_last(self, together: Together) -> None:
        if self._resumption is not None:
            self._resumption.save_last(self.state, self.step, together, unfit=self._unfit())

    def save_left(self) -> None:
        """Saves what a stop or a failure left, after the run. Waits for all ranks. Never hides why the job ended."""
        if self._seat is None or self._seat.how in (None, "ended"):  # what all ranks agreed on; `how` may differ
            return

        def together(label: str, work: Callable[[Any], Any]) -> Any:
            with after_run(self._world, label, job=self.name, step=self.step):
                return meet(work, self._world.control)

        try:
            self._save_last(together)
        except JobError as error:
            _log.warning("%s", error)

    def _running(self) -> Driver:
        if self._driver is None:
            raise JobError(
                f"Job `{self.name}` is not running. Its methods work inside its function, during `runner.run()`."
            )
        if self._strayed is not None and current_job() is self:
            raise self._strayed
        return self._driver

    def _stray(self, what: str, done: str) -> JobError | None:
        """What to say if the caller is not the job's own thread: it would take the answers that this one waits for."""
        if current_job() is self:
            return None
        return JobError(
            f"{what} of job `{self.name}` was {done} in thread `{threading.current_thread().name}`, not in the job's "
            "own: two threads would take each other's answers from the other ranks. Do it in the job's function. "
            "`job.batches` has a thread that prepares batches ahead of it: give what yours does to batches as an "
            "iterator, `job.batches(prepared(data))`."
        )

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

    def _measured(self, feed: Feed) -> Iterator[Any]:
        try:
            while not self._stray_loop():
                with self.measure("input"):
                    batch = next(feed, _END)
                if batch is _END:
                    return
                if self.examples_per_step is None:
                    self.examples_per_step = _examples(batch, self._world.size)
                yield batch
        finally:
            feed.close()


_END = object()
_log = logging.getLogger("jaxcross")


def _no_function(*_: Any, **__: Any) -> None:
    """In place of a job's function, once it is over."""


def _forget_locals(error: BaseException | None) -> None:
    """Lets go of what the functions held that an exception went through: a step's arrays would live as long as it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _examples(batch: Any, ranks: int) -> float | None:
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim]
    return float(shapes[0][0] * ranks) if shapes else None
