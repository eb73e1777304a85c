"""Pure decisions: the next segment, the next exchange, and when a step is committed. No MPI, JAX or
threads.

interleaver     the state machine: events in, instructions out (`messages`); its proof is at its
                head
shared_state    the state that every rank shares, and the one order of all exchanges that follows
                from it
local_state     the state that only this rank has
vote            the one control message between ranks; `ballot_writer` writes this rank's;
                `pending_jobs` for new jobs
joint_start     holds back first steps until all jobs have come to theirs
policy          the order of turns: `RoundRobin`, `Sequential`, `Weighted`
compute_queue   the next compute segment for the device
step_graph      the dependences of a program, which is all that the interleaver knows of it
invariants      conditions that hold between any two events
instrument      spans and notes for listeners
simulator       real interleavers on a virtual clock, by `script`s of jobs; `contention` of their
                lanes
"""
