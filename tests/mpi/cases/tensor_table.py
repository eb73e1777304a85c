"""The model of `tensor_case` on meshes of four or eight ranks.

We compare each mesh with the serial model, and two jobs in crossover with each of them alone. On
four ranks, we also run different jobs together: a 1-D job, a 2-D job, and a data-parallel job that
averages its gradients itself.

Prints `rank R: tensor done` if all meshes hold. Every rank trains the serial model and cuts out its
shards.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross
from jaxcross import tensor
from jaxcross.program import stages
from jaxcross.tensor import Mesh
from jaxcross.wire.bytes import wire_bytes
from tests.support.tensor_case import BATCH, HEADS, LENGTH, Training, batch, close, on_ranks

STEPS = 2
world = jaxcross.initialize(stall_timeout_s=60)
rank = world.rank
MESHES = {
    4: {
        "[2,2,1]": Mesh(side=2),
        "1-D on 4": Mesh(tensor=4),
        "[1,1,4]": Mesh(depth=4),
        "data 2 x 1-D on 2": Mesh(data=2, tensor=2),
    },
    8: {
        "[2,2,2]": Mesh(side=2, depth=2),
        "1-D on 8": Mesh(tensor=8),
        "data 2 x [2,2,1]": Mesh(data=2, side=2),
    },
}[world.size]
OPTIONS = {"layers": 1, "heads": HEADS if world.size == 4 else 2 * HEADS}


def loop(job, step, start, rows):
    """Trains on this rank's rows of every batch. Returns the state and the last metrics."""
    state = start(rank)
    for n in range(STEPS):
        state, metrics = step(state, rows(batch(n), rank))
    return state, metrics


def same_bits(a, b, what):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), (
            f"{what}{jax.tree_util.keystr(path)}"
        )


def received_bytes(program, mesh):
    return sum(wire_bytes(exchange, mesh.axes) for exchange in program.exchanges)


def check_bytes(step, training, params):
    """Checks that the step received as many bytes as `step_cost` predicts, plus two norms: one for
    the metrics, and one for clipping.
    """
    norm = functools.partial(tensor.global_norm, specs=training.specs, mesh=training.mesh)
    norms = 2 * received_bytes(
        stages.cut(jaxcross.crossover(norm, axes=training.mesh.axes).trace(params)), training.mesh
    )
    cost = tensor.step_cost(training.model, BATCH, LENGTH)
    assert received_bytes(step.latest_program, training.mesh) == cost.received_bytes + norms, (
        training.mesh
    )


def check_replicas(params, training):
    spread = functools.partial(tensor.replica_spread, specs=training.specs, mesh=training.mesh)
    tensor.check_replicas(jaxcross.crossover(spread, axes=training.mesh.axes)(params))


def averaging():
    """Data-parallel training of the serial model on all ranks. The step averages the gradients."""
    plain = Training(Mesh(), **OPTIONS)

    def step(state, batch):
        params, opt_state = state
        loss, grads = plain.loss_and_gradients(params, batch)
        updates, opt_state = plain.tx.update(jax.lax.pmean(grads, "batch"), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {
            "loss": jax.lax.pmean(loss, "batch")
        }

    return (
        jaxcross.crossover(step, axes={"batch": world.size}),
        lambda rank: plain.state(),
        Mesh(data=world.size).local_batch,
    )


serial = Training(Mesh(), **OPTIONS)
(want, want_adam), want_metrics = loop(
    None, jax.jit(serial.step), lambda rank: serial.state(), lambda b, rank: b
)
every = {}
for name, mesh in MESHES.items():
    print(f"rank {rank}: {name}", file=sys.stderr, flush=True)
    mesh.check_ranks(world.size)
    training = Training(mesh, **OPTIONS)
    step = jaxcross.crossover(training.step, axes=mesh.axes)
    how = {"step": step, "start": training.state, "rows": mesh.local_batch}
    (params, adam), metrics = alone = loop(None, **how)
    every[name] = how, alone
    close(metrics, want_metrics, 2e-5, f"{name}, rank {rank}: ")
    close(params, tensor.shard(want, training.specs, mesh, rank), 2e-4, f"{name}, rank {rank}: ")
    specs = tensor.state_specs(training.tx, params, training.specs)
    close(adam, tensor.shard(want_adam, specs, mesh, rank), 2e-3, f"{name}, rank {rank}: ")
    check_bytes(step, training, params)

    gathered = jaxcross.crossover(
        functools.partial(tensor.gather, specs=training.specs, mesh=mesh), axes=mesh.axes
    )
    if mesh.inner:  # a mesh without inner axes cuts nothing, so there's nothing to gather
        close(gathered(params), want, 2e-4, f"{name}, gathered: ")
    check_replicas(params, training)

    with jaxcross.Runner(world) as runner:
        jobs = [runner.add(f"{name} {n}", loop, how) for n in range(2)]
        runner.run()
    for job in jobs:
        same_bits(job.state, alone, f"{name}, job {job.name}")

name = "[2,2,1]" if world.size == 4 else "[2,2,2]"
half = Training(MESHES[name], dtype=jnp.bfloat16, **OPTIONS)
call = jaxcross.crossover(half.loss_and_gradients, axes=half.mesh.axes)
loss, grads = call(half.params(rank), half.mesh.local_batch(batch(0), rank))
oracle = on_ranks(
    half.loss_and_gradients,
    half.mesh,
    lambda r: (half.params(r), half.mesh.local_batch(batch(0), r)),
)
want_loss, want_grads = oracle[rank]  # 16-bit sums are rounded in different places
np.testing.assert_allclose(loss, want_loss, rtol=1e-3)
for (path, got), expected in zip(
    jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    off = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert off <= 2e-2, f"bfloat16, {jax.tree_util.keystr(path)}: {off}"

if world.size == 4:
    unlike = {name: every[name] for name in ("1-D on 4", "[2,2,1]")}
    how = dict(zip(("step", "start", "rows"), averaging(), strict=True))
    unlike["averages"] = how, loop(None, **how)
    with jaxcross.Runner(world) as runner:
        jobs = {name: runner.add(name, loop, how) for name, (how, _) in unlike.items()}
        runner.run()
    for name, job in jobs.items():
        same_bits(job.state, unlike[name][1], f"unlike jobs, {name}")

training = Training(MESHES["[2,2,1]" if world.size == 4 else "[2,2,2]"], **OPTIONS)
broken = training.params(rank)
if rank == 3:
    broken["last"]["scale"] = broken["last"]["scale"] + jnp.float32(0.5)
try:
    check_replicas(broken, training)
except ValueError as error:
    assert "up to 0.5 apart" in str(error), error
else:
    raise AssertionError("unequal copies were not seen")
print(f"rank {rank}: tensor done", flush=True)
