"""Compares every collective, element type and set of axes over MPI with XLA's own collectives."""

import json
import os

size = int(os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))
FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={size} {FLAGS}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as Spec  # noqa: E402
from mpi4py import MPI  # noqa: E402

from jaxcross.wire import MpiWire  # noqa: E402
from jaxcross.world import initialize  # noqa: E402

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int8", "uint8", "int32", "int64", "uint32")


def rows(n, axes, dtypes):
    """Name -> function of one rank's array.

    `n` is the number of ranks over `axes`, and the array has shape (2 n, 3).
    """
    ring = [(i, (i + 1) % n) for i in range(n)]
    table = {
        "psum": lambda x: lax.psum(x, axes),
        "pmean": lambda x: lax.pmean(x, axes) * n,
        "pmax": lambda x: lax.pmax(x, axes),
        "pmin": lambda x: lax.pmin(x, axes),
        "gather": lambda x: lax.all_gather(x, axes),
        "gather1": lambda x: lax.all_gather(x, axes, axis=1),
        "gather_tiled": lambda x: lax.all_gather(x, axes, axis=1, tiled=True),
        "scatter": lambda x: lax.psum_scatter(x[:n], axes),
        "scatter_tiled": lambda x: lax.psum_scatter(x.T, axes, scatter_dimension=1, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x[:n], axes, 0, 1),
        "all_to_all_tiled": lambda x: lax.all_to_all(x, axes, 0, 1, tiled=True),
        "all_to_all_same": lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
        "ring": lambda x: lax.ppermute(x, axes, ring),
        "partial": lambda x: lax.ppermute(x, axes, ring[:-1]),
        "swap": lambda x: lax.ppermute(x, axes, [(0, n - 1), (n - 1, 0)] if n > 1 else [(0, 0)]),
        "scalar": lambda x: lax.psum(x[0, 0], axes),
        "twice": lambda x: lax.psum(lax.psum(x, axes).astype(x.dtype) // n, axes),
        "index": lambda x: x + lax.axis_index(axes).astype(x.dtype),
    }
    skipped = {
        "bool": {"pmean", "scatter", "scatter_tiled", "twice", "index"},
        "complex64": {"pmax", "pmin", "twice"},
    }
    for dtype in dtypes:
        for name, function in table.items():
            if name not in skipped.get(dtype, ()):
                yield f"{name} {dtype} {axes}", dtype, function


def make(dtypes, n, rank):
    rng = np.random.default_rng(rank)
    return {
        d: rng.integers(0, 2 if d == "bool" else 5, (2 * n, 3)).astype(jnp.dtype(d)) for d in dtypes
    }


def oracle(function, sizes, stacked):
    devices = np.array(jax.devices()[:size]).reshape(tuple(sizes.values()))
    spec = Spec(tuple(sizes))
    one = jax.shard_map(
        lambda xs: jax.tree.map(lambda y: y[None], function(jax.tree.map(lambda x: x[0], xs))),
        mesh=Mesh(devices, tuple(sizes)),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(one)(stacked))


def compare(world, sizes, axes, dtypes, max_count):
    n = int(np.prod([sizes[a] for a in ((axes,) if isinstance(axes, str) else axes)]))
    table = list(rows(n, axes, dtypes))
    function = lambda xs: {name: f(xs[d]) for name, d, f in table}  # noqa: E731
    inputs = [make(dtypes, n, r) for r in range(size)]
    # Only one rank compiles the oracle, because four ranks share few cores.
    expected = None
    if world.rank == 0:
        expected = oracle(function, sizes, jax.tree.map(lambda *xs: np.stack(xs), *inputs))
    expected = MPI.COMM_WORLD.bcast(expected)
    mine = inputs[world.rank]
    flat, tree = jax.tree.flatten(mine)
    jaxpr, shape = jax.make_jaxpr(
        lambda *xs: function(jax.tree.unflatten(tree, xs)),
        axis_env=list(sizes.items()),
        return_shape=True,
    )(*flat)
    lowered = MpiWire(world, max_count=max_count).lower(jaxpr, sizes)
    run = lowered.compile(flat, name="table", host=jax.devices("cpu")[0], place=None)
    got = jax.tree.unflatten(jax.tree.structure(shape), run(*flat))
    wrong = []
    for name, value in got.items():
        want = expected[name][world.rank]
        if (
            value.dtype != want.dtype
            or value.shape != want.shape
            or not np.array_equal(np.asarray(value), want)
        ):
            wrong.append(
                f"rank {world.rank} {sizes} max_count={max_count}: {name}\n{value}\ninstead "
                f"of\n{want}"
            )
    return len(got), wrong


def main():
    world = initialize(stall_timeout_s=60)
    jax.config.update("jax_enable_x64", True)
    all_types = (*FLOATS, *INTEGERS, "bool", "complex64")
    plan = [
        ({"a": size}, "a", all_types, 2**31 - 1),
        ({"a": size}, "a", ("float32", "bfloat16", "bool"), 4),
    ]
    if size == 4:
        square = {"a": 2, "b": 2}
        few = ("float32", "bfloat16", "int32")
        plan += [(square, axes, few, 2**31 - 1) for axes in ("a", "b", ("a", "b"), ("b", "a"))]
    count, wrong = 0, []
    for step in plan:
        done, bad = compare(world, *step)
        count, wrong = count + done, wrong + bad
    everywhere = [
        line
        for text in world.control.allgather_text(json.dumps(wrong))
        for line in json.loads(text)
    ]
    if world.rank == 0:
        print(json.dumps({"rows": count, "wrong": everywhere}))


if __name__ == "__main__":
    main()
