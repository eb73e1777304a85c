"""Ranks with several local devices: a step whose arrays the user sharded, alone and in jobs."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcross

notices = []
logging.getLogger("jaxcross").addFilter(lambda record: notices.append(record.getMessage()) or True)
world = jaxcross.initialize(stall_timeout_s=60)
assert jax.local_device_count() == 4
MESH = Mesh(np.array(jax.local_devices()), ("device",))
ROWS, SAME = NamedSharding(MESH, PartitionSpec("device")), NamedSharding(MESH, PartitionSpec())
LAYOUT = {"wide": NamedSharding(MESH, PartitionSpec(None, "device")), "bias": ROWS}


def train_step(params, batch):
    def loss(p):
        return jnp.mean((batch["x"] @ p["wide"] + p["bias"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.lax.pmean(grads, "batch"))
    return params, {"loss": jax.lax.pmean(value, "batch")}


def batch(rank, n):
    draw = np.random.default_rng((rank, n))
    return {
        "x": draw.standard_normal((8, 6), np.float32),
        "y": draw.standard_normal((8, 12), np.float32),
    }


def initial():
    host = {"wide": np.ones((6, 12), np.float32), "bias": np.zeros(12, np.float32)}
    return jax.tree.map(jax.device_put, host, LAYOUT)


def same_layout(params):
    for name, value in params.items():
        assert value.sharding.is_equivalent_to(LAYOUT[name], value.ndim), (name, value.sharding)


def alone(step, place):
    params = initial()
    for n in range(3):
        given = params
        params, out = step(params, place(batch(world.rank, n)))
        assert given["wide"].is_deleted()
        same_layout(params)
    return jax.tree.map(np.asarray, params), float(out["loss"])


def by_hand():
    params = {name: np.asarray(value, np.float64) for name, value in initial().items()}
    for n in range(3):
        gradients = []
        for rank in range(world.size):
            data = batch(rank, n)
            error = 2 * (data["x"] @ params["wide"] + params["bias"] - data["y"]) / data["y"].size
            gradients.append({"wide": data["x"].T @ error, "bias": error.sum(0)})
        params = {
            k: v - 0.1 * np.mean([g[k] for g in gradients], axis=0) for k, v in params.items()
        }
    return params


for name, place in {
    "sharded": lambda b: jax.device_put(b, ROWS),
    "replicated": lambda b: jax.device_put(b, SAME),
    "numpy": lambda b: b,
    "unplaced": lambda b: jax.tree.map(jnp.asarray, b),
}.items():
    step = jaxcross.crossover(train_step, axes="batch", donate_argnums=0)
    params, _ = alone(step, place)
    for key, value in by_hand().items():
        np.testing.assert_allclose(
            params[key], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}"
        )
    finals = {}

    def keep(job, step=step, place=place, finals=finals):
        params = initial()
        for data in job.batches(batch(world.rank, n) for n in range(3)):
            params, _ = step(params, place(data))
        same_layout(params)
        finals[job.name] = jax.tree.map(np.asarray, params)

    runner = jaxcross.Runner(world=world)
    for job in ("one", "two"):
        runner.add(job, keep)
    runner.run()
    for final in finals.values():
        assert all(final[key].tobytes() == params[key].tobytes() for key in params), name
    assert not [text for text in notices if "compiled again" in text]
    print(f"rank {world.rank}: {name} holds", flush=True)
