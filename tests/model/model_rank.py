"""One rank as a value: a real interleaver, plus the events that the driver's threads have yet to
post.

The model has the same threads as the driver, but each of them is just a queue of events. In a move,
one thread posts its next event: the method `moves` lists the possible moves, and `take` makes one
of them. The model has no notion of time, so any thread may be arbitrarily slow. Other ranks
influence this one only through the results of the slots, which are passed to `leave`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.simulator import Add, Await, Batch, Call, Fail, Prepare, Sync, Think
from jaxcross.interleave.vote import JobRequest, Verdict
from tests.model.model_case import Arrival, Case, Script
from tests.model.model_spec import Spec
from tests.model.model_state import clone, name, values_of

Move = tuple[Any, ...]


@dataclass(slots=True)
class _Thread:
    """A job's thread.

    Attributes:
        at: Index of the script's next action.
        does: `waits` means that it waits for the answer to its last action, `unwinds` that it was
            instructed to raise.
    """

    at: int = 0
    does: str = "absent"  # runs, waits, unwinds, over


class RankModel:
    """One rank's state. Equal states have equal `name()`s."""

    __slots__ = (
        "arrival",
        "broken",
        "case",
        "device",
        "excusing",
        "feeds",
        "gathers",
        "heard",
        "interleaver",
        "joining",
        "lane",
        "late",
        "outside",
        "patient",
        "rest",
        "scripts",
        "spec",
        "threads",
    )

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.scripts = dict(enumerate(case.scripts[rank]))
        jobs = len(self.scripts)
        self.interleaver = case.make(jobs, case.policy, case.depth)
        self.interleaver.shared.opening = case.opening
        self.spec = Spec(jobs, together=case.strictly_together)
        self.threads = {job: _Thread() for job in range(jobs)}
        self.joining: dict[str, Script] = {}  # jobs added on this rank that have yet to join
        self.heard: deque[str] = deque()  # names of submitted jobs that this rank has yet to add
        self.gathers = False  # the exchange lane has yet to gather announcements
        self.lane: deque[m.Event] = deque()  # events that the compute lane is about to post
        self.device: deque[m.Event] = deque()  # events of the thread that waits for the device
        self.feeds: dict[tuple[int, int], deque[m.Event]] = {}
        # By segment that has no outputs: how its failure shows.
        self.broken: dict[tuple[int, int, int], str] = {}
        self.rest: deque[m.Event] = deque()  # events that the exchange lane is about to post
        self.patient = False
        self.outside = deque(case.outside[rank] if case.outside else ())
        self.late: m.RunExchange | None = None  # an exchange that will find its inputs broken
        self.arrival: Arrival | None = None
        # Jobs whose start the driver's clock is about to excuse.
        self.excusing = set(case.slow if case.together else ())
        self._post(m.RunStarted(case.together))

    def copy(self) -> RankModel:
        """Returns a copy whose moves don't affect the original."""
        return clone(self)

    def name(self) -> bytes:
        """Returns a digest that is the same for equal states; see `model_state.name`."""
        scripts = [(job, id(script)) for job, script in self.scripts.items()]
        joining = [(job, id(script)) for job, script in self.joining.items()]
        return name((scripts, joining, list(map(id, self.outside)), *_HELD(self)))

    @property
    def through(self) -> bool:
        """Whether the exchange lane has been instructed to finish, because every job has ended."""
        return self.arrival is not None and self.arrival.slot == ("done",)

    def moves(self) -> list[Move]:
        """Returns the moves that may happen next. Each will happen eventually, except for a
        `person`'s request.
        """
        found: list[Move] = []
        for job, thread in self.threads.items():
            if thread.does == "runs":
                found.append(("thread", job))
            elif thread.does == "unwinds":
                found += [("returns", job), ("raises", job)]
        if self.lane:
            found.append(("lane",))
        if self.device and not any(_same(self.device[0], ahead) for ahead in list(self.lane)[1:]):
            # A segment may complete before the lane has posted its dispatch, but not before it was
            # dispatched.
            found.append(("device",))
        if self.rest:
            found.append(("rest",))
        if self.patient:
            found.append(("patience",))
        if self.late is not None:
            found.append(("late",))
        found += [("excuse", job) for job in sorted(self.excusing)]
        if self.heard:
            found.append(("heard",))
        elif self.gathers:
            found.append(("gather",))
        found += [("feed", *key) for key, feed in self.feeds.items() if feed]
        if self.outside:
            match self.outside[0]:
                case m.StopRequested() | m.JobRequested(_, _, JobRequest.STOP | JobRequest.PAUSE):
                    found.append(("person",))
                case _:
                    found.append(("outside",))
        return found

    def take(self, move: Move) -> None:
        """Lets one thread post its next event.

        Raises:
            InternalError: A rule is broken.
        """
        match move:
            case ("thread", job):
                self._act(job)
            case ("returns", job):
                self.threads[job].does = "over"
                self._post(m.JobReturned(job))
            case ("raises", job):
                self.threads[job].does = "over"
                self._post(m.JobRaised(job, "raised the error it received"))
            case ("lane",):
                self._post(self.lane.popleft())
            case ("device",):
                self._post(self.device.popleft())
            case ("rest",):
                self._post(self.rest.popleft())
            case ("patience",):
                self.patient = False
                self._post(m.BackoffElapsed())
            case ("late",):
                x, self.late = self.late, None
                assert x is not None
                self._post(m.SegmentFailed(x.job, x.call, x.segment, "inputs", "failed"))
                self._arrive(self._exchange(x), True)
            case ("feed", job, stream):
                self._post(self.feeds[job, stream].popleft())
            case ("excuse", job):
                self.excusing.discard(job)
                self._post(m.StartExcused(job))
            case ("heard",):
                wanted = self.heard.popleft()
                self._add(wanted, dict(self.case.submitted)[wanted])
            case ("gather",):
                self.gathers = False
                self._arrive(("gather",), self.interleaver.announcement())
            case ("person",) | ("outside",):
                what = self.outside.popleft()
                if isinstance(what, Add):
                    self._add(what.name, what.script)
                elif not self.interleaver.finished:
                    self._post(what)
            case _:
                raise InternalError(f"a model has no move {move!r}")

    def leave(self, result: Any) -> None:
        """Leaves the current slot, which all ranks have completed with this result of `meet`."""
        assert self.arrival is not None
        slot, zero, self.arrival = self.arrival.slot, self.arrival.said, None
        match slot:
            case ("vote",):
                ballot, failed, infinite = result
                self.spec.voted(failed, infinite)
                self._post(m.VoteDone(Verdict(np.frombuffer(ballot, np.int64))))
            case ("exchange", job, _, segment, _):
                found = None if zero else self._step(job).fails.get(segment)
                done = m.ExchangeDone(job, segment, found != "skip")
                if found in ("raise", "eject"):
                    self.rest.append(done)
                    number = self.interleaver._jobs[job].calls
                    self._post(
                        m.SegmentFailed(
                            job, number, segment, "values", "not finite", ejects=found == "eject"
                        )
                    )
                else:
                    self._post(done)
            case ("compare", job):
                self._post(m.TextsCompared(job, result))
            case ("sync", job):
                self._post(m.SyncDone(job))
            case ("gather",):
                self._post(m.AnnouncementsGathered(result))
            case _:
                raise InternalError(f"nobody leaves {slot!r}")

    def check_end(self) -> None:
        """Raises InternalError if a thread is still waiting although nothing can move any more."""
        left = [
            job for job, thread in self.threads.items() if thread.does not in ("over", "absent")
        ]
        if left or self.spec.finished.keys() != self.threads.keys():
            raise InternalError(
                f"every job has ended, but the threads of jobs {left} wait; ends are "
                f"{self.spec.finished}"
            )

    def _add(self, wanted: str, script: Any) -> None:
        if not self.interleaver.finished:  # otherwise the job is added too late
            self.joining[wanted] = script
            self._post(m.JobAdded(wanted))

    def _act(self, job: int) -> None:
        thread, script = self.threads[job], self.scripts[job]
        while thread.at < len(script):
            action = script[thread.at]
            thread.at += 1
            thread.does = "waits"
            match action:
                case Think():
                    continue
                case Await(other) if other in self.spec.finished:
                    continue
                case Await():
                    return self.excusing.update({job} if self.case.together else ())
                case Prepare(_, stream, count, last):
                    begun = [n for number, n in self.feeds if number == job]
                    feed = self.feeds.setdefault((job, stream), deque())
                    feed.append(m.BatchPrepared(job, stream, count))
                    if last:
                        feed.append(m.StreamEnded(job, stream, count))
                    if stream not in begun:
                        read = {
                            later.stream
                            for later in script[thread.at :]
                            if isinstance(later, Batch)
                        }
                        self._post(m.StreamBegun(job, tuple(n for n in begun if n in read)))
                        # The job may drop an earlier stream here, so other threads get a chance to
                        # move before its next action.
                        if begun:
                            thread.does = "runs"
                            return None
                    continue
                case Call(graph):
                    return self._post(m.StepCalled(job, graph))
                case Batch(stream, index):
                    return self._post(m.BatchWanted(job, stream, index))
                case Sync(label):
                    return self._post(m.SyncWanted(job, label))
                case Add(wanted, added):
                    thread.does = "runs"
                    return self._add(wanted, added)
                case Fail(text):
                    thread.does = "over"
                    return self._post(m.JobRaised(job, text))
        thread.does = "over"
        return self._post(m.JobReturned(job))

    def _post(self, event: m.Event) -> None:
        self.spec.happened(event)
        instructions = self.interleaver.handle(event)
        self.interleaver.check()
        # Backoff levels and the counter that detects hangs don't affect what may happen next.
        # Keeping them would only multiply the states.
        self.interleaver._idle_votes = self.interleaver._moves = 0
        for instruction in instructions:
            self.spec.record(instruction)
            self._follow(instruction)

    def _follow(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.StartJob(job):
                self.threads[job].does = "runs"
            case m.StepReturned(job):
                self._answer(job, Call)
            case m.SyncReturned(job):
                self._answer(job, Sync)
            case m.BatchGranted(job, more):
                wanted = self._answer(job, Batch)
                if more:
                    self.spec.granted(job, wanted.stream, wanted.index)
                else:
                    self.threads[job].at = len(self.scripts[job])
            case m.Raised(job):
                self._answer(job, Call | Sync | Batch)
                self.threads[job].does = "unwinds"
            case m.Dispatch():
                self._dispatch(instruction)
            case m.RunExchange(job, call, _, segment, zero):
                needs = self.spec.call(job).graph.needs[segment]
                if not zero and any((job, call, need) in self.broken for need in needs):
                    self.late = instruction
                else:
                    self._arrive(self._exchange(instruction), zero)
            case m.CastVote(ballot):
                self._arrive(
                    ("vote",), (ballot.tobytes(), frozenset(self.spec.failed), self.spec.infinite)
                )
            case m.CompareTexts(job, text):
                call = self.spec.calls.get(job)
                unknown = call.number if call is not None and not call.committed else 0
                if any(each.job == job and each.call != unknown for each in self.device):
                    raise InternalError(
                        f"{instruction}: results that were given, or committed, may still fail"
                    )
                self._arrive(("compare", job), text)
            case m.RunSync(job):
                self._arrive(("sync", job))
            case m.GatherAnnouncements():
                self.gathers = True
            case m.TextDelivered(text):
                self.heard.append(text)
            case m.JobJoined(job, wanted):
                self.scripts[job], self.threads[job] = self.joining.pop(wanted), _Thread()
            case m.Backoff():
                self.patient = True
            case m.Finish():
                self._arrive(("done",))
            case m.JobFinished(job):
                for n, thread in self.threads.items():
                    awaits = thread.does == "waits" and self.scripts[n][thread.at - 1] == Await(job)
                    thread.does = "runs" if awaits else thread.does
            case m.JobPaused() | m.SkipStep() | m.JobAtStart():
                pass
            case _:
                raise InternalError(f"a model cannot follow {instruction!r}")

    def _answer(self, job: int, kind: Any) -> Any:
        thread = self.threads[job]
        action = self.scripts[job][thread.at - 1] if thread.at else None
        if thread.does != "waits" or not isinstance(action, kind):
            raise InternalError(
                f"job {job} is answered, but its thread {thread.does} after {action!r}"
            )
        thread.does = "runs"
        return action

    def _dispatch(self, d: m.Dispatch) -> None:
        key = (d.job, d.call, d.segment)
        action = self._step(d.job)
        # A segment that needs a failed segment fails the same way.
        ways = [self.broken.get((d.job, d.call, need)) for need in action.graph.needs[d.segment]]
        how = action.fails.get(d.segment) or next(filter(None, ways), None)
        if how is not None:
            self.broken[key] = how
        if how == "dispatch":
            self.lane.append(m.SegmentFailed(*key, "at dispatch", "failed"))
            return
        self.lane.append(m.SegmentDispatched(*key))
        self.device.append(
            m.SegmentFailed(*key, "on the device", "failed") if how else m.SegmentCompleted(*key)
        )

    def _step(self, job: int) -> Call:
        action = self.scripts[job][self.threads[job].at - 1]
        assert isinstance(action, Call)
        return action

    def _exchange(self, run: m.RunExchange) -> tuple[Any, ...]:
        return "exchange", run.job, run.step, run.segment, self.spec.call(run.job).graph.function

    def _arrive(self, slot: tuple[Any, ...], said: Any = None) -> None:
        if self.arrival is not None or self.gathers:
            raise InternalError(
                f"the exchange lane was given {slot} while it is at {self.arrival or 'a gathering'}"
            )
        self.arrival = Arrival(slot, said, self.spec.shared)


_HELD = values_of(
    [slot for slot in RankModel.__slots__ if slot not in ("case", "scripts", "joining", "outside")]
)


def _same(done: m.Event, dispatched: m.Event) -> bool:
    match done, dispatched:
        case m.SegmentCompleted(job, call, segment) | m.SegmentFailed(
            job, call, segment
        ), m.SegmentDispatched():
            return (job, call, segment) == (dispatched.job, dispatched.call, dispatched.segment)
    return False
