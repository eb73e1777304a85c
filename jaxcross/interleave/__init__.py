"""Pure decisions: whose segment is next, which exchange follows, when a step is committed. No MPI, JAX or threads.

interleaver     the state machine: events in, instructions out (`messages`); its proof is at its head
shared_state    what every rank shares, and the order of exchanges that follows from it
local_state     what this rank has for itself
vote            the one control message between ranks; `ballot_writer` writes this rank's, `pending_jobs` those who join
policy          whose turn it is: `RoundRobin`, `Sequential`, `Weighted`
compute_queue   which compute segment the device gets next
step_graph      all that the interleaver knows of a program
invariants      what always holds between two events
instrument      the spans that listeners get
simulator       real interleavers on a virtual clock
"""
