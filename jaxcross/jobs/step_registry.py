"""Registers the functions with exchanges that a job calls, and their step graphs.

Several questions come up whenever a job calls a function: do the ranks still have to agree on this
program, does its memory still have to be booked, is this call a step of the job? The answers must
be the same on every rank, although shapes, and with them the compiled programs, may change on a
single rank. So they depend only on what ranks have in common: branches, exchanges, names, and the
order of calls.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from jaxcross.interleave import StepGraph
from jaxcross.jobs.memory import JobMemory
from jaxcross.program import Compiled, Program


def step_graph_of(program: Program, function: str = "") -> StepGraph:
    """Returns the step graph of a program, which is all that the interleaver receives of it.

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
        text=program.exchange_signature(),
        function=function,
    )


def memory_of(compiled: Compiled) -> JobMemory:
    """Returns the memory of a job that runs these executables, according to XLA."""
    return JobMemory(
        peak_bytes=compiled.peak_live_bytes(),
        boundary_bytes=compiled.boundary_live_bytes(),
        exchange_temporary_bytes=compiled.exchange_temporary_bytes(),
    )


@dataclass(slots=True)
class ProgramRecord:
    """What a plan needs about a program.

    Attributes:
        graph: The program's step graph.
        memory: Its memory on this rank.
        steps: How many of the job's steps ran it.
    """

    graph: StepGraph
    memory: JobMemory
    steps: int = 0

    @classmethod
    def of(cls, compiled: Compiled, graph: StepGraph) -> Self:
        return cls(graph, memory_of(compiled))


class StepRegistry:
    """The functions with exchanges of one job on one rank. Used by the job's thread.

    Attributes:
        training: The name of the function whose calls are the job's steps, which is the first step
            that the job called; None before that.
    """

    __slots__ = ("_agreed", "_booked", "_graphs", "_numbers", "_programs", "_records", "training")

    def __init__(self) -> None:
        self.training: str | None = None
        self._graphs: dict[int, tuple[Compiled, StepGraph]] = {}
        self._programs: dict[int, Program] = {}
        self._agreed: dict[tuple[int, tuple[int, ...], str], object] = {}
        self._booked: set[tuple[object, ...]] = set()
        self._records: dict[int, ProgramRecord] = {}
        # The number of each step with exchanges, in the order of their first runs.
        self._numbers: dict[int, tuple[int, object]] = {}

    @property
    def any(self) -> bool:
        """Whether the job has called such a function."""
        return bool(self._graphs)

    def first_use(self, program: Program, step: object) -> bool:
        """Whether this is the job's first program of this step with these branches and exchanges.

        The same on every rank. Shapes don't count, because they may change on one rank alone, and
        then the other ranks wouldn't take part in an agreement.

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
        """Whether the job is about to run such a program for the first time.

        "Such" means a program of this name with these branches and exchanges. Like `first_use`, the
        answer is the same on every rank. It's False if the ranks haven't agreed on the program: a
        program that exchanges nothing, which ranks may run at different times, or one that calls
        mpi4jax itself.
        """
        if id(compiled) in self._graphs or not self._agreed:  # this runs on every call
            return False
        program = compiled.program
        agreed = (program.traced.choices, program.exchange_signature())
        key = (program.name, *agreed)
        if key in self._booked or not any(each[1:] == agreed for each in self._agreed):
            return False
        self._booked.add(key)
        return True

    def graph(self, compiled: Compiled, step: object) -> StepGraph:
        """Returns the step graph of a step's executables, with the step's number in the job.

        Steps with exchanges are numbered in the order of their first calls. The numbers are the
        same on every rank because ranks call such steps in the same order: each call is compared,
        including its number, before it's admitted.

        Args:
            compiled: The executables.
            step: Any object that identifies the step.
        """
        known = self._graphs.get(id(compiled))
        if known is None:
            program, function = compiled.program, ""
            if program.exchanges:
                # The step is kept alive, as above.
                number, _ = self._numbers.setdefault(id(step), (len(self._numbers) + 1, step))
                function = f"`{program.name}` (function {number} of the job)"
            # The pair keeps `compiled` alive, so its id stays unique.
            known = self._graphs[id(compiled)] = (compiled, step_graph_of(program, function))
        return known[1]

    def trains(self, compiled: Compiled) -> bool:
        """Whether a committed call is a step of the job; the first such call decides that."""
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
        """Returns the record of the program that most of the job's steps ran, or None.

        It's plain data.
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
        """Whether a call is a step of the job if all ranks commit it. Call `graph` first."""
        return self._graphs[id(compiled)][1].is_step and self.training in (
            None,
            compiled.program.name,
        )

    def forget(self) -> None:
        """Drops all programs and their constants. The training function's name is kept."""
        self._graphs, self._programs, self._agreed, self._numbers = {}, {}, {}, {}
