"""Replaces linear solvers whose operator exchanges, e.g. `cg`, `gmres` and `bicgstab`, by calls.

These use `custom_linear_solve`, an equation that holds the operator, its transpose and two solvers.
JAX needs all of them only to differentiate, which has already happened when we get the jaxpr. Only
the solver runs, so a call of the solver is enough.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Wire
from jaxcross.program.jaxpr_utils import holds_exchange, rewritten

_NAME = "custom_linear_solve"


def call_solvers(jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire) -> compat.Jaxpr:
    """Replaces linear solvers that exchange by plain calls, even inside loops.

    Args:
        jaxpr: Closed or open.
        axes: Axis name -> size.
        wire: Recognises exchanges.
    """

    def called(eqn: compat.Equation) -> compat.Equation:
        exchanges = any(holds_exchange(j, axes, wire) for j in compat.sub_jaxprs(eqn))
        return compat.call_of_solver(eqn) if exchanges else eqn

    return rewritten(jaxpr, lambda eqn: eqn.primitive.name == _NAME, called)
