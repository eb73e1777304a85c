"""Keeps track of the functions with exchanges that a job calls, and of their step graphs.

Whenever a job calls such a function, we have to answer three questions. Have the ranks already
agreed on this program? Has its memory been booked? Does the call count as a step of the job? Since
agreements and bookings are collective, ranks would deadlock if they came up with different answers.
It's tempting to just compare the compiled program with earlier ones, but if the last batch is
smaller on a single rank, only that rank compiles another program. We therefore only look at things
that are the same on every rank: names, branches, exchanges, and the order of calls.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from jaxcross.interleave import StepGraph
from jaxcross.jobs.memory import JobMemory
from jaxcross.program import Compiled, Program


def step_graph_of(program: Program, function: str = "") -> StepGraph:
    """Returns a program's step graph, which is all that the interleaver knows about the program.

    Args:
        program: The program.
        function: See `StepGraph`.
    """
    return StepGraph(
        kinds=tuple(s.kind for s in program.segments),
        needs=program.order.needs,
        after_commit=program.order.after_commit,
        nbytes=tuple(s.nbytes for s in program.segments),
        carried=program.order.carried,
        local_step=program.local_step,
        signature=program.exchange_hash(),
        text=program.exchange_signature(sources=True),
        function=function,
    )


def memory_of(compiled: Compiled) -> JobMemory:
    """Returns how much memory a job needs to run these executables, according to XLA."""
    return JobMemory(
        peak_bytes=compiled.peak_live_bytes(),
        boundary_bytes=compiled.boundary_live_bytes(),
        exchange_temporary_bytes=compiled.exchange_temporary_bytes(),
    )


@dataclass(slots=True)
class ProgramRecord:
    """What the planner needs to know about a program.

    Attributes:
        graph: The program's step graph.
        memory: The memory that the program needs on this rank.
        steps: How many of the job's steps have run this program.
    """

    graph: StepGraph
    memory: JobMemory
    steps: int = 0

    @classmethod
    def of(cls, compiled: Compiled, graph: StepGraph) -> Self:
        return cls(graph, memory_of(compiled))


class StepRegistry:
    """The functions with exchanges that one job calls on one rank. Used by the job's thread.

    Attributes:
        training: The name of the function whose calls count as the job's steps, i.e. the first
            function with exchanges that the job called; None before that.
    """

    __slots__ = ("_agreed", "_booked", "_graphs", "_numbers", "_programs", "_records", "training")

    def __init__(self) -> None:
        self.training: str | None = None
        self._graphs: dict[int, tuple[Compiled, StepGraph]] = {}
        self._programs: dict[int, Program] = {}
        self._agreed: dict[tuple[int, tuple[int, ...], str], object] = {}
        self._booked: set[tuple[object, ...]] = set()
        self._records: dict[int, ProgramRecord] = {}
        # Numbers the functions with exchanges, in the order of their first calls.
        self._numbers: dict[int, tuple[int, object]] = {}

    @property
    def any(self) -> bool:
        """Whether the job has called a function with exchanges."""
        return bool(self._graphs)

    def first_use(self, program: Program, step: object) -> bool:
        """Whether this is the job's first program of this step with these branches and exchanges.

        Before a job runs a new program, all ranks check that their exchanges match. This only works
        if they agree on which programs are new; otherwise, some of them would wait for a check that
        the others skip.

        For this purpose, programs that differ only in their shapes are the same. The last batch,
        for example, may be smaller on a single rank, which then has to compile another program. If
        that counted as new, the rank would wait for the others forever.

        Args:
            program: The program.
            step: Any object that identifies the step.
        """
        if id(program) in self._programs:
            return False
        self._programs[id(program)] = program  # kept alive so that its id stays unique
        agreed = (id(step), program.traced.choices, program.exchange_signature())
        new = agreed not in self._agreed
        self._agreed[agreed] = step  # kept alive for the same reason
        return new

    def first_run(self, compiled: Compiled) -> bool:
        """Whether the job runs a program with this name and these exchanges for the first time.

        If so, its memory has to be booked, which is collective. As in `first_use`, programs are
        therefore considered equal if they have the same name, branches and exchanges, which makes
        the result the same on every rank. The result is always False for programs that the ranks
        haven't agreed on, because there's no common point in time for a booking. That's the case
        for programs without exchanges, which each rank can run at a different time, and for
        programs that call mpi4jax themselves.
        """
        if id(compiled) in self._graphs or not self._agreed:  # the fast path of every call
            return False
        program = compiled.program
        agreed = (program.traced.choices, program.exchange_signature())
        key = (program.name, *agreed)
        if key in self._booked or not any(each[1:] == agreed for each in self._agreed):
            return False
        self._booked.add(key)
        return True

    def graph(self, compiled: Compiled, step: object) -> StepGraph:
        """Returns the step graph for a step's executables, including the step's number in the job.

        A job may use several functions with exchanges, e.g. for training and for evaluation, and
        their names needn't be unique. To tell them apart, we number them in the order of their
        first calls. As long as all ranks call their functions in the same order, they end up with
        the same numbers. If they don't, the vote will notice, because ranks compare names and
        numbers before a call is admitted.

        Args:
            compiled: The executables.
            step: Any object that identifies the step.
        """
        known = self._graphs.get(id(compiled))
        if known is None:
            program = compiled.program
            function = ""
            if program.exchanges:
                # Keep the step alive, so that its id stays unique.
                number, _ = self._numbers.setdefault(id(step), (len(self._numbers) + 1, step))
                function = f"`{program.name}` (function {number} of the job)"
            # Also keeps `compiled` alive, for the same reason.
            known = self._graphs[id(compiled)] = (compiled, step_graph_of(program, function))
        return known[1]

    def trains(self, compiled: Compiled) -> bool:
        """Whether a committed call counts as a step of the job. Also counts it for `most_run`."""
        leads = self.leads(compiled)
        if leads and self.training is None:
            self.training = compiled.program.name
        if leads:
            record = self._records.get(id(compiled))
            if record is None:
                record = self._records[id(compiled)] = ProgramRecord.of(
                    compiled, self._graphs[id(compiled)][1]
                )
            record.steps += 1
        return leads

    def most_run(self) -> dict[str, Any] | None:
        """Returns the record of the program that ran in most of the job's steps, or None.

        It consists of plain data that can be written as JSON.
        """
        most = max(self._records.values(), key=lambda record: record.steps, default=None)
        if most is None:
            return None
        return {
            "graph": most.graph.as_data(),
            "steps": most.steps,
            "memory": asdict(most.memory),
        }

    def leads(self, compiled: Compiled) -> bool:
        """Whether a call counts as a step of the job once it's committed. Call `graph` first."""
        return self._graphs[id(compiled)][1].is_step and self.training in (
            None,
            compiled.program.name,
        )

    def forget(self) -> None:
        """Drops all programs to free their constants. Keeps the training function's name."""
        self._graphs = {}
        self._programs = {}
        self._agreed = {}
        self._numbers = {}
