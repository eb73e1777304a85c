"""The one primitive of the wire: a stretch of a program that holds exchanges, called like an
ordinary operation.

mpi4jax orders its calls by a JAX effect, and a jitted function with that effect costs hundreds of
microseconds a call and cannot be compiled ahead of time (`benchmarks/wire_call.py`). The region has
no effect of its own: when it is lowered it makes an XLA token, and JAX threads that through the
mpi4jax calls inside, in equation order, loops and branches included. The calls are marked as having
side effects, so XLA neither drops nor merges them. One call costs what any small jitted function
costs.
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
    """Run the closed `jaxpr`, which holds mpi4jax equations, as one equation without effects."""
    return region_p.bind(*args, jaxpr=jaxpr)


@region_p.def_abstract_eval
def _abstract(*_avals: Any, jaxpr: Jaxpr) -> Sequence[Any]:
    return jaxpr.out_avals


def _lower(ctx: Any, *args: Any, jaxpr: Jaxpr) -> Any:
    tokens = mlir.TokenSet({effect: stablehlo.create_token() for effect in jaxpr.effects})
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(
        ctx.replace(tokens_in=tokens), *args
    )


def _keep(*asked: Any) -> tuple[list[bool], Any]:
    # The peers take part whether or not this rank reads the result. JAX 0.12 asks of what is used
    # and what lives.
    eqn = asked[-1]
    return [True] * len(eqn.invars), eqn


mlir.register_lowering(region_p, _lower)
region_p.def_impl(lambda *args, jaxpr: jax.jit(lambda *a: bind(jaxpr, *a))(*args))
pe.dce_rules[region_p] = _keep
