"""A `jax.shard_map` step is traced without devices, and does what it does on JAX's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError
from jaxcross.program import stages
from jaxcross.program.stages import cut
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import LocalRanks, run_program
from tests.support.shard_map_table import AXES, ROWS, mapped, parts

KINDS = (
    jax.sharding.AxisType.Auto,
    jax.sharding.AxisType.Explicit,
)  # the default depends on JAX's version
MESHES = [
    jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * 2)
    for kind in KINDS
]
MESH = MESHES[0]


def traced(step: Any, *args: Any, axes: Any = AXES) -> Traced:
    return trace(step, args, axes=axes, wire=LocalRanks())


def of_rank(name: str, rank: int = 0) -> tuple[Any, ...]:
    return parts(ROWS[name].args, ROWS[name].in_specs, rank)


ON_DEVICES = """
import jax
from tests.support.shard_map_table import AXES, assert_part, cases, mapped, parts, wanted
from jaxcross.program.stages import cut
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, run_program

mesh = jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES))
for what, row, check in cases():
    want = wanted(row, check)
    args = [parts(row.args, row.in_specs, rank) for rank in range(4)]
    found = trace(jax.jit(mapped(row, check, mesh)), args[0], axes=AXES, wire=LocalRanks())
    for rank, got in enumerate(run_program(cut(found), [jax.tree.leaves(a) for a in args])):
        assert_part(got, want, row, rank, what)
    print("holds", what)
"""


@pytest.mark.integration
def test_every_row_equals_devices(on_four_devices: Callable[..., str]) -> None:
    """Runs in its own process, since it needs four XLA devices."""
    assert on_four_devices(ON_DEVICES).count("holds") == sum(
        len(row.checks) for row in ROWS.values()
    )


def test_jax_inserts_the_exchanges_of_gradients() -> None:
    found = cut(
        traced(mapped(ROWS["inserted"], True, MESH), *of_rank("inserted")), bucket_bytes=0
    ).exchanges
    sums = sorted((*x.axes, x.count) for x in found)
    forward, gradients = [("tensor", 16)], [("data", 4), ("data", 12), ("data", 12)]
    assert sums == [("data", 1), *gradients, *forward], "and the mean loss"


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in compat.sub_jaxprs(eqn):
            yield from equations(inner)


@pytest.mark.parametrize("name", ["inserted", "local loop", "remat", "random"])
def test_nothing_speaks_of_the_mesh_afterwards(name: str) -> None:
    """Result types must not carry the mesh, or the next call would recompile."""
    found = traced(mapped(ROWS[name], True, MESH), *of_rank(name))
    for eqn in equations(found.jaxpr):
        assert eqn.primitive.name not in ("pvary", "pcast", "shard_map")
        assert eqn.ctx.cur_abstract_mesh.empty, eqn
        values = [*eqn.invars, *eqn.outvars]
        types = [v.aval for v in values] + [
            jax.typeof(v.val) for v in values if isinstance(v, compat.Literal)
        ]
        assert all(t.sharding.mesh.empty and not t.mat.varying for t in types), eqn
        plain = {name: value for name, value in eqn.params.items() if not compat.is_jaxpr(value)}
        assert "Manual" not in repr(plain) or "branches" in plain, eqn


def test_the_mesh_may_come_from_the_context() -> None:
    row = ROWS["inserted"]
    step = jax.shard_map(row.body, in_specs=row.in_specs, out_specs=row.out_specs)
    given = traced(mapped(row, True, MESH), *of_rank("inserted"))
    assert str(traced(step, *of_rank("inserted")).jaxpr) == str(given.jaxpr)


@pytest.mark.parametrize("mesh", MESHES, ids=["auto", "explicit"])
def test_axes_of_either_type(mesh: Any) -> None:
    found = traced(mapped(ROWS["inserted"], True, mesh), *of_rank("inserted"))
    assert [a.shape for a in found.jaxpr.out_avals] == [(), (4, 3), (3, 4), (4,)]


def test_specs_that_are_left_out_are_asked_for() -> None:
    step = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=MESHES[1], out_specs=P())
    with pytest.raises(
        CutError, match="^it is not known how the `shard_map` of `<lambda>` splits its arguments"
    ):
        traced(step, jnp.ones((4, 2)))


@pytest.mark.parametrize("mesh", MESHES, ids=["auto", "explicit"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_vmap_of_a_shard_map_is_asked_to_be_inside(mesh: Any, wrap: Any) -> None:
    step = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    with pytest.raises(
        CutError, match=r"^`<lambda>` is a `jax.vmap` of a `shard_map`, .* Put the `vmap` inside"
    ):
        traced(wrap(jax.vmap(step)), jnp.ones((3, 4, 2)))
    inside = jax.shard_map(
        jax.vmap(lambda x: lax.psum(x, "data")), mesh=mesh, in_specs=P(None, "data"), out_specs=P()
    )
    assert traced(inside, jnp.ones((3, 4, 2))).jaxpr.out_avals[0].shape == (3, 4, 2)


@pytest.mark.parametrize(
    "wrap", [jax.jit, lambda f: jax.jit(lambda *a: f(*a)), lambda f: lambda *a: f(*a)]
)
def test_jitted_and_called_by_another_function(wrap: Any) -> None:
    step = wrap(mapped(ROWS["inserted"], True, MESH))
    assert traced(step, *of_rank("inserted")).in_avals[0].shape == (4, 3)


def test_shards_too_short_to_be_cut_again() -> None:
    """A rank's single row can't be split in two, which JAX would attempt with the shard."""
    step = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=MESH, in_specs=P("data"), out_specs=P()
    )
    assert traced(step, jnp.ones((1, 3))).jaxpr.out_avals[0].shape == (1, 3)


def test_a_step_without_exchange() -> None:
    step = jax.jit(
        jax.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    )
    assert traced(step, jnp.ones((3, 2))).jaxpr.out_avals[0].shape == (3, 2)


def test_results_keep_their_tree() -> None:
    step = jax.shard_map(
        lambda x: {"sum": lax.psum(x, "data"), "own": (x,)}, mesh=MESH, in_specs=P("data"),
        out_specs={"sum": P(), "own": (P("data"),)},
    )  # fmt: skip
    tree = traced(step, jnp.ones(2)).out_tree
    assert jax.tree.unflatten(tree, [0, 1]) == {"own": (0,), "sum": 1}


def test_another_mesh_is_refused() -> None:
    step = mapped(ROWS["inserted"], True, MESH)
    for axes in ({"data": 4, "tensor": 1}, {"tensor": 2, "data": 2}, {"batch": 4}):
        with pytest.raises(
            CutError,
            match="^`inserted` is a `shard_map` over `data` of 2, `tensor` of 2, but its axes",
        ):
            traced(step, *of_rank("inserted"), axes=axes)


def test_a_rank_may_map_over_its_own_devices() -> None:
    own = jax.make_mesh((1,), ("own",), axis_types=KINDS[:1])
    step = jax.shard_map(lambda x: lax.psum(x, "own"), mesh=own, in_specs=P("own"), out_specs=P())
    (eqn,) = traced(step, jnp.ones((4, 2))).jaxpr.eqns
    assert eqn.primitive.name == "shard_map", "as JAX runs it"


def test_work_outside_is_refused() -> None:
    body = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=MESH, in_specs=P("data"), out_specs=P()
    )

    def after(x: jax.Array) -> jax.Array:
        return body(x) + 1

    def before(x: jax.Array) -> jax.Array:
        return body(x + 1)

    with pytest.raises(
        CutError,
        match=r"^`after` computes `add` outside of its `shard_map`, at .*test_shard_map.py",
    ):
        traced(after, jnp.ones((3, 2)))
    with pytest.raises(CutError, match="^`before` computes `add` outside of its `shard_map`"):
        traced(before, jnp.ones((4, 2)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_work_beside_replicated_shard_map_is_rejected(check_vma: bool) -> None:
    """A rank's shards have global shapes here, so only the work outside shows that it's wrong."""
    body = jax.shard_map(
        lambda x: x * (1.0 + lax.axis_index("data")),
        mesh=MESH,
        in_specs=P(),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    def mean(x: jax.Array) -> jax.Array:
        return jnp.mean(body(x))

    with pytest.raises(
        CutError,
        match=r"^`mean` computes `reduce_sum` outside of its `shard_map`, at .*test_shard_map",
    ):
        traced(mean, jnp.ones(2))
    with pytest.raises(CutError, match="^`mean` computes `reduce_sum` outside"):
        traced(jax.jit(mean), jnp.ones(2))


def test_one_argument_may_be_passed_twice() -> None:
    def products(spec: Any) -> Any:
        step = jax.shard_map(
            lambda a, b: lax.psum(jnp.sum(a * jnp.sum(b)), "data"),
            mesh=MESH,
            in_specs=(P("data"), spec),
            out_specs=P(),
        )
        return lambda x: step(x, x)

    results = run_program(
        stages.cut(traced(products(P("data", None)), jnp.ones((2, 2)))),
        [[np.full((2, 2), r)] for r in range(4)],
    )
    assert [float(out[0]) for out in results] == [16.0 * (0 + 4), 16.0 * (1 + 9)] * 2
    with pytest.raises(
        CutError,
        match=r"takes the same argument of the step twice, with the specs P\('data',?\) and P\(\)",
    ):
        traced(products(P()), jnp.ones((2, 2)))


def test_constants_lie_whole_on_every_rank() -> None:
    def scaled(spec: Any) -> Any:
        step = jax.shard_map(
            lambda w, x: lax.psum(jnp.sum(w) * x, "data"),
            mesh=MESH,
            in_specs=(spec, P("data")),
            out_specs=P(),
        )
        return lambda x: step(np.ones(4, np.float32), x)

    assert traced(scaled(P()), jnp.ones(2)).jaxpr.out_avals[0].shape == (2,)
    with pytest.raises(
        CutError,
        match=r"has the spec P\('data',?\) for an array that is not an argument of the step",
    ):
        traced(scaled(P("data")), jnp.ones(2))


def test_axes_left_to_the_partitioner_are_refused() -> None:
    step = jax.shard_map(
        lambda x: lax.psum(x, "data"),
        mesh=MESH,
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
    )
    with pytest.raises(CutError, match="leaves axes to XLA's partitioner"):
        traced(step, jnp.ones((3, 2)))


def test_wrong_step_raises_the_error_of_jax() -> None:
    step = jax.shard_map(
        lambda x: x @ jnp.ones((5, 2)), mesh=MESH, in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(TypeError, match="dot_general"):
        traced(step, jnp.ones((3, 2)))
    unequal = jax.shard_map(lambda x: x, mesh=MESH, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        traced(unequal, jnp.ones((3, 2)))


def test_an_ordinary_step_is_traced_once() -> None:
    calls = []

    def step(x: jax.Array) -> jax.Array:
        calls.append(1)
        return lax.psum(x, "data")

    traced(partial(step), np.ones(3, np.float32))
    assert calls == [1]
