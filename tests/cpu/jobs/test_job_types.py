"""Arrays created by jaxcross's own threads have the element types the job's function expects."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import define_prng_impl, threefry_prng_impl

from jaxcross.jobs.runner import Runner
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks
from jaxcross.world.initial_state import broadcast
from tests.support.fakes import run_ranks


def in_a_thread(work: Any) -> Any:
    """Returns the result of `work()` in another thread, outside the caller's contexts."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


class Alone:
    """A communicator with a single rank."""

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def Bcast(self, buffer: Any, root: int) -> None:  # noqa: N802
        pass


@pytest.mark.parametrize("x64", [False, True])
def test_batches_have_the_types_of_the_plain_loop(x64: bool) -> None:
    def data() -> Any:
        yield {"float": np.arange(3.0), "int": np.arange(3), "own": jnp.arange(3.0)}

    def fn(job: Any) -> Any:
        with jax.enable_x64(x64):
            (batch,) = job.batches(data())
            (plain,) = data()
            return {name: (x.dtype, jnp.asarray(plain[name]).dtype) for name, x in batch.items()}

    def work(world: Any) -> Any:
        job = (runner := Runner(world)).add("a", fn)
        runner.run()
        return job.state

    (types,) = run_ranks(1, work)
    for name, (mine, plain) in types.items():
        assert mine == plain, name
        assert mine.itemsize == (8 if x64 else 4)


def leaves_of_all_kinds() -> dict[str, Any]:
    device = jax.devices()[0]
    state = {
        "array": jnp.arange(3.0),
        "weak": jnp.asarray(0.1),
        "weak32": jnp.asarray(0.1).astype(jnp.float32) * 2,
        "narrow": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(3, impl="rbg"),
        "numbers": [True, 3, 2.5, 1 - 2j],
        "numpy": np.arange(3.0),
        "nothing": jnp.zeros((0, 2)),
    }
    pinned = {name: jax.device_put(state[name], device) for name in ("array", "weak", "key")}
    return {**state, "pinned": pinned}


@pytest.mark.mostly_integration("True")
@pytest.mark.parametrize("x64", [False, True])
def test_broadcast_preserves_types_and_pins_nothing(x64: bool) -> None:
    """A broadcast preserves types, including weak ones, and pins nothing to a device."""
    with jax.enable_x64(x64):
        state = leaves_of_all_kinds()
    got = in_a_thread(lambda: broadcast(state, Alone()))
    assert state["weak"].weak_type
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(got), strict=True):
        assert type(before) is type(after)
        if isinstance(before, jax.Array):
            assert (before.aval, before.committed, before.sharding) == (
                after.aval,
                after.committed,
                after.sharding,
            )
            if jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
                before, after = jax.random.key_data(before), jax.random.key_data(after)
        assert np.asarray(before).dtype == np.asarray(after).dtype
        assert np.array_equal(before, after)


@pytest.mark.mostly_integration("True")
@pytest.mark.parametrize("pinned", [False, True])
def test_broadcast_preserves_custom_generator_keys(pinned: bool) -> None:
    impl: Any = threefry_prng_impl
    own = define_prng_impl(
        key_shape=impl.key_shape,
        seed=impl.seed,
        split=impl.split,
        random_bits=impl.random_bits,
        fold_in=impl.fold_in,
        name="own",
        tag="own",
    )
    key = jax.random.key(3, impl=own)
    if pinned:
        key = jax.device_put(key, jax.devices()[0])
    got = in_a_thread(lambda: broadcast(key, Alone()))
    assert (got.dtype, got.committed) == (key.dtype, pinned)
    assert jax.random.key_impl(got) == jax.random.key_impl(key)
    assert np.array_equal(jax.random.normal(got, 3), jax.random.normal(key, 3))


@pytest.mark.integration
def test_zeros_have_the_compiled_exchange_types() -> None:
    def step(x: Any, n: Any, key: Any) -> Any:
        return lax.psum((x, x.astype(jnp.bfloat16), n), "batch"), key

    with jax.enable_x64(True):
        args = [jnp.ones(3), jnp.arange(2), jax.random.key(1)]
        done = stages.compile(
            stages.cut(trace(step, args, axes={"batch": 2}, wire=LocalRanks()), bucket_bytes=0),
            args,
        )
        execution = done.execution(args)

    def work() -> Any:
        for segment in done.program.segments:
            if segment.kind == "collective":
                execution.zero_inputs(segment.index)
            execution.run(segment.index)
            execution.wait_outputs(segment.index)
        (x, narrow, n), _ = execution.outputs()
        assert not (x.any() or narrow.any() or n.any())
        return [a.dtype for a in (x, narrow, n)]

    assert in_a_thread(work) == [jnp.float64, jnp.bfloat16, jnp.int64]
