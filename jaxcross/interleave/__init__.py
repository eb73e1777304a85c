"""Decides the order of segments, exchanges and votes, without using MPI, JAX or threads.

interleaver     the state machine, which turns events into instructions; its docstring explains why
                it can't deadlock
messages        the interleaver's events and instructions
shared_order    the state that's identical across ranks, and the order of exchanges that follows
                from it
local_state     the rank-local state: calls in progress, and what job threads are waiting for
vote            the all-reduce in which the ranks decide together whether a step is committed or
                skipped, and which jobs stop, pause or join
ballot_writer   writes this rank's ballot for a vote
joint_start     holds back the jobs' first steps until all jobs are ready
policy          chooses the next job on a lane: `RoundRobin`, `Sequential`, `Weighted`
compute_queue   picks the next compute segment for the device
step_graph      the dependencies between a program's segments, which is all the interleaver needs
                to know about a program
instrument      spans and notes of a run, for listeners
simulator       runs the real interleavers of all ranks on a virtual clock, with scripts as jobs
contention      how much simulated computations and exchanges slow each other down
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.interleave import messages
    from jaxcross.interleave.compute_queue import DEFAULT_DEPTH, depth_of
    from jaxcross.interleave.contention import Contention
    from jaxcross.interleave.instrument import (
        ON_ALL_RANKS,
        PARAMETER_SERVER,
        Instrument,
        Listeners,
        Span,
        SpanKind,
        segment_name,
    )
    from jaxcross.interleave.interleaver import Interleaver
    from jaxcross.interleave.joint_start import Arrival
    from jaxcross.interleave.local_state import Wait
    from jaxcross.interleave.policy import (
        Policy,
        RoundRobin,
        Sequential,
        Start,
        Turns,
        Weighted,
        checked_depth,
        checked_start,
    )
    from jaxcross.interleave.simulator import Call, Script, Simulation, Think
    from jaxcross.interleave.step_graph import StepGraph
    from jaxcross.interleave.vote import JobRequest, Verdict
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
