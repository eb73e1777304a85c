"""Exchanges on the wire: JAX's named-axis collectives over MPI, by mpi4jax or by mpi4py.

recognise     which equations are exchanges
lower         a jaxpr with exchanges -> one with messages; `coalesce` joins small ones
collectives   sums, gathers and the like made of messages; 16-bit floats are summed in float32
messages      the five calls for any element type and any number of elements
primitive     messages by mpi4jax: calls inside one executable
host_program  messages by mpi4py: the host makes them between executables; `host_calls`, and `arena`
              for their memory
mpi_wire      `Wire` of program/ir.py over MPI: `World.wire` returns it
rank_grid     axes over ranks: names, sizes, coordinates, groups
job_comms     a job's own communicators in place of those that its mpi4jax calls name; `calls`
bytes         how many bytes an exchange brings to a rank
offsets       pieces of a vector at constant places, made arguments
"""

from jaxcross.wire.bytes import issued_bytes, wire_bytes
from jaxcross.wire.messages import MAX_COUNT, Channel, split_counts
from jaxcross.wire.mpi_wire import MpiWire

__all__ = ["MAX_COUNT", "Channel", "MpiWire", "issued_bytes", "split_counts", "wire_bytes"]
