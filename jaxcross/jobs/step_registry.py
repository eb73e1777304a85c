"""The functions with exchanges that a job calls, and what the interleaver knows of each."""

from __future__ import annotations

from jaxcross.interleave.step_graph import StepGraph
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program


def step_graph_of(program: Program) -> StepGraph:
    """What the interleaver knows of a program."""
    return StepGraph(
        kinds=tuple(s.kind for s in program.segments),
        needs=program.needs(),
        after_commit=program.after_commit,
        nbytes=tuple(s.nbytes for s in program.segments),
        local_step=program.local_step,
        signature=program.exchange_hash(),
        text=program.exchange_signature(),
    )


class Calls:
    """Of one job, on one rank; used by the job's thread.

    Attributes:
        training: Name of the function whose calls are the job's steps: the first step that it called. None before that.
    """

    __slots__ = ("_agreed", "_graphs", "_programs", "training")

    def __init__(self) -> None:
        self.training: str | None = None
        self._graphs: dict[int, tuple[Compiled, StepGraph]] = {}
        self._programs: dict[int, Program] = {}
        self._agreed: dict[tuple[int, tuple[int, ...], str], object] = {}

    @property
    def any(self) -> bool:
        """Whether the job has called one."""
        return bool(self._graphs)

    def first_use(self, program: Program, step: object) -> bool:
        """Whether the job has asked about no program before that is of this step (whatever stands for it), takes these
        branches and exchanges as this one does. The same on every rank: shapes may change on one alone, and the others
        would not come to agree on what they know.
        """
        if id(program) in self._programs:
            return False
        self._programs[id(program)] = program  # keeps it alive, hence its id unique
        agreed = (id(step), program.traced.choices, program.exchange_signature())
        new = agreed not in self._agreed
        self._agreed[agreed] = step  # kept alive likewise
        return new

    def graph(self, compiled: Compiled) -> StepGraph:
        """What the interleaver knows of it."""
        known = self._graphs.get(id(compiled))
        if known is None:
            # The pair keeps `compiled` alive, hence its id unique.
            known = self._graphs[id(compiled)] = (compiled, step_graph_of(compiled.program))
        return known[1]

    def trains(self, compiled: Compiled) -> bool:
        """Whether a call of it, which came through, is a step of the job."""
        leads = self.leads(compiled)
        if leads and self.training is None:
            self.training = compiled.program.name
        return leads

    def leads(self, compiled: Compiled) -> bool:
        """Whether a call of it is a step of the job, if it comes through."""
        return self.graph(compiled).is_step and self.training in (None, compiled.program.name)

    def forget(self) -> None:
        """Lets go of them, and of the constants that they hold; what the steps are called stays known."""
        self._graphs, self._programs, self._agreed = {}, {}, {}
