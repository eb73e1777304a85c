"""`FusedJob`: several plain loops as one job of a run, whose step trains all of them at once.

Its members share the step, but may have different amounts of data. So the job trains in rounds: a
round takes one batch from each live member at a time until some of them leave, then the next round
continues with the rest. All ranks have to agree on who leaves, because that changes the step's
program.

Which members have run out of data is only found out when a batch is missing, and by then the thread
of the loop has read ahead in the others. So their sources accept batches back, and the next round
starts with those.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

from jaxcross._endings import JobStatus
from jaxcross._html import preformatted
from jaxcross._pytree import PyTree
from jaxcross.checkpoint import named_leaves
from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave import SpanKind
from jaxcross.jobs.batch_loops import count_examples
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.jobs.job_state import JobState
from jaxcross.jobs.prefetch import close_unread, number_of_batches, to_device
from jaxcross.runtime import describe, explain
from jaxcross.world import Control, gather

if TYPE_CHECKING:
    from jaxcross.jobs.engine import JobEngine
    from jaxcross.jobs.plain_loop import Job, JobStandIn

T = TypeVar("T")

States: TypeAlias = tuple[PyTree, ...]
FusedStep: TypeAlias = Callable[[States, tuple[PyTree, ...]], tuple[States, tuple[PyTree, ...]]]
"""A step of any number of jobs.

It takes a state and a batch of each job, and returns a state and the metrics of each.
"""

_END = object()
_LONGEST_NAME = 40  # characters that fit in a table


@final
class FusedJob:
    """Several `Job`s that `jaxcross.run` trains as one. Made by `jaxcross.fuse`.

    Each member still gets results of its own. A member leaves between two steps, on all ranks
    alike, if its data end, it stops early, or its data raise an error; the others continue without
    it. An error in a step or in an evaluation ends all members.

    Attributes:
        name: The name in reports, made from the members' names.
        members: The jobs.
        errors: Errors of members that failed alone. Complete after the run, and the same on every
            rank.
    """

    def __init__(self, members: Sequence[Job], step: FusedStep) -> None:
        names = [job.name for job in members]
        joined = "+".join(names)
        self.name = (
            joined if len(joined) <= _LONGEST_NAME else f"{names[0]} and {len(names) - 1} more"
        )
        self.members = tuple(members)
        self.errors: list[JobError | ExchangeError] = []
        self._step = step
        self._live: list[_Member] = []
        self._stand_ins: list[JobStandIn] = []

    def _attach(self, job: JobContext) -> None:  # noqa: ARG002
        """Gives each member results that this job fills in. Called just before the run.

        Raises:
            ValueError: A member has a policy for nonfinite values.
        """
        for member in self.members:
            if member.nonfinite != "ignore":
                raise ValueError(
                    f"Job `{member.name}` has `nonfinite={member.nonfinite!r}`, and the other jobs "
                    f"of the fused job `{self.name}` would skip or end with it. Set it before "
                    "`jaxcross.fuse`, which then leaves the job out."
                )
        self._stand_ins = [member._fuse(self.name) for member in self.members]

    def _run(self, job: JobContext) -> States:
        """Trains all members to their ends. This is the function of the runner's job."""
        self._live = [
            _Member(member, stand_in, job._engine)
            for member, stand_in in zip(self.members, self._stand_ins, strict=True)
        ]
        own = [
            f"[{n}]{path}"
            for n, member in enumerate(self.members)
            for path in named_leaves(member.state, member.rank_local)
        ]
        states = tuple(member.state for member in self.members)
        states = job.restore(
            states,
            mode=self.members[0]._mode,
            rank_local=own,
            check_replicas=self.members[0]._check_replicas,
        )
        for member, state in zip(self._live, states, strict=True):
            member.begin(state)
        counted = 0.0
        while self._live:
            first = job.step
            per_step = self._train(job)
            counted += (job.step - first) * per_step
            if job.step and counted:
                job.examples_per_step = counted / job.step
        return tuple(member.state for member in self.members)

    def _train(self, job: JobContext) -> float:
        """Trains until some members leave, and removes those. Waits for all ranks.

        Returns:
            The number of examples per step.
        """
        live, examples = self._live, 0.0
        batches = FusedBatches([member.source for member in live])
        states = job.state = tuple(member.job.state for member in live)
        stopped: set[str] = set()
        loop = job.batches(batches)
        job._engine.planned_steps = self._planned_steps()
        for batch in loop:
            batches.delivered()
            if not examples:
                examples = sum(
                    count_examples(each, job._engine.world.size)[0] or 0.0 for each in batch
                )
                job.examples_per_step = examples or None
            states, metrics = self._step(states, batch)
            job.state = states
            job.log({member.name: values for member, values in zip(live, metrics, strict=True)})
            for member, state in zip(live, states, strict=True):
                member.advance(state)
            stopped = {member.name for member in live if member.stops_early(job)}
            if stopped:
                break
        close_unread(loop)  # otherwise the thread of an abandoned loop wouldn't end
        job._engine.left_over = False  # the remaining members use those batches later
        self._live = self._staying(job, batches, stopped)
        return examples

    def _planned_steps(self) -> int | None:
        """Returns the step at which the last member ends, or None if that's unknown."""
        counts = [number_of_batches(member._batches, member._steps) for member in self.members]
        return None if None in counts else max(count for count in counts if count is not None)

    def _staying(self, job: JobContext, batches: FusedBatches, stopped: set[str]) -> list[_Member]:
        """Returns the members that stay, the same on every rank. Waits for all ranks."""
        live, mine = self._live, batches.ends()
        ranks = job.run_on_all_ranks("jobs that leave", lambda control: gather(control, mine))
        staying = []
        for member, texts in zip(live, zip(*ranks, strict=True), strict=True):
            if any(texts):
                found = [
                    f"failed\nafter step {member.step}: {text}" if text else "" for text in texts
                ]
                error = explain(member.name, member.step, found)
                error.__cause__ = member.source.error
                self.errors.append(error)
                member.stand_in.status, member.stand_in.error = JobStatus.FAILED, error
            if member.name not in stopped and all(text is None for text in texts):
                staying.append(member)
            else:
                member.source.close()
                how = JobStatus.STOPPED_EARLY if member.name in stopped else JobStatus.ENDED
                member.stand_in.status = member.stand_in.status or how
        return staying

    def _finish(self, job: JobContext) -> None:
        """Gives each member its results after the run, however the run ended."""
        state = job.state
        # The state of members that ended by themselves is already set.
        if self._live and isinstance(state, tuple) and len(state) == len(self._live):
            for member, own in zip(self._live, state, strict=True):
                member.stand_in.state, member.stand_in.step = own, job.step
        for member in self._live:
            member.source.close()
        self._live = []
        for step, values in job.history:
            for stand_in in self._stand_ins:
                if stand_in.name in values:
                    stand_in.history.append((step, values[stand_in.name]))
        for stand_in in self._stand_ins:
            if stand_in.status is None:
                stand_in.status, stand_in.error = job.status, job.error
            elif job.status == JobStatus.ENDED:  # errors found after the run concern all members
                stand_in.error = stand_in.error or job.error
            if stand_in.status is not None:  # otherwise the run never began
                stand_in.done.set()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion(Sequence["Job | FusedJob"]):
    """The jobs to pass to `jaxcross.run`, some of them fused. The same on every rank.

    `print` shows which jobs are fused, and why.

    Attributes:
        jobs: The jobs. A fused job is at the place of its first member.
        reasons: One line for each set of jobs that have the same step: why they're fused or not.
    """

    jobs: tuple[Job | FusedJob, ...]
    reasons: tuple[str, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.jobs[index]

    def __len__(self) -> int:
        return len(self.jobs)

    def __repr__(self) -> str:
        fused = sum(isinstance(job, FusedJob) for job in self.jobs)
        return (
            f"<Fusion: {len(self.jobs)} to run, {fused} of them fused; print() says which, and why>"
        )

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


@final
class _Member:
    """One member of a fused job. Implements `jaxcross.jobs.evaluations.EvaluatedJob`.

    Attributes:
        job: The member's `Job`.
        stand_in: Receives its results.
        source: Its batches.
        latest: Its latest state, for its evaluations.
    """

    def __init__(self, job: Job, stand_in: JobStandIn, engine: JobEngine) -> None:
        self.job, self.stand_in, self._engine = job, stand_in, engine
        self.name, self.step = job.name, 0
        self.source = MemberBatches(job._batches, job._steps)
        self.latest = JobState()
        self._evaluations = Evaluations(job.name, rank=engine.world.rank, ranks=engine.world.size)

    def begin(self, state: PyTree) -> None:
        """Sets the initial state. Waits for all ranks if the job evaluates."""
        self._set(state)
        for apply in self.job._settings:
            apply(self._evaluations)
        self._evaluations.begin(self)

    def advance(self, state: PyTree) -> None:
        self.step += 1
        self._set(state)

    def _set(self, state: PyTree) -> None:
        self.stand_in.state, self.stand_in.step = state, self.step
        self.latest.set(state, self.step)

    def stops_early(self, job: JobContext) -> bool:
        """Runs the evaluations that are due, and returns whether the job ends here.

        May wait for all ranks.
        """
        if not self._evaluations.any:
            return False
        running = job._engine.evaluations  # evaluations don't count as steps of the fused job
        running.running = True
        try:
            self._evaluations.run(self, lambda name, values: job.log({self.name: {name: values}}))
        finally:
            running.running = False
        return bool(self._evaluations.stop_reason)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        return self._engine.run_on_all_ranks(f"{self.name}: {label}", work)

    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]:
        return self._engine.measure(kind, f"{self.name}: {label}")


@final
class MemberBatches:
    """One job's batches, on the device.

    Only one thread at a time takes batches, but any thread may close the source.

    Args:
        data: The batches.
        steps: The number of batches after which to end, if given.

    Attributes:
        error: What `data` raised, if anything. There are no more batches then.
    """

    def __init__(self, data: Iterable[Any], steps: int | None) -> None:
        self._data: Iterable[Any] | None = data
        self._iterator: Iterator[Any] | None = None
        self._left = steps
        self._given_back: deque[Any] = deque()
        self._taking = threading.Lock()
        self._closing = False
        self.error: BaseException | None = None

    def take(self) -> Any:
        """Returns the next batch, or `_END` if there is none. Waits for the user's iterator."""
        with self._taking:
            batch = self._take()
        if self._closing:
            self._close_unless_taking()
        return batch

    def _take(self) -> Any:
        if self._given_back:
            return self._given_back.popleft()
        if self._left == 0 or self._data is None:
            return _END
        try:
            if self._iterator is None:
                self._iterator = iter(self._data)
            batch = to_device(next(self._iterator))
        except StopIteration:
            self._data = None
            return _END
        except Exception as error:  # only this job fails
            error.add_note("raised by the data of the job")
            self._data, self.error = None, error
            return _END
        if self._left is not None:
            self._left -= 1
        return batch

    def give_back(self, batch: Any) -> None:
        """Makes `batch` the next one that's taken. A no-op for `_END`."""
        if batch is not _END:
            self._given_back.appendleft(batch)

    @property
    def ended(self) -> bool:
        """Whether there's no further batch. Waits for the user's iterator."""
        self.give_back(batch := self.take())
        return batch is _END

    def close(self) -> None:
        """Closes the user's iterator, unless it came to its end. Doesn't wait.

        If a step fails while the next batch is being read, another thread is inside the iterator. A
        running generator can't be closed, so that thread closes it afterwards.
        """
        self._closing = True
        self._close_unless_taking()

    def _close_unless_taking(self) -> None:
        if not self._taking.acquire(blocking=False):
            return
        try:
            self._given_back.clear()
            data, self._data = self._data, None
            if data is not None and self._iterator is not None:
                close_unread(self._iterator)
        finally:
            self._taking.release()


@final
class FusedBatches(Iterator[tuple[Any, ...]]):
    """Takes one batch from each source at a time, until one of them has none.

    It's meant for `JobContext.batches`, whose thread reads ahead.
    """

    def __init__(self, sources: Sequence[MemberBatches]) -> None:
        self._sources = tuple(sources)
        self._undelivered: deque[tuple[Any, ...]] = deque()
        self._left = threading.Event()  # set once the thread that reads ahead has ended

    def __next__(self) -> tuple[Any, ...]:
        # We take from all sources even if one has ended, to find all that end together.
        batches = tuple(source.take() for source in self._sources)
        if any(batch is _END for batch in batches):
            self._give_back(batches)
            raise StopIteration
        self._undelivered.append(batches)
        return batches

    def delivered(self) -> None:
        """Records that the loop has received the earliest undelivered batches."""
        self._undelivered.popleft()

    def close(self) -> None:
        """Records that the thread has taken its last batch. The thread calls this when it ends."""
        self._left.set()

    def ends(self) -> list[str | None]:
        """Returns how each source ended: None if it has more batches, otherwise its error's text.

        The text is "" if the source just has no more batches. Call this once, after the loop. It
        waits for the loop's thread, and gives back the batches that the thread took but the loop
        didn't receive.
        """
        self._left.wait()
        while self._undelivered:
            self._give_back(self._undelivered.pop())
        return [self._end_of(source) for source in self._sources]

    def _give_back(self, batches: tuple[Any, ...]) -> None:
        for source, batch in zip(self._sources, batches, strict=True):
            source.give_back(batch)

    def _end_of(self, source: MemberBatches) -> str | None:
        if not source.ended:
            return None
        return "" if source.error is None else describe(source.error)
