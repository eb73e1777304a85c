"""Steps outside a runner, on two ranks: who may call them, and when the ranks agree again."""

import pytest

SCRIPT = """
import threading, warnings
import jax, jax.numpy as jnp, numpy as np
import jaxcross
from jax import lax

warnings.simplefilter("ignore")
world = jaxcross.initialize(stall_timeout_s=120)
inside, leave, x = threading.Event(), threading.Event(), jnp.ones(4)


def wait(v):
    inside.set()
    leave.wait(60)
    return v


def slow(x):
    return lax.psum(jax.pure_callback(wait, jax.ShapeDtypeStruct((4,), jnp.float32), x), "batch")


slow_step = jaxcross.crossover(slow, axes="batch")
step = jaxcross.crossover(lambda x: lax.psum(x, "batch"), axes="batch")
alone = jaxcross.crossover(lambda x: x + 1, axes="batch")
results = []
thread = threading.Thread(target=lambda: results.append(slow_step(x)), name="mine")
thread.start()
inside.wait(60)
try:
    step(x)
except jaxcross.JobError as error:
    message = str(error)
assert message.startswith(
    "`<lambda>` was called from thread `MainThread` while thread `mine` is running "
    "`slow`. Exchanges match up between ranks by the order of the"
), message
assert (alone(x) == 2).all(), "who communicates with nobody may call from any thread"
leave.set()
thread.join()
assert (results[0] == 2).all() and (step(x) == 2).all(), "one after the other is allowed"

# Batches of unlike length: where one rank's change leaves the exchanges as they are, the others are
# not waited for.
mean = jaxcross.crossover(lambda x: lax.pmean(x.mean(), "batch"), axes="batch")
for n in range(5):
    length = 4 + (n if world.rank else 0)
    assert mean(jnp.full(length, float(world.rank))) == 0.5


# As well where the backward pass is cut, by a number or by one that was searched for.
def gradients(params, x):
    def loss_fn(params):
        y = x
        for kernel, bias in params:
            y = jnp.tanh(y @ kernel + bias)
        return (y**2).mean()

    return jax.grad(loss_fn)(params)


params = [
    (jnp.sin(jnp.arange(16.0) * n).reshape(4, 4), jnp.cos(jnp.arange(4.0) * n))
    for n in range(1, 5)
]
expected = jax.tree.leaves(jax.jit(gradients)(params, jnp.ones((1, 4))))
for cut in (2, "auto"):
    averaged = jaxcross.crossover(
        lambda p, x: lax.pmean(gradients(p, x), "batch"), axes="batch", cut=cut
    )
    for rows in (4, 1, 4, 3, 1):
        found = jax.tree.leaves(averaged(params, jnp.ones((rows if world.rank else 4, 4))))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
# Where segments part does not follow from the batch's size either.
def moments(x):
    mean = lax.pmean(x.sum(0), "batch")
    return mean, lax.pmean(((x - mean) ** 2).sum(0), "batch")


of_batch = jaxcross.crossover(moments, axes="batch")
for rows in (32, 2, 32):
    assert of_batch(jnp.ones((rows if world.rank else 32, 8)))[0].shape == (8,)

# Two meshes whose axes have the same names, and in which rank 0 stands at the same place.
meshes = [{"a": 2, "b": 1}, {"a": 1, "b": 2}]
across, within = (jaxcross.crossover(lambda x: lax.psum(2 * x, "a"), axes=axes) for axes in meshes)
for _ in range(2):
    assert (across(x) == 4).all() and (within(x) == 2).all()

# Ranks that take a branch at different calls would mix different steps.
every_third = jaxcross.crossover(
    lambda n, x: (n + 1, lax.cond(n % 3 == 2, lambda v: lax.pmean(v, "batch"), lambda v: v, x)),
    axes="batch",
)
n = jnp.int32(world.rank)
try:
    for _ in range(6):
        n, _ = every_third(n, x)
except jaxcross.ExchangeError as error:
    assert (
        "takes a branch with exchanges at different calls: rank 0 in call 3, rank 1 in call 2."
        in str(error)
    ), error
    print("apart", flush=True)

try:
    step(jnp.ones(5 + world.rank))
except jaxcross.ExchangeError as error:
    assert str(error).startswith(
        "ranks 0 and 1 exchange different things in `<lambda>`: exchange 1 is"
    ), error
    print("end", flush=True)
"""

HALFWAY = """
import warnings
import jax, jax.numpy as jnp
import jaxcross
from jax import lax

warnings.simplefilter("ignore")
world = jaxcross.initialize(stall_timeout_s=120)
calls = []


def host():
    calls.append(1)
    if world.rank == 0 and len(calls) == 2:
        raise ValueError("a bad read")
    return jnp.float32(1)


def step(x):
    s = lax.psum(x, "batch")
    y = jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32))
    return s, lax.psum(jnp.sin(y * s), "batch")


alone = jaxcross.crossover(lambda x: x + 1, axes="batch")
step = jaxcross.crossover(step, axes="batch")
for n in range(3):
    try:
        print("sum", float(step(jnp.float32(n))[0]), flush=True)
    except jax.errors.JaxRuntimeError as error:
        assert n == 1 and alone(n) == 2, "without exchanges it may go on"
"""


@pytest.mark.integration
def test_rank_exchanges_no_more_after_half_failed_step(mpirun, quick_compiler) -> None:
    done = mpirun(2, HALFWAY, env=quick_compiler)
    assert done.returncode != 0
    assert done.stdout.count("sum") == 2 == done.stdout.count("sum 0.0"), done.stdout
    assert (
        "`step` cannot exchange: `step` failed halfway on this rank. Other ranks may still be in"
        in done.stderr
    )


AGAIN = """
import warnings
import jax, jax.numpy as jnp
import jaxcross
from jax import lax

warnings.simplefilter("ignore")
world = jaxcross.initialize(stall_timeout_s=5)


def host(x):
    if len(x) > 32:
        raise ValueError("too much")
    return x


def on_all(x):
    return lax.psum(jax.pure_callback(host, jax.typeof(x), x).sum(), "batch")


def on_one(x):
    if world.rank == 0:
        x = jax.ffi.ffi_call("a_target_that_this_rank_lacks", jax.typeof(x))(x)
    return lax.psum(x, "batch")


on_all, on_one = (jaxcross.crossover(f, axes="batch") for f in (on_all, on_one))
for rows in (32, 64, 64, 32, 16):
    try:
        total = on_all(jnp.ones(rows))
    except jax.errors.JaxRuntimeError:
        assert rows == 64
    else:
        print("sum", int(total), flush=True)
try:
    on_one(jnp.float32(1))
except jax.errors.JaxRuntimeError:
    assert world.rank == 0
on_all(jnp.ones(32))
print("mixed", flush=True)
"""


def test_ranks_agree_anew_after_an_early_failed_step(mpirun, quick_compiler) -> None:
    done = mpirun(2, AGAIN, env=quick_compiler)
    assert done.returncode != 0
    printed = [line for line in done.stdout.splitlines() if line.startswith(("sum", "mixed"))]
    assert sorted(printed) == ["sum 32"] * 2 + ["sum 64"] * 4, done.stdout + done.stderr
    assert "(agreement)" in done.stderr and "job 'on_one'" in done.stderr, done.stderr


@pytest.mark.integration
def test_threads_and_agreements(mpirun, quick_compiler) -> None:
    finished = mpirun(2, SCRIPT, env=quick_compiler)
    assert finished.check().stdout.count("end") == 2, finished.stdout + finished.stderr
    assert finished.stdout.count("apart") == 2, finished.stdout + finished.stderr


@pytest.mark.integration
def test_several_devices_a_rank(mpirun):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = mpirun(2, "several_devices.py", env=flags).check()
    for name in ("sharded", "replicated", "numpy", "unplaced"):
        assert all(f"rank {rank}: {name} holds" in done.stdout for rank in range(2)), done.stdout
