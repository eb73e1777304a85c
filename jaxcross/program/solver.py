"""Replaces linear solvers whose operator exchanges by calls: `custom_linear_solve`, as in `cg`,
`gmres`, `bicgstab`.

The equation holds the operator, its transpose and two solvers, for derivatives that JAX has taken
by now. Only the solver runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Wire
from jaxcross.program.jaxpr_utils import holds_exchange, rewritten

_NAME = "custom_linear_solve"


def call_solvers(jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire) -> compat.Jaxpr:
    """Replaces linear solvers that exchange by plain calls in a jaxpr, closed or open, also inside
    loops.
    """

    def called(eqn: compat.Equation) -> compat.Equation:
        exchanges = any(holds_exchange(j, axes, wire) for j in compat.sub_jaxprs(eqn))
        return compat.call_of_solver(eqn) if exchanges else eqn

    return rewritten(jaxpr, lambda eqn: eqn.primitive.name == _NAME, called)
