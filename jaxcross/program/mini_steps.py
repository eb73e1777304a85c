"""Finds exchanges in every mini-step of `optax.MultiSteps`, which only uses the last result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Wire
from jaxcross.program.jaxpr_utils import holds_exchange

# `MultiSteps.update` calls `lax.cond(skip, _skip_update, _do_update, ...)`. The second branch
# contains nothing of the step but the optimizer, so an exchange in it is made by the optimizer.
_UPDATE = re.compile(r"optax[/\\]transforms[/\\]_accumulation\.py:.*\(MultiSteps\.update\)$")
_DO_UPDATE = re.compile(r"optax[/\\]transforms[/\\]_accumulation\.py:.*_do_update\)$")
_LIBRARIES = re.compile(r"[/\\](optax|jaxcross[/\\]exchange)[/\\]")


def repeated_exchanges(
    jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire, outer: Sequence[compat.Equation] = ()
) -> Iterator[str]:
    """Yields the user's line of each `optax.MultiSteps` that exchanges in more than one mini-step.

    Args:
        jaxpr: Open or closed, not flat.
        axes: Axis name -> size.
        wire: Recognises exchanges.
        outer: The equations that contain `jaxpr`, the outermost first. An inner equation's stack
            may lack the lines that called it, so the user's line may be found only in theirs.
    """
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        inside = list(compat.sub_jaxprs(eqn))
        path = (*outer, eqn)
        if not (
            eqn.primitive.name == "cond" and any(map(_UPDATE.search, compat.stack_of(eqn)[:1]))
        ):
            for inner in inside:
                yield from repeated_exchanges(inner, axes, wire, path)
        elif any(holds_exchange(j, axes, wire) for j in inside) and not any(
            map(_is_one_step, inside)
        ):
            stack = [line for e in reversed(path) for line in compat.stack_of(e)]
            yield next((line for line in stack if not _LIBRARIES.search(line)), stack[0])


def _is_one_step(branch: compat.Jaxpr) -> bool:
    """Whether a branch of `MultiSteps.update` completes its cycle in every mini-step, i.e. k = 1.

    `_do_update` then compares `mini_step` with the literal 0.
    """
    return any(
        eqn.primitive.name == "eq"
        and any(isinstance(a, compat.Literal) and a.val == 0 for a in eqn.invars)
        and any(_DO_UPDATE.search(line) for line in compat.stack_of(eqn)[:1])
        for eqn in compat.open_jaxpr(branch)[0].eqns
    )
