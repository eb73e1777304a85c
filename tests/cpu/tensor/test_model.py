"""A whole model on every mesh: loss, gradients, norm and ten steps match the serial model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxcross import tensor
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.tensor import Mesh
from jaxcross.testing import LocalRanks, run_program
from tests.support.tensor_case import (
    GRIDS,
    LENGTH,
    MESHES,
    QUICK,
    Training,
    batch,
    close,
    on_ranks,
    transformer,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

STEPS = 10
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.exhaustive) for n in MESHES]
)

MORE = [pytest.param("1-D on 4", marks=pytest.mark.exhaustive)]


@cache
def serial() -> tuple[Any, list[Any]]:
    """Returns the serial model's state and metrics, without any axis bound."""
    training = Training(Mesh(), layers=1)
    state, logged, step = training.state(), [], jax.jit(training.step)
    for n in range(STEPS):
        state, metrics = step(state, batch(n))
        logged.append(metrics)
    return jax.tree.map(np.asarray, state), logged


@cache
def trained(name: str) -> tuple[Training, list[Any], list[Any]]:
    training = Training(MESHES[name], layers=1)
    return training, *training.run(STEPS)


@pytest.mark.integration
@EVERY
def test_ten_steps_end_in_the_serial_state(name: str) -> None:
    training, states, logged = trained(name)
    (want, _), serial_logged = serial()
    for n, (metrics, expected) in enumerate(zip(logged, serial_logged, strict=True)):
        for rank, m in enumerate(metrics):
            np.testing.assert_allclose(
                m["loss"], expected["loss"], rtol=2e-5, err_msg=f"step {n}, rank {rank}"
            )
            np.testing.assert_allclose(
                m["norm"], expected["norm"], rtol=2e-4, err_msg=f"step {n}, rank {rank}"
            )
    got = tensor.unshard([params for params, _ in states], training.specs, training.mesh)
    close(got, want, 2e-4)
    assert serial_logged[0]["norm"] > 0.5, "the clipping did something"


@pytest.mark.integration
@EVERY
def test_copies_are_the_same_bits_and_parts_are_not(name: str) -> None:
    """`unshard` compares copies bit for bit, here in the optimizer state. Blocks differ."""
    training, states, _ = trained(name)
    specs = tensor.state_specs(training.tx, states[0][0], training.specs)
    whole = tensor.unshard([opt for _, opt in states], specs, training.mesh)
    close(whole, serial()[0][1], 2e-3)
    kernels = [s[0]["block_0"]["mlp"]["up"]["kernel"].tobytes() for s in states]
    assert len(set(kernels)) == training.mesh.side**2 * training.mesh.tensor


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        "[2,2,1]",
        *MORE,
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("[2,2,2]", "[3,3,2]")),
    ],
)
def test_gradients_with_remat_blocks_and_untied_head(name: str) -> None:
    mesh, options = MESHES[name], {"tied": False, "remat": True}
    plain, cut = Training(Mesh(), **options), Training(mesh, **options)
    want_loss, want = jax.jit(plain.loss_and_gradients)(plain.params(), batch(0))
    results = on_ranks(
        cut.loss_and_gradients, mesh, lambda r: (cut.params(r), mesh.local_batch(batch(0), r))
    )
    for rank, (loss, gradients) in enumerate(results):
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        close(gradients, tensor.shard(want, cut.specs, mesh, rank), 2e-5, f"rank {rank}: ")


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", ["1-D on 4", pytest.param("[2,2,2]", marks=pytest.mark.exhaustive)]
)
def test_float64_agrees_to_rounding(name: str) -> None:
    mesh, wide = MESHES[name], {"dtype": jnp.float64, "param_dtype": jnp.float64, "layers": 1}
    with jax.enable_x64(True):
        plain, cut = Training(Mesh(), **wide), Training(mesh, **wide)
        want_loss, want = jax.jit(plain.loss_and_gradients)(plain.params(), batch(0))
        results = on_ranks(
            cut.loss_and_gradients, mesh, lambda r: (cut.params(r), mesh.local_batch(batch(0), r))
        )
        for rank, (loss, gradients) in enumerate(results):
            np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
            close(gradients, tensor.shard(want, cut.specs, mesh, rank), 1e-11, f"rank {rank}: ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16], ids=["float32 kept", "bfloat16 kept"])
@pytest.mark.parametrize("name", ["[2,2,2]", *MORE])
def test_bfloat16_follows_the_serial_model(name: str, kept: Any) -> None:
    mesh, half = MESHES[name], {"dtype": jnp.bfloat16, "param_dtype": kept, "layers": 1}
    plain, cut = Training(Mesh(), **half), Training(mesh, **half)
    want_loss, want = jax.jit(plain.loss_and_gradients)(plain.params(), batch(0))
    results = on_ranks(
        cut.loss_and_gradients, mesh, lambda r: (cut.params(r), mesh.local_batch(batch(0), r))
    )
    for rank, (loss, gradients) in enumerate(results):
        assert loss.dtype == jnp.float32 and all(
            g.dtype == kept for g in jax.tree.leaves(gradients)
        )
        np.testing.assert_allclose(loss, want_loss, rtol=1e-3)
        expected = tensor.shard(want, cut.specs, mesh, rank)
        a, b = (
            np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(t)])
            for t in (gradients, expected)
        )
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


@pytest.mark.integration
def test_gathered_params_are_the_serial_tree() -> None:
    training, states, _ = trained("[2,2,2]")
    want = tensor.unshard([p for p, _ in states], training.specs, training.mesh)
    results = on_ranks(
        lambda p: tensor.gather(p, training.specs, training.mesh),
        training.mesh,
        lambda r: (states[r][0],),
    )
    for got in results:
        assert all(
            x.tobytes() == y.tobytes()
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        )


@pytest.mark.integration
@pytest.mark.parametrize("name", GRIDS)
def test_init_inside_a_step_gives_the_serial_shards(name: str) -> None:
    """Initialising inside a step gives the serial parameters, sharded for each rank."""
    mesh = MESHES[name]
    cut = Training(mesh, layers=1)
    # Made here, as those of the other tests may have been compiled with different options by
    # another file's tests.
    whole = tensor.init(transformer(Mesh(), layers=1), jax.random.key(3), cut.example)

    def start(tokens: Any) -> Any:
        variables = cut.model.init(jax.random.key(3), tokens)
        return jax.tree.map(
            lambda box: box.unbox(), variables["params"], is_leaf=lambda x: hasattr(x, "unbox")
        )

    results = on_ranks(start, mesh, lambda r: (np.zeros((1, LENGTH), np.int32),))
    for rank, got in enumerate(results):
        expected = tensor.shard(whole, cut.specs, mesh, rank)
        close(got, expected, 1e-6, f"rank {rank}: ")
    last = tensor.init(cut.model, jax.random.key(3), cut.example, mesh.ranks - 1)
    pairs = zip(jax.tree.leaves(last), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.integration
@pytest.mark.parametrize("remat", [False, True])
def test_initialising_never_holds_the_serial_model(
    monkeypatch: pytest.MonkeyPatch, remat: bool
) -> None:
    mesh, held, part = Mesh(tensor=4), [], Mesh.part
    model = transformer(mesh, layers=4, remat=remat)
    example = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    serial = jax.eval_shape(
        lambda: tensor.init(model.clone(mesh=Mesh()), jax.random.key(0), example)
    )
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(serial)]
    before = {id(array) for array in jax.live_arrays()}

    def watched(self: Mesh, value: Any, *where: Any) -> Any:
        held.append(sum(array.nbytes for array in jax.live_arrays() if id(array) not in before))
        return part(self, value, *where)

    monkeypatch.setattr(Mesh, "part", watched)
    own = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(tensor.init(model, jax.random.key(0), example, rank=1))
    )
    assert own < sum(sizes) / 3
    assert max(held) < own + 2 * max(sizes) < sum(sizes) / 2


@pytest.mark.integration
def test_the_norm_counts_every_element_once() -> None:
    training = Training(Mesh(side=2, depth=2))
    want = optax.tree.norm(Training(Mesh()).params())
    results = on_ranks(
        lambda p: tensor.global_norm(p, training.specs, training.mesh),
        training.mesh,
        lambda r: (training.params(r),),
    )
    np.testing.assert_allclose(results, float(want), rtol=1e-6)


SHARD_MAP = """
import sys
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from tests.support.tensor_case import Training, batch
from jaxcross import tensor
from jaxcross.tensor import Mesh

plain = Training(Mesh(), layers=1)
want_loss, want = jax.jit(plain.loss_and_gradients)(plain.params(), batch(0))
meshes = {
    "side": Mesh(side=2),
    "tensor": Mesh(tensor=4),
    "depth": Mesh(depth=4),
    "data": Mesh(data=2, tensor=2),
}
for mesh in (meshes[name] for name in sys.argv[2:]):
    cut = Training(mesh, layers=1)
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axes)
    devices = jax.make_mesh(tuple(mesh.axes.values()), tuple(mesh.axes), axis_types=kinds)
    rows = P(mesh.batch or None)
    call = jax.shard_map(
        cut.loss_and_gradients,
        mesh=devices,
        in_specs=(cut.specs, rows),
        out_specs=(P(), cut.specs),
        check_vma=sys.argv[1] == "True",
    )
    loss, got = jax.jit(call)(plain.params(), batch(0))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.max(np.abs(b))) + 1e-7)
    gather = jax.shard_map(
        lambda p: tensor.gather(p, cut.specs, mesh),
        mesh=devices,
        in_specs=(cut.specs,),
        out_specs=P(),
        check_vma=sys.argv[1] == "True",
    )
    gathered = jax.tree.leaves(jax.jit(gather)(plain.params()))
    for a, b in zip(gathered, jax.tree.leaves(plain.params()), strict=True):
        np.testing.assert_array_equal(a, b)
    print("holds", mesh.axes)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("check_vma", "meshes"),
    [
        (True, ("side", "data")),
        pytest.param(True, ("tensor", "depth"), marks=pytest.mark.exhaustive),
        pytest.param(False, ("side", "tensor", "depth", "data"), marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else ", ".join(value),
)
def test_shard_map_gives_the_same_gradients(
    check_vma: bool, meshes: tuple[str, ...], on_four_devices: Callable[..., str]
) -> None:
    """Needs its own process, for four CPU devices. The specs shard the global arrays."""
    assert on_four_devices(SHARD_MAP, str(check_vma), *meshes).count("holds") == len(meshes)


@pytest.mark.exhaustive
def test_checked_shard_map_on_ranks_is_the_plain_step() -> None:
    mesh = Mesh(tensor=2)
    training = Training(mesh, layers=1)
    args = [(training.state(rank), mesh.local_batch(batch(0), rank)) for rank in range(mesh.ranks)]
    specs = training.specs, tensor.state_specs(training.tx, args[0][0][0], training.specs)
    devices = jax.sharding.AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes))
    step = jax.shard_map(
        training.step, mesh=devices, in_specs=(specs, P()), out_specs=(specs, P()), check_vma=True
    )
    traced = trace(step, args[0], axes=mesh.axes, wire=LocalRanks())
    results = run_program(stages.cut(traced), [jax.tree.leaves(a) for a in args])
    for got, want in zip(
        results, on_ranks(training.step, mesh, lambda rank: args[rank]), strict=True
    ):
        close(jax.tree.unflatten(traced.out_tree, got), want, 2e-4)
