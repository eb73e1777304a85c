"""The mpi4jax wire's only primitive: a region with exchanges but without a JAX effect.

mpi4jax relies on a JAX effect to keep its calls in order. That has two drawbacks: every call of a
jitted function with such an effect takes hundreds of microseconds, and the function can't be
compiled ahead of time (`benchmarks/wire_call.py`).

So we wrap the mpi4jax calls in a region without any effect. When JAX lowers the region, we create
an XLA token, which JAX then threads through the mpi4jax calls in equation order, even inside loops
and branches. XLA won't drop or merge the calls, because they're marked as having side effects.
Calling the region is as fast as calling any small jitted function.
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
    """Runs a closed `jaxpr` with mpi4jax equations as a single effect-free equation."""
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
    # Keep dead code elimination away from the region and its operands: even if this rank doesn't
    # use the result, the other ranks still perform the exchange and would wait for us forever. JAX
    # 0.12 added another argument before the equation, hence `args[-1]`.
    eqn = args[-1]
    return [True] * len(eqn.invars), eqn


mlir.register_lowering(region_p, _lower)
region_p.def_impl(lambda *args, jaxpr: jax.jit(lambda *a: bind(jaxpr, *a))(*args))
pe.dce_rules[region_p] = _keep
