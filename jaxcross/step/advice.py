"""Warnings about steps that are legal but rarely meant."""

from __future__ import annotations

import logging
import warnings

from jaxcross.program.ir import Exchange, Program
from jaxcross.program.mini_steps import repeated_exchanges
from jaxcross.program.trace import Traced

_log = logging.getLogger("jaxcross")


def advise(traced: Traced, program: Program, warned: set[str]) -> None:
    """Warns about exchanges that are missing, inside a loop, or repeated in every mini-step.

    Args:
        traced: The step.
        program: What it was cut into.
        warned: Source lines that were warned about before, however often the step is compiled; added to.
    """
    if not program.exchanges and not program.local_step:
        axes = ", ".join(f"`{n}`" for n, _ in program.axes)
        warnings.warn(
            f"`{program.name}` has no exchange over {axes}: every rank computes alone. If it is a train step, it lacks"
            ' something like `grads = jax.lax.pmean(grads, "batch")`; if it is not, plain `jax.jit` will do.',
            stacklevel=2,
        )
    if not program.is_unit:
        _advise_on_loops(program, warned)
    _advise_on_accumulation(traced, warned)


def _advise_on_loops(program: Program, warned: set[str]) -> None:
    loops: dict[str, list[Exchange]] = {}
    for x in program.exchanges:
        if (loop := dict(x.params).get("loop")) is not None:
            loops.setdefault(loop, []).append(x)
    for loop, exchanges in loops.items():
        if loop in warned:
            continue
        warned.add(loop)
        votes = program.traced.present and any((x.op, x.dtype, x.shape) == ("pmax", "int32", ()) for x in exchanges)
        rounds = (
            " Ranks may be through with it after different numbers of iterations, and vote before each, by 4 bytes,"
            " whether to go on."
        )
        _log.warning(
            "`%s` exchanges inside a %s at %s: the whole loop runs on the exchange lane and hides nothing. Unroll the"
            " loop or move the exchange out of it.%s",
            program.name,
            loop.split()[0],
            exchanges[0].source,
            rounds if votes else "",
        )


def _advise_on_accumulation(traced: Traced, warned: set[str]) -> None:
    """Warns about each `optax.MultiSteps` that exchanges in every mini-step."""
    for source in repeated_exchanges(traced.unflattened, traced.axes, traced.wire):
        if source in warned:
            continue
        warned.add(source)
        _log.warning(
            "`%s` exchanges in every mini-step of `optax.MultiSteps`, at %s: it runs its optimizer each time and keeps"
            " the last result. `jaxcross.exchange.accumulate(optimizer, every=k)` exchanges once for k gradients, with"
            " the same updates to rounding.",
            traced.name,
            source,
        )
