"""The mpi4jax wire's only primitive: a region that contains exchanges, without a JAX effect.

mpi4jax uses a JAX effect to keep its calls in order. That has two disadvantages: each call of a
jitted function with such an effect takes hundreds of microseconds, and the function can't be
compiled ahead of time (`benchmarks/wire_call.py`).

So we wrap the mpi4jax calls in a region that has no effect. When JAX lowers the region, we create
an XLA token, which JAX then passes from one mpi4jax call to the next, in equation order, even
through loops and branches. XLA neither drops nor merges the calls, because they're marked as having
side effects. A call of the region takes no longer than that of any small jitted function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

from jaxcross._jax_compat import Jaxpr

region_p = Primitive("exchange_region")
region_p.multiple_results = True


def bind(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Runs the closed `jaxpr`, which contains mpi4jax equations, as one effect-free equation."""
    return region_p.bind(*args, jaxpr=jaxpr)


@region_p.def_abstract_eval
def _abstract(*_avals: Any, jaxpr: Jaxpr) -> Sequence[Any]:
    return jaxpr.out_avals


def _lower(ctx: Any, *args: Any, jaxpr: Jaxpr) -> Any:
    tokens = mlir.TokenSet({effect: stablehlo.create_token() for effect in jaxpr.effects})
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(
        ctx.replace(tokens_in=tokens), *args
    )


def _keep(*args: Any) -> tuple[list[bool], Any]:
    # Dead code elimination must keep the region and all of its operands. Even if this rank doesn't
    # use the result, the other ranks make the exchange, and would wait for this rank forever. In
    # JAX 0.12, the equation is preceded by one more argument than before, so we take the last
    # argument.
    eqn = args[-1]
    return [True] * len(eqn.invars), eqn


mlir.register_lowering(region_p, _lower)
region_p.def_impl(lambda *args, jaxpr: jax.jit(lambda *a: bind(jaxpr, *a))(*args))
pe.dce_rules[region_p] = _keep
