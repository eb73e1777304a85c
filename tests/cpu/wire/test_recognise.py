"""Which equations the wire treats as exchanges, and how it names them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcross import _jax_compat as compat
from jaxcross.errors import ExchangeError
from jaxcross.program.ir import Exchange
from jaxcross.wire.recognition import recognise

AXES = {"a": 2, "b": 3}


def exchanges(function, *args, axes=AXES, bound=AXES):
    jaxpr = jax.make_jaxpr(function, axis_env=list(bound.items()))(*args)
    return [e for eqn in compat.open_jaxpr(jaxpr)[0].eqns for e in recognise(eqn, axes) or ()]


X = jnp.ones((6, 2), jnp.bfloat16)

TABLE = [
    (lambda x: lax.psum(x, "a"), "psum a bfloat16[6, 2]"),
    (lambda x: lax.pmean(x, ("b", "a")), "psum b,a bfloat16[6, 2]"),
    (lambda x: lax.pmax(x, "b"), "pmax b bfloat16[6, 2]"),
    (lambda x: lax.pmin(x, "b"), "pmin b bfloat16[6, 2]"),
    (
        lambda x: lax.all_gather(x, "b", axis=1),
        "all_gather b bfloat16[6, 2] dimension=1 tiled=False",
    ),
    (
        lambda x: lax.psum_scatter(x, "b", tiled=True),
        "reduce_scatter b bfloat16[6, 2] dimension=0 tiled=True",
    ),
    (
        lambda x: lax.all_to_all(x, "b", 0, 1, tiled=True),
        "all_to_all b bfloat16[6, 2] split_axis=0 concat_axis=1",
    ),
    (
        lambda x: lax.ppermute(x, "b", [(0, 1), (2, 0)]),
        "ppermute b bfloat16[6, 2] perm=((0, 1), (2, 0))",
    ),
    (lambda x: lax.pbroadcast(x, "a", 1), "pbroadcast a bfloat16[6, 2] source=1"),
    (
        lambda x: lax.psum(x, "b", axis_index_groups=[[0, 1], [2]]),
        "psum b bfloat16[6, 2] groups=((0, 1), (2,))",
    ),
    (
        lambda x: jax.vmap(lambda v: lax.psum(v, ("i", "a")), axis_name="i")(x),
        "psum a bfloat16[2] positions=(0,)",
    ),
    (lambda x: lax.psum(x > 0, "a"), "psum a int32[6, 2]"),
]


@pytest.mark.parametrize(("function", "line"), TABLE, ids=[line for _, line in TABLE])
def test_exchange_lines(function, line):
    (exchange,) = exchanges(function, X)
    assert exchange.line() == line
    assert "test_recognise.py" in exchange.source


def test_one_exchange_an_operand():
    found = exchanges(lambda x, y: lax.psum((x, y), "a"), X, jnp.ones(3))
    assert sorted(e.line() for e in found) == ["psum a bfloat16[6, 2]", "psum a float32[3]"]


def test_what_is_no_exchange():
    assert exchanges(lambda x: x * lax.axis_index("a") + jnp.sin(x), X) == []
    assert exchanges(lambda x: lax.psum(x, "a"), X, axes={"b": 3}) == []


def test_axes_of_two_worlds_cannot_be_mixed():
    with pytest.raises(
        ExchangeError, match=r"^`psum` mixes axes of jaxcross \('a'\) with others \('b'\), at "
    ):
        exchanges(lambda x: lax.psum(x, ("a", "b")), X, axes={"a": 2})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: lax.ppermute(x, "b", [(0, 1), (1, 7)]),
            r"^destinations of `ppermute` over 'b' must be .* got \[1, 7\]",
        ),
        (
            lambda x: lax.ppermute(x, "b", [(-1, 1)]),
            r"^sources of `ppermute` over 'b' must be indices from 0 to 2, .*-1",
        ),
        (
            lambda x: lax.ppermute(x, "b", [(0, 1), (0, 2)]),
            r"^sources of .* each at most once, got \[0, 0\], at .*test_",
        ),
        (
            lambda x: lax.pbroadcast(x, "b", 3),
            r"^sources of `pbroadcast` over 'b' must be .* got \[3\]",
        ),
        (
            lambda x: lax.psum(x, "b", axis_index_groups=[[0, 1]]),
            (
                r"^`axis_index_groups` of `psum` over 'b' must name each index from 0 to 2 once, "
                r"got \[\[0, 1\]\], at "
            ),
        ),
    ],
)
def test_indices_are_those_of_the_axes(function, message):
    with pytest.raises(ExchangeError, match=message):
        exchanges(function, X)


def test_unsupported_collectives_name_the_remedy():
    def ragged(x):
        n = jnp.zeros((2,), jnp.int32)
        return lax.ragged_all_to_all(x, x, n, n, n, n, axis_name="a")

    with pytest.raises(
        ExchangeError,
        match=r"^`ragged_all_to_all` over 'a' cannot be made over MPI, at .*Instead, pad",
    ):
        exchanges(ragged, X)


def test_a_shard_map_step_has_its_gradient_exchange():
    mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    step = jax.shard_map(
        lambda w, x: jax.grad(lambda w: (w * x).sum())(w),
        mesh=mesh,
        in_specs=(spec(), spec("a")),
        out_specs=spec(),
    )
    jaxpr = jax.make_jaxpr(step)(jnp.ones(3), jnp.ones(6))
    (outer,) = compat.open_jaxpr(jaxpr)[0].eqns
    (body,) = compat.sub_jaxprs(outer)
    found = [e for eqn in compat.open_jaxpr(body)[0].eqns for e in recognise(eqn, {"a": 2}) or ()]
    assert [e.line() for e in found] == ["psum a float32[3]"]


def test_lines_hold_no_handles():
    assert (
        Exchange(op="psum", axes=("a",), dtype="float32", shape=(3,)).line() == "psum a float32[3]"
    )
