"""Solvers whose operator exchanges: `jax.lax.custom_linear_solve`, of which `cg`, `gmres` and `bicgstab` are made.

Its equation holds the operator, its transpose and two solvers, for derivatives that JAX has taken by now. What runs is
the solver alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross.program.jaxprs import holds_exchange
from jaxcross.program.segments import Wire

_NAME = "custom_linear_solve"


def call_solvers(jaxpr: Any, axes: Mapping[str, int], wire: Wire) -> Any:
    """A jaxpr, closed or open, in which plain calls stand in place of linear solvers that exchange, also in loops."""
    done: dict[int, tuple[Any, Any]] = {}  # by identity; what was replaced is kept, so that its id stays its own

    def called(eqn: Any) -> Any:
        inside = list(compat.sub_jaxprs(eqn))
        if not inside:
            return eqn
        if eqn.primitive.name == _NAME and any(holds_exchange(j, axes, wire) for j in inside):
            eqn = compat.call_of_solver(eqn)
        return compat.map_sub_jaxprs(eqn, replaced) if any(map(_holds_solver, compat.sub_jaxprs(eqn))) else eqn

    def replaced(inner: Any) -> Any:
        if id(inner) not in done:
            done[id(inner)] = inner, compat.replace_eqns(inner, [called(e) for e in inner.eqns], inner.outvars)
        return done[id(inner)][1]

    if not _holds_solver(jaxpr):
        return jaxpr
    inner, _ = compat.open_jaxpr(jaxpr)
    return replaced(inner) if jaxpr is inner else jaxpr.replace(jaxpr=replaced(inner))


def _holds_solver(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == _NAME or any(map(_holds_solver, compat.sub_jaxprs(eqn)))
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns
    )
