"""Exchanges on the wire: JAX's named-axis collectives over MPI, through mpi4jax or mpi4py.

recognition      finds the equations of a jaxpr that are exchanges
lower            turns a jaxpr with exchanges into one with messages
coalesce         merges small sums into a single message
mpi_collectives  JAX's collectives, built from messages; sums narrow floats in float32
mpi_messages     the five MPI calls, for any element type and any length
primitive        sends messages through mpi4jax, as calls inside an executable
host_program     sends messages through mpi4py, from the host and between executables
host_calls       the host's messages, as equations of a jaxpr
arena            memory for the host to receive into
mpi_wire         implements `Wire` of program/ir.py over MPI; `World.wire` returns it
rank_grid        arranges the ranks in a grid with named axes
mpi4jax_calls    a program's own mpi4jax calls, and a job's communicators for them
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
