"""Several devices per rank: shardings stay, exchanges get one copy, collectives run elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm_python

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jaxcross._pytree import buffer_of
from jaxcross.program import stages
from jaxcross.program.digest import program_digest
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

AXES = {"batch": 2}
devices = jax.devices()
assert len(devices) == 4
mesh = Mesh(np.array(devices), ("local",))
everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("local"))

def train_step(params, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w["w"] + w["b"]) ** 2))(params)
    grads = lax.pmean(grads, "batch")
    index = lax.axis_index("batch").astype(jnp.float32)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), lax.pmax(index, "batch"), x * 2

# NumPy's: a step that gives its arrays away cannot take these.
params = {"w": np.arange(24, dtype=np.float32).reshape(6, 4) / 24, "b": np.zeros(4, np.float32)}
x = jnp.arange(48.0).reshape(8, 6) / 48

def run(params, x, cut="whole", **options):
    leaves = jax.tree.leaves(((params, x), {}))
    traced = trace(train_step, (params, x), axes=AXES, wire=LocalRanks(1), donate_argnums=(0,))
    done = stages.compile(stages.cut(traced, cut), leaves, **options)
    execution = done.execution(leaves)
    for segment in done.program.segments:
        if segment.kind == "collective":
            execution.wait_inputs(segment.index)
        execution.run(segment.index)
        execution.wait_outputs(segment.index)
    return done, execution.outputs()

_, expected = run(params, x)

def close(got):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)

for cut in ("whole", 2):
    sharded = jax.device_put(params, everywhere), jax.device_put(x, split)
    done, got = run(*sharded, cut=cut)
    close(got)
    assert got[0]["w"].sharding.is_equivalent_to(everywhere, 2), got[0]["w"].sharding
    assert got[0]["b"].sharding.is_equivalent_to(everywhere, 1), got[0]["b"].sharding
    assert got[2].sharding.is_equivalent_to(split, 2), got[2].sharding
    for runnable in done.runnables:
        if runnable.segment.kind == "collective":
            assert len(runnable.call.input_shardings[0][0].device_set) == 1
    again, _ = run(got[0], sharded[1], cut=cut)
    assert program_digest(again.program) == program_digest(done.program)
print("sharded")

# Parameters split over the devices: each exchange is handed one whole array, and what comes back is
# split again.
columns = NamedSharding(mesh, P(None, "local"))
wide = {"w": jax.device_put(params["w"], columns), "b": jax.device_put(params["b"], split)}
_, got = run(wide, jax.device_put(x, everywhere))
close(got)
sharding = got[0]["w"].sharding
assert sharding.is_equivalent_to(NamedSharding(mesh, P(None, "local")), 2), sharding
print("split parameters")

# The step computes on one device, its exchanges run on another, as with an accelerator and its
# host.
there = SingleDeviceSharding(devices[2])
moved = jax.device_put(params, there), jax.device_put(x, there)
done, got = run(*moved, host_device=devices[0])
close(got)
on = [a.devices() for a in jax.tree.leaves(got)]
assert all(found == {devices[2]} for found in on), on
_, got = run(params, x, host_device=devices[3])
close(got)
print("handed over")

# Two objects of JAX that hold the same shards are one buffer.
base = jax.device_put(np.ones((8, 2), np.float32), split)
shards = [s.data for s in base.addressable_shards]
again = jax.make_array_from_single_device_arrays(base.shape, split, shards)
assert base is not again and buffer_of(base) == buffer_of(again) != buffer_of(base + 1)
base.delete()
assert isinstance(buffer_of(base), int)
print("one buffer")
"""


@pytest.fixture(scope="module")
def output() -> str:
    root = Path(__file__).parents[3]
    env = {
        **os.environ,
        "PYTHONPATH": str(root),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [*warm_python.COMMAND, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.integration
@pytest.mark.parametrize("stage", ["sharded", "split parameters", "handed over", "one buffer"])
def test_several_devices(output: str, stage: str) -> None:
    assert stage in output.splitlines(), output
