"""Solvers whose operator exchanges: `jax.lax.custom_linear_solve`, of which `cg`, `gmres` and `bicgstab` are made.

Its equation holds the operator, its transpose and two solvers, for derivatives that JAX has taken by now. What runs is
the solver alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Wire
from jaxcross.program.jaxpr_utils import holds_exchange, rewritten

_NAME = "custom_linear_solve"


def call_solvers(jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire) -> compat.Jaxpr:
    """A jaxpr, closed or open, in which plain calls stand in place of linear solvers that exchange, also in loops."""

    def called(eqn: compat.Equation) -> compat.Equation:
        exchanges = any(holds_exchange(j, axes, wire) for j in compat.sub_jaxprs(eqn))
        return compat.call_of_solver(eqn) if exchanges else eqn

    return rewritten(jaxpr, lambda eqn: eqn.primitive.name == _NAME, called)
