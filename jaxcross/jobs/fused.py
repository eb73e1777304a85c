"""`FusedJob`: several plain loops as one job of a run, whose step trains all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from jaxcross._html import preformatted
from jaxcross._pytree import PyTree
from jaxcross.checkpoint.rank_local import named_leaves
from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave.instrument import SpanKind
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.jobs.examples import count_examples
from jaxcross.jobs.host import JobHost
from jaxcross.jobs.latest_state import LatestState
from jaxcross.jobs.plain_job import Job
from jaxcross.jobs.prefetch import close_unread, number_of_batches
from jaxcross.jobs.side_by_side import SideBySide, Source
from jaxcross.jobs.standing import JobStanding
from jaxcross.runtime.failure_text import explain
from jaxcross.runtime.step_host import T
from jaxcross.world.control_plane import Control, gather

States: TypeAlias = tuple[PyTree, ...]
FusedStep: TypeAlias = Callable[[States, tuple[PyTree, ...]], tuple[States, tuple[PyTree, ...]]]
"""A step of any number of jobs: a state and a batch of each to a state and the metrics of each."""

_LONGEST_NAME = 40  # characters that a table has room for


@final
class FusedJob:
    """Several `Job`s that `jaxcross.run` trains as one, made by `jaxcross.fuse`. Each has its own
    results in the end.

    A job whose data end, that stops early, or whose data raise leaves between two steps, on all
    ranks the same; the others go on without it. What raises in a step or in an evaluation ends all
    of them.

    Attributes:
        name: The name in reports, made of the jobs' names.
        members: The jobs.
        errors: Errors of members that failed alone; complete after the run, the same on every rank.
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
        self._standings: list[JobStanding] = []

    def _attach(self, job: JobContext) -> None:  # noqa: ARG002
        """Has the members show from now on what becomes of each. Before the run.

        Raises:
            ValueError: A member has a policy for values that are not finite.
        """
        for member in self.members:
            if member.nonfinite != "ignore":
                raise ValueError(
                    f"Job `{member.name}` has `nonfinite={member.nonfinite!r}`, and the other jobs "
                    f"of the fused job `{self.name}` would skip or end with it. Set it before "
                    "`jaxcross.fuse`, which then leaves the job out."
                )
        self._standings = [member._fuse(self.name) for member in self.members]

    def _run(self, job: JobContext) -> States:
        """Trains all members to their ends. The function of a runner's job."""
        self._live = [
            _Member(member, standing, job._host)
            for member, standing in zip(self.members, self._standings, strict=True)
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
        """Trains until some members leave, and lets them go. Waits for all ranks. Returns the
        examples of a step.
        """
        live, examples = self._live, 0.0
        batches = SideBySide([member.source for member in live])
        states = job.state = tuple(member.job.state for member in live)
        stopped: set[str] = set()
        loop = job.batches(batches)
        job._host.planned_steps = self._planned_steps()
        for batch in loop:
            batches.delivered()
            if not examples:
                examples = sum(
                    count_examples(each, job._host.world.size)[0] or 0.0 for each in batch
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
        close_unread(loop)  # the thread of a loop that was left ends only then
        job._host.left_over = False  # members that stay take those batches in their next loop
        self._live = self._staying(job, batches, stopped)
        return examples

    def _planned_steps(self) -> int | None:
        """Returns the step at which the last member ends, None where that is not known."""
        counts = [number_of_batches(member._batches, member._steps) for member in self.members]
        return None if None in counts else max(count for count in counts if count is not None)

    def _staying(self, job: JobContext, batches: SideBySide, stopped: set[str]) -> list[_Member]:
        """Returns the members that go on, the same on every rank. Waits for all ranks."""
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
                member.standing.status, member.standing.error = "failed", error
            if member.name not in stopped and all(text is None for text in texts):
                staying.append(member)
            else:
                member.source.close()
                how = "stopped early" if member.name in stopped else "ended"
                member.standing.status = member.standing.status or how
        return staying

    def _finish(self, job: JobContext) -> None:
        """Gives each member its results, after the run, however that ended."""
        state = job.state
        if (
            self._live and isinstance(state, tuple) and len(state) == len(self._live)
        ):  # not one that ended by itself
            for member, own in zip(self._live, state, strict=True):
                member.standing.state, member.standing.step = own, job.step
        for member in self._live:
            member.source.close()
        self._live = []
        for step, values in job.history:
            for standing in self._standings:
                if standing.name in values:
                    standing.history.append((step, values[standing.name]))
        for standing in self._standings:
            if standing.status is None:
                standing.status, standing.error = job.status, job.error
            elif job.status == "ended":  # what was found after the run concerns all of them
                standing.error = standing.error or job.error
            if standing.status is not None:  # otherwise the run was refused before it began
                standing.done.set()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion(Sequence[Job | FusedJob]):
    """The jobs to give to `jaxcross.run`, some of them fused. `print` says which, and why. The same
    on every rank.

    Attributes:
        jobs: The jobs; a fused one is where the first of its members was.
        reasons: A line for each set of jobs of one step: why it is fused, or not.
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
    """One job of a fused one. Implements `jaxcross.jobs.evaluations.Host`.

    Attributes:
        job: The job.
        standing: Gets its results.
        source: Its batches.
        latest: Its latest state, for its evaluations.
    """

    def __init__(self, job: Job, standing: JobStanding, host: JobHost) -> None:
        self.job, self.standing, self._host = job, standing, host
        self.name, self.step = job.name, 0
        self.source = Source(job._batches, job._steps)
        self.latest = LatestState()
        self._evaluations = Evaluations(job.name, rank=host.world.rank, ranks=host.world.size)

    def begin(self, state: PyTree) -> None:
        """Sets the state to begin with. Waits for all ranks if the job evaluates."""
        self._set(state)
        for apply in self.job._settings:
            apply(self._evaluations)
        self._evaluations.begin(self)

    def advance(self, state: PyTree) -> None:
        """Sets the state after one more step."""
        self.step += 1
        self._set(state)

    def _set(self, state: PyTree) -> None:
        self.standing.state, self.standing.step = state, self.step
        self.latest.set(state, self.step)

    def stops_early(self, job: JobContext) -> bool:
        """Makes the evaluations that are due, and returns whether the job ends here. May wait for
        all ranks.
        """
        if not self._evaluations.any:
            return False
        running = job._host.evaluations  # what an evaluation calls is no step of the fused job
        running.running = True
        try:
            self._evaluations.run(self, lambda name, values: job.log({self.name: {name: values}}))
        finally:
            running.running = False
        return bool(self._evaluations.stop_reason)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        return self._host.run_on_all_ranks(f"{self.name}: {label}", work)

    def measure(self, kind: SpanKind, label: str = "") -> AbstractContextManager[None]:
        return self._host.measure(kind, f"{self.name}: {label}")
