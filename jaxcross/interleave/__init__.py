"""Decides the next segment, the next exchange and when a step is committed. No MPI, JAX or threads.

interleaver     the state machine: events in, instructions out (`messages`); its proof is at its
                head, and its invariants at its end
shared_order    the state that's identical across ranks, and the order of all exchanges, which
                follows from it
local_state     the state that only this rank has
vote            the one control message between ranks, which decides for all of them: whether a
                step is committed or skipped, and which jobs stop, pause or join; `ballot_writer`
                writes this rank's vote
joint_start     holds back first steps until all jobs are ready for theirs
policy          the order of turns: `RoundRobin`, `Sequential`, `Weighted`
compute_queue   picks the next compute segment for the device
step_graph      the dependences between a program's segments; the interleaver needs nothing else
instrument      spans and notes for listeners
simulator       runs real interleavers on a virtual clock; jobs are scripts, and `contention` slows
                down overlapping lanes
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
