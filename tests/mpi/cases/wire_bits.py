"""Every rank: are sums over both wires, in place and non-blocking, bit for bit those of mpi4jax?

For each way of summing, rank 0 prints the sizes for which the bits differ on some rank.
"""

import json

import jax
import numpy as np

import jaxcross
from jaxcross.wire import MpiWire

WORLD = jaxcross.initialize(wire="mpi4jax", stall_timeout_s=60)

from mpi4py import MPI  # noqa: E402

SIZES = (1, 7, 1000, 20_000, 300_000, 3_000_001)  # elements; MPI chooses its algorithm by size


def sums(x):
    """Yields each way of summing, with its result."""
    axes = {"batch": WORLD.size}
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "batch"), axis_env=list(axes.items()))(x)
    for over in ("mpi4jax", "mpi4py"):
        program = MpiWire(WORLD, over=over).lower(jaxpr, axes)
        yield (
            over,
            program.compile([x], name=over, host=jax.devices("cpu")[0], place=None)(
                jax.numpy.asarray(x)
            )[0],
        )
    comm, result = WORLD.communicator(WORLD.rank_grid(axes), ("batch",)), np.array(x)
    comm.Allreduce(MPI.IN_PLACE, result)
    yield "in place", result
    result = np.empty_like(x)
    comm.Iallreduce(x, result).Wait()
    yield "without blocking", result


def main():
    differ: dict[str, list[int]] = {}
    for size in SIZES:
        x = np.random.default_rng(WORLD.rank).normal(size=size).astype(np.float32)
        found = {way: np.asarray(result).tobytes() for way, result in sums(x)}
        for way, bits in found.items():
            everywhere = WORLD.control.allgather_text(str(bits == found["mpi4jax"]))
            differ.setdefault(way, []).extend([size] if "False" in everywhere else [])
    if WORLD.rank == 0:
        print(json.dumps({"vendor": WORLD.vendor, **differ}))


main()
