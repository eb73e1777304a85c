"""A data- and tensor-parallel network written for a device mesh, run on devices and over MPI.

    python examples/shard_map_mlp.py --devices 8 --save devices.npz
    mpirun -n 8 python examples/shard_map_mlp.py --save ranks.npz --compare devices.npz

The training step is a plain `jax.shard_map` and uses nothing from jaxcross. JAX itself inserts the
exchanges of the gradients. With `--devices`, it runs in one process with many devices. Under
`mpirun`, each rank is one position of the mesh; since a rank doesn't have the other ranks' devices,
the mesh is an abstract one. Both ways give the same parameters, up to rounding.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcross

FEATURES, HIDDEN, CLASSES, LAYERS = 32, 64, 8, 2
LAYER = {"up": P(None, "tensor"), "bias": P("tensor"), "down": P("tensor", None), "scale": P()}
PARAMS = {"layers": [LAYER] * LAYERS, "head": P()}
STATE = {"params": PARAMS, "momentum": PARAMS}
BATCH = {"x": P("data"), "label": P("data")}


def make_train_step(mesh, rate=0.05, decay=0.9):
    """Returns a step for any mesh with the axes `data` and `tensor`. It doesn't use jaxcross."""

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params["layers"]:
            y = x * layer["scale"] * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            y = jax.nn.gelu(y @ layer["up"] + layer["bias"])
            x = x + lax.psum(y @ layer["down"], "tensor")
        own = jnp.take_along_axis(
            jax.nn.log_softmax(x @ params["head"]), batch["label"][:, None], -1
        )
        return lax.pmean(-jnp.mean(own), "data")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(STATE, BATCH), out_specs=(STATE, P()))
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: decay * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - rate * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    return train_step


def first_state(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    layers = [
        {
            "up": normal(FEATURES, HIDDEN),
            "bias": np.zeros(HIDDEN, np.float32),
            "down": normal(HIDDEN, FEATURES),
            "scale": np.ones(FEATURES, np.float32),
        }
        for _ in range(LAYERS)
    ]
    params = {"layers": layers, "head": normal(FEATURES, CLASSES)}
    return {"params": params, "momentum": jax.tree.map(np.zeros_like, params)}


def batches(steps, rows):
    """Yields global batches, which are the same in every process."""
    rng = np.random.default_rng(1)
    teacher = rng.standard_normal((FEATURES, CLASSES))
    for _ in range(steps):
        x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
        yield {"x": x, "label": np.argmax(x @ teacher, -1).astype(np.int32)}


def part(array, spec, axes, rank):
    """Returns a rank's part of a global array. Ranks are numbered in row-major order."""
    where = dict(zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True))
    for dim, axis in enumerate(spec):
        if axis is not None:
            array = np.split(array, axes[axis], dim)[where[axis]]
    return array


def gather(array, spec):
    """Gathers the global array on every rank. Must be called inside a step."""
    for dim, axis in enumerate(spec):
        if axis is not None:
            array = lax.all_gather(array, axis, axis=dim, tiled=True)
    return array


def on_devices(axes, args):
    """Trains in one process with many devices, on global arrays that XLA shards."""
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    put = partial(jax.tree.map, lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)))
    step, state = make_train_step(mesh), put(STATE, first_state())
    for batch in batches(args.steps, args.rows):
        state, loss = step(state, put(BATCH, batch))
    return state["params"], loss


def on_ranks(axes, args, world):
    """Trains in many processes with one device each. Every rank passes and receives its shards."""
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    mine = partial(jax.tree.map, lambda spec, x: part(x, spec, axes, world.rank))
    step = jaxcross.crossover(make_train_step(mesh), axes=axes, donate_argnums=0)
    state = mine(STATE, first_state())
    for batch in batches(args.steps, args.rows):
        state, loss = step(state, mine(BATCH, batch))
    gathered = jaxcross.crossover(
        lambda params: jax.tree.map(lambda spec, x: gather(x, spec), PARAMS, params), axes=axes
    )
    return gathered(state["params"]), loss


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", type=int, help="run on so many XLA devices of this process, without jaxcross"
    )
    parser.add_argument(
        "--tensor", type=int, default=2, help="ranks or devices along `tensor`; the rest are `data`"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=64, help="of a batch, over all ranks")
    parser.add_argument("--save", metavar="FILE", help="write the global parameters (.npz)")
    parser.add_argument(
        "--compare", metavar="FILE", help="parameters that must be reached, to rounding"
    )
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
        rank, size = 0, args.devices
    else:
        world = jaxcross.initialize()
        rank, size = world.rank, world.size
    if size % args.tensor:
        raise SystemExit(f"--tensor {args.tensor} does not divide {size} ranks: choose a divisor.")
    axes = {"data": size // args.tensor, "tensor": args.tensor}
    params, loss = on_devices(axes, args) if args.devices else on_ranks(axes, args, world)
    if rank == 0:
        print(f"{size} {'devices' if args.devices else 'ranks'}, {axes}: loss {float(loss):.4f}")
        flat = {
            jax.tree_util.keystr(path): np.asarray(x)
            for path, x in jax.tree.leaves_with_path(params)
        }
        if args.save:
            np.savez(args.save, **flat)
        if args.compare:
            wanted = np.load(args.compare)
            assert set(wanted.files) == set(flat)
            apart = max(float(np.max(np.abs(wanted[name] - flat[name]))) for name in flat)
            print(f"parameters are at most {apart:.1e} apart", flush=True)
            assert apart < 2e-5, apart


if __name__ == "__main__":
    main()
