"""Exchanges on the wire: JAX's named-axis collectives over MPI, through mpi4jax or mpi4py.

recognition      which equations are exchanges
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

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.wire.arena import Arena
    from jaxcross.wire.bytes import wire_bytes
    from jaxcross.wire.mpi4jax_calls import CommKey, JobComms, comm_key_of
    from jaxcross.wire.mpi_wire import MpiWire, WireLibrary
    from jaxcross.wire.rank_grid import RankGrid, axis_sizes, make_rank_grid
    from jaxcross.wire.recognition import LOCAL_PRIMITIVES, group_of, names_axis, recognise
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
