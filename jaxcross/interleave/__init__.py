"""Decides the next segment, the next exchange and when a step is committed. No MPI, JAX or threads.

interleaver     the state machine: events in, instructions out (`messages`); its proof is at its
                head, and its invariants at its end
shared_order    the state that's identical across ranks, and the order of all exchanges, which
                follows from it
local_state     the state that only this rank has
vote            the one control message between ranks; `ballot_writer` writes this rank's vote,
                also about jobs that were added during the run
joint_start     holds back first steps until all jobs are ready for theirs
policy          the order of turns: `RoundRobin`, `Sequential`, `Weighted`
compute_queue   picks the next compute segment for the device
step_graph      the dependences between a program's segments; the interleaver needs nothing else
instrument      spans and notes for listeners
simulator       runs real interleavers on a virtual clock; jobs are scripts, and `contention` slows
                down overlapping lanes
"""
