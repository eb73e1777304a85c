"""Rounding for the wire applies to the sending rank too, which continues with rounded values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import _jax_compat as compat
from jaxcross.exchange import collectives
from jaxcross.exchange.federated_average import federated_average
from tests.support.exchange_row import Row
from tests.support.exchange_table import TABLE, params

# The plain mean sends rounded values without reading them again.
ROWS = [row for row in TABLE if "bfloat16" in row.name and row.name != "mean, bfloat16"]


def numbers() -> np.ndarray:
    """Returns float32 numbers of every exponent and sign.

    Some are arbitrary, some are halfway between two 16-bit numbers, and some are a single bit away
    from halfway.
    """
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    halves = [bits & ~np.uint32((2 << n) - 1) | np.uint32(1 << n) for n in (12, 15)]
    every = np.concatenate(
        [bits, *halves, *(h + d for h in halves for d in (np.uint32(1), np.uint32(2**32 - 1)))]
    )
    x = every.view(np.float32)
    with np.errstate(all="ignore"):  # both kinds of NaN are among them
        x = x[~(np.abs(x) < np.finfo(np.float32).tiny)]  # XLA may flush float32 subnormals
    return np.concatenate([x, np.float32([0.0, -0.0, 65519, 65520, np.inf])])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_it_is_the_conversion(dtype: Any) -> None:
    x = numbers()
    got = np.asarray(jax.jit(lambda v: collectives.round_for_wire(v, dtype))(x))
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    nan = np.isnan(x)
    assert got.dtype == expected.dtype and np.isnan(got[nan]).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint16), expected[~nan].view(np.uint16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_who_reads_it_back_has_what_was_sent(dtype: Any) -> None:
    x = numbers()
    x = x[np.isfinite(x)]
    sent, read = jax.jit(
        lambda v: (
            collectives.round_for_wire(v, dtype),
            collectives.round_for_wire(v, dtype).astype(jnp.float32),
        )
    )(x)
    np.testing.assert_array_equal(np.asarray(sent).astype(np.float32), np.asarray(read))


@pytest.mark.integration
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e5m2fnuz])
def test_eight_bits_keep_their_range(dtype: Any) -> None:
    every = jnp.arange(256, dtype=jnp.uint8).view(dtype).astype(jnp.float32)
    every = every[jnp.isfinite(every)]
    assert (collectives.round_for_wire(every, dtype).astype(jnp.float32) == every).all()


def test_what_is_not_narrower_is_left_alone() -> None:
    for x, dtype in (
        (jnp.ones(2), jnp.float32),
        (jnp.arange(2), jnp.int32),
        (jnp.ones(2, jnp.bfloat16), jnp.float32),
    ):
        found = str(jax.make_jaxpr(lambda v, d=dtype: collectives.round_for_wire(v, d))(x))
        assert "reduce_precision" not in found


@pytest.mark.mostly_integration("3-weights1")
@pytest.mark.parametrize(("ranks", "weights"), [(3, None), (3, [1, 2, 4]), (7, None)])
def test_average_of_equal_16_bit_params_is_exact(ranks: int, weights: Any) -> None:
    """Parts of the average aren't rounded to 16 bits before they're added."""
    tx = federated_average(optax.identity(), "batch", every=1, weights=weights)
    # All numbers from 2 to 4, and one of a different magnitude.
    for dtype, bits in ((jnp.bfloat16, 7), (jnp.float16, 10)):
        params = jnp.append(2 + jnp.arange(1 << bits) / (1 << (bits - 1)), 0.00302).astype(dtype)

        def step(p: Any) -> Any:
            return optax.apply_updates(p, tx.update(jnp.zeros_like(p), tx.init(p), p)[0])

        many = jnp.stack([params] * ranks)
        np.testing.assert_array_equal(jax.jit(jax.vmap(step, axis_name="batch"))(many), many)


def conversions(jaxpr: Any) -> Iterator[str]:
    """Yields the primitive that produced each float32 that is converted to bfloat16."""
    inner, _ = compat.open_jaxpr(jaxpr)
    makers = {v: eqn.primitive.name for eqn in inner.eqns for v in eqn.outvars}
    for eqn in inner.eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16:
            (source,) = eqn.invars
            yield (
                "a constant"
                if isinstance(source, compat.Literal)
                else makers.get(source, "an argument")
            )
        for sub in compat.sub_jaxprs(eqn):
            yield from conversions(sub)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_no_conversion_alone_rounds(row: Row) -> None:
    tx = row.made(4)

    def update(grads: Any) -> Any:
        return tx.update(grads, tx.init(grads))

    found = list(conversions(jax.make_jaxpr(update, axis_env=list(row.axes(4).items()))(params())))
    assert found and set(found) == {"reduce_precision"}
