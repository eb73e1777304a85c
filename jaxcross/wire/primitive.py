"""The wire's only primitive: a region that contains exchanges, called like any other operation.

mpi4jax keeps its calls in order by a JAX effect. A jitted function with this effect costs hundreds
of microseconds per call and can't be compiled ahead of time (`benchmarks/wire_call.py`). The region
itself has no effect. When it is lowered, it creates an XLA token, and JAX threads this token
through the mpi4jax calls inside, in equation order, including those in loops and branches. The
calls are marked as having side effects, so XLA neither drops nor merges them. A call of the region
then costs no more than a call of any small jitted function.
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


def _keep(*asked: Any) -> tuple[list[bool], Any]:
    # Dead code elimination must keep the region and all of its operands: the other ranks exchange
    # whether or not this rank reads the result. JAX 0.12 passes one argument more than earlier
    # versions, before the equation.
    eqn = asked[-1]
    return [True] * len(eqn.invars), eqn


mlir.register_lowering(region_p, _lower)
region_p.def_impl(lambda *args, jaxpr: jax.jit(lambda *a: bind(jaxpr, *a))(*args))
pe.dce_rules[region_p] = _keep
