"""How an exchange is executed: JAX's named-axis collectives on mpi4jax's calls.

`MpiWire` is what `World.wire` returns. `recognise` sees exchanges, `lower` makes them, `wire_bytes` counts them.
"""

from jaxcross.wire.bytes import issued_bytes, wire_bytes
from jaxcross.wire.messages import MAX_COUNT, Channel, split_counts
from jaxcross.wire.mpi_wire import MpiWire

__all__ = ["MAX_COUNT", "Channel", "MpiWire", "issued_bytes", "split_counts", "wire_bytes"]
