"""Exchanges on the wire: JAX's named-axis collectives over MPI, through mpi4jax or mpi4py.

recognise        which equations are exchanges
lower            turns a jaxpr with exchanges into one with messages; `coalesce` joins small ones
mpi_collectives  sums, gathers etc. built from messages; 16-bit floats are summed in float32
mpi_messages     the five calls, for any element type and any number of elements
primitive        messages through mpi4jax: calls inside one executable
host_program     messages through mpi4py, sent by the host between executables; `host_calls`, and
                 `arena` for their memory
mpi_wire         `Wire` of program/ir.py over MPI: `World.wire` returns it
rank_grid        axes over ranks: names, sizes, coordinates, groups
mpi4jax_calls    a program's own mpi4jax calls, and the communicators that a job has for them
bytes            how many bytes a rank receives in an exchange
"""

from jaxcross.wire.bytes import issued_bytes, wire_bytes
from jaxcross.wire.mpi_messages import MAX_COUNT, Channel, split_counts
from jaxcross.wire.mpi_wire import MpiWire

__all__ = ["MAX_COUNT", "Channel", "MpiWire", "issued_bytes", "split_counts", "wire_bytes"]
