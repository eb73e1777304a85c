"""`FusedJob`: several plain loops rolled into one job, whose step trains all of them at once.

For tiny models, fusing can save time because the members' steps become a single program, with one
vote per step for all of them. The catch is that this program needs a batch from every member, and
members may have different amounts of data. A fused job therefore trains in rounds. In a round,
every step takes one batch from each member, until at least one member leaves, e.g. because it has
run out of data. The next round trains the remaining members with a smaller program. Since all ranks
must run the same program, they agree on who leaves between rounds.

We don't find out that a member has run out of data until we request its next batch. By then, the
prefetching thread has already taken batches from other members for the same step. To avoid losing
these, we put them back for the next round.
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
"""A train step for any number of jobs at once.

It takes the states and batches of all jobs, and returns their new states and metrics.
"""

_END = object()
_LONGEST_NAME = 40  # characters that fit in a table


@final
class FusedJob:
    """Several `Job` objects that are trained as a single job. Created by `jaxcross.fuse`.

    After the run, each member has its own state, history and status, as if it had been trained
    alone. A member leaves the fused job when it runs out of data, stops early, or its data raises
    an error. This happens between the same two steps on all ranks, and the other members carry on.
    An error in a step or an evaluation, on the other hand, ends all members, because they share the
    step.

    Attributes:
        name: The name shown in reports, derived from the members' names.
        members: The jobs.
        errors: Errors of members that failed while the others carried on. Complete after the run,
            and the same on every rank.
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
        """Makes this job provide the members' results. Called just before the run."""
        for member in self.members:
            if member.nonfinite != "ignore":
                raise ValueError(
                    f"Job `{member.name}` has `nonfinite={member.nonfinite!r}`, but the other jobs "
                    f"of the fused job `{self.name}` would skip steps or end along with it. Set "
                    "`nonfinite` before you call `jaxcross.fuse`, which then leaves this job out."
                )
        self._stand_ins = [member._fuse(self.name) for member in self.members]

    def _run(self, job: JobContext) -> States:
        """Trains all members to the end. This is the function that the runner calls."""
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
        """Trains one round, i.e. until at least one member leaves. Waits for all ranks.

        Returns:
            The number of examples per step in this round.
        """
        live = self._live
        examples = 0.0
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
        close_unread(loop)  # after `break`, the loop's thread wouldn't end otherwise
        job._engine.left_over = False  # the next round uses the remaining batches
        self._live = self._staying(job, batches, stopped)
        return examples

    def _planned_steps(self) -> int | None:
        """Returns the step at which the last member will end, or None if that's unknown."""
        counts = [number_of_batches(member._batches, member._steps) for member in self.members]
        return None if None in counts else max(count for count in counts if count is not None)

    def _staying(self, job: JobContext, batches: FusedBatches, stopped: set[str]) -> list[_Member]:
        """Returns the next round's members, the same on every rank. Waits for all ranks."""
        live = self._live
        mine = batches.ends()
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
                member.stand_in.status = JobStatus.FAILED
                member.stand_in.error = error
            if member.name not in stopped and all(text is None for text in texts):
                staying.append(member)
            else:
                member.source.close()
                how = JobStatus.STOPPED_EARLY if member.name in stopped else JobStatus.ENDED
                member.stand_in.status = member.stand_in.status or how
        return staying

    def _finish(self, job: JobContext) -> None:
        """Sets each member's results after the run, no matter how the run ended."""
        state = job.state
        # Members that left in earlier rounds already have their state.
        if self._live and isinstance(state, tuple) and len(state) == len(self._live):
            for member, own in zip(self._live, state, strict=True):
                member.stand_in.state = own
                member.stand_in.step = job.step
        for member in self._live:
            member.source.close()
        self._live = []
        for step, values in job.history:
            for stand_in in self._stand_ins:
                if stand_in.name in values:
                    stand_in.history.append((step, values[stand_in.name]))
        for stand_in in self._stand_ins:
            if stand_in.status is None:
                stand_in.status = job.status
                stand_in.error = job.error
            elif job.status == JobStatus.ENDED:  # an error after the run applies to all
                stand_in.error = stand_in.error or job.error
            if stand_in.status is not None:  # otherwise the run never began
                stand_in.done.set()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion(Sequence["Job | FusedJob"]):
    """The jobs to pass to `jaxcross.run`, some of them fused. The same on every rank.

    Print it to see which jobs are fused, and why.

    Attributes:
        jobs: The jobs. A fused job takes the place of its first member.
        reasons: One line for each set of jobs with the same step, explaining why they were or
            weren't fused.
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
        stand_in: Holds the member's results.
        source: The member's batches.
        latest: The member's latest state, for its evaluations.
    """

    def __init__(self, job: Job, stand_in: JobStandIn, engine: JobEngine) -> None:
        self.job = job
        self.stand_in = stand_in
        self._engine = engine
        self.name = job.name
        self.step = 0
        self.source = MemberBatches(job._batches, job._steps)
        self.latest = JobState()
        self._evaluations = Evaluations(job.name, rank=engine.world.rank, ranks=engine.world.size)

    def begin(self, state: PyTree) -> None:
        """Sets the initial state. Waits for all ranks if the job has evaluations."""
        self._set(state)
        for apply in self.job._settings:
            apply(self._evaluations)
        self._evaluations.begin(self)

    def advance(self, state: PyTree) -> None:
        self.step += 1
        self._set(state)

    def _set(self, state: PyTree) -> None:
        self.stand_in.state = state
        self.stand_in.step = self.step
        self.latest.set(state, self.step)

    def stops_early(self, job: JobContext) -> bool:
        """Runs the evaluations that are due, and returns whether the member stops early.

        May wait for all ranks.
        """
        if not self._evaluations.any:
            return False
        running = job._engine.evaluations  # so that steps in an evaluation don't count
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

    Only one thread at a time may take batches, but the source can be closed from any thread.

    Args:
        data: The batches.
        steps: How many batches to deliver at most, if there's a limit.

    Attributes:
        error: The error raised by `data`, if any. There are no more batches after an error.
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
            self._data = None
            self.error = error
            return _END
        if self._left is not None:
            self._left -= 1
        return batch

    def give_back(self, batch: Any) -> None:
        """Puts `batch` back, making it the next batch to be taken. A no-op for `_END`."""
        if batch is not _END:
            self._given_back.appendleft(batch)

    @property
    def ended(self) -> bool:
        """Whether there are no more batches. Waits for the user's iterator."""
        batch = self.take()
        self.give_back(batch)
        return batch is _END

    def close(self) -> None:
        """Closes the user's iterator, unless it's exhausted. Doesn't wait.

        When a step fails, the prefetching thread may be in the middle of reading the next batch
        from the user's iterator. If that's a generator, we can't close it from here, since Python
        doesn't allow closing a generator that's executing. In that case, the prefetching thread
        closes it as soon as it has its batch.
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
    """Takes one batch from each source at a time, until one of them runs out.

    Pass this iterator to `JobContext.batches`, which reads ahead in a separate thread.
    """

    def __init__(self, sources: Sequence[MemberBatches]) -> None:
        self._sources = tuple(sources)
        self._undelivered: deque[tuple[Any, ...]] = deque()
        self._left = threading.Event()  # set once the prefetching thread has ended

    def __next__(self) -> tuple[Any, ...]:
        # Take a batch from every source, even after one of them has turned out to be empty. That
        # way, we notice all jobs that run out of data at this step, and they can leave together.
        batches = tuple(source.take() for source in self._sources)
        if any(batch is _END for batch in batches):
            self._give_back(batches)
            raise StopIteration
        self._undelivered.append(batches)
        return batches

    def delivered(self) -> None:
        """Records that the oldest batches that were read ahead have reached the loop."""
        self._undelivered.popleft()

    def close(self) -> None:
        """Called by the prefetching thread when it has taken its last batch."""
        self._left.set()

    def ends(self) -> list[str | None]:
        """Returns how each source ended, or None for sources that have more batches.

        There's one source per fused job. If its data raised an error, the result is a description
        of that error; if it just ran out, the result is an empty string.

        Call this once, after the loop has ended. It waits for the prefetching thread to end too.
        Any batches that thread has read ahead but the loop never received go back to their sources.
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
