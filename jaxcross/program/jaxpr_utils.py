"""Queries jaxprs, rewrites their equations, and drops equations that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Exchange, Wire

V = TypeVar("V")


def holds(jaxpr: compat.Jaxpr, concerns: Callable[[compat.Equation], bool]) -> bool:
    """Whether a jaxpr, or any jaxpr inside it, has an equation that `concerns` accepts."""
    return any(
        concerns(eqn) or any(holds(j, concerns) for j in compat.sub_jaxprs(eqn))
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns
    )


def holds_exchange(
    jaxpr: compat.Jaxpr,
    axes: Mapping[str, int],
    wire: Wire,
    *,
    only: Callable[[Exchange], bool] = lambda _: True,
) -> bool:
    """Whether a jaxpr, or any jaxpr inside it, makes an exchange that `only` accepts."""
    return holds(jaxpr, lambda eqn: any(map(only, wire.recognise(eqn, axes) or ())))


def holds_shard_map(jaxpr: compat.Jaxpr, axes: Mapping[str, int]) -> bool:
    """Whether a jaxpr, or any jaxpr inside it, has a `shard_map` along any of `axes`."""
    return holds(jaxpr, lambda eqn: is_shard_map(eqn, axes))


def forward(
    jaxpr: compat.Jaxpr,
    args: Sequence[V],
    rule: Callable[[compat.Equation, Sequence[V]], Sequence[V]],
    *,
    constant: V,
) -> list[V]:
    """Propagates a property of values from a jaxpr's inputs to its results.

    Follows calls to other functions as well.

    Args:
        jaxpr: Open or closed.
        args: Each input's property.
        rule: Computes the properties of an equation's results from those of its operands.
        constant: The property of constants.
    """
    inner, _ = compat.open_jaxpr(jaxpr)
    known = dict.fromkeys(inner.constvars, constant) | dict(zip(inner.invars, args, strict=True))

    def of(atom: compat.Atom) -> V:
        return constant if isinstance(atom, compat.Literal) else known[atom]

    for eqn in inner.eqns:
        operands = [of(a) for a in eqn.invars]
        called = (
            next(compat.sub_jaxprs(eqn), None) if eqn.primitive.name in compat.INLINED else None
        )
        if called is not None and len(compat.open_jaxpr(called)[0].invars) == len(operands):
            results: Sequence[V] = forward(called, operands, rule, constant=constant)
        else:
            results = rule(eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [of(a) for a in inner.outvars]


def rewritten(
    jaxpr: compat.Jaxpr,
    concerns: Callable[[compat.Equation], bool],
    change: Callable[[compat.Equation], compat.Equation],
    *,
    enters: Callable[[compat.Equation], bool] = lambda _: True,
) -> compat.Jaxpr:
    """Changes some of a jaxpr's equations, including those inside loops and calls.

    Args:
        jaxpr: Open or closed. Returned as is if `concerns` doesn't accept anything in it.
        concerns: Accepts the equations to change.
        change: Returns the replacement for an accepted equation. Equations inside the replacement
            are changed, too.
        enters: Whether to change the equations inside an equation.
    """
    # Remember what each inner jaxpr was replaced with. That way, a jaxpr shared by several
    # equations is rewritten only once and stays shared. The keys are ids, so hold a reference to
    # the original jaxpr, too: once it's freed, Python may reuse its id for another jaxpr.
    done: dict[int, tuple[compat.Jaxpr, compat.Jaxpr]] = {}

    def changed(eqn: compat.Equation) -> compat.Equation:
        eqn = change(eqn) if concerns(eqn) else eqn
        inside = enters(eqn) and any(holds(j, concerns) for j in compat.sub_jaxprs(eqn))
        return compat.map_sub_jaxprs(eqn, replaced) if inside else eqn

    def replaced(inner: compat.Jaxpr) -> compat.Jaxpr:
        if id(inner) not in done:
            done[id(inner)] = (
                inner,
                compat.replace_eqns(inner, [changed(e) for e in inner.eqns], inner.outvars),
            )
        return done[id(inner)][1]

    if not holds(jaxpr, concerns):
        return jaxpr
    inner, _ = compat.open_jaxpr(jaxpr)
    return replaced(inner) if jaxpr is inner else jaxpr.replace(jaxpr=replaced(inner))


def is_shard_map(eqn: compat.Equation, axes: Mapping[str, int]) -> bool:
    """Whether an equation maps over shards along any of `axes`."""
    return eqn.primitive.name == "shard_map" and any(
        a in axes for a in eqn.params["mesh"].axis_names
    )


def drop_unread(
    eqns: Sequence[compat.Equation], outs: Sequence[compat.Atom]
) -> list[compat.Equation]:
    """Returns, in order, the equations that `outs` depend on and those with a real effect."""
    live = {a for a in outs if not isinstance(a, compat.Literal)}
    kept: list[compat.Equation] = []
    for eqn in reversed(eqns):
        lasting = any(not compat.is_named_axis_effect(e) for e in eqn.effects)
        if lasting or any(v in live for v in eqn.outvars):
            kept.append(eqn)
            live.update(a for a in eqn.invars if not isinstance(a, compat.Literal))
    return kept[::-1]


def ends_on_zeros(eqn: compat.Equation, present: Collection[compat.Atom]) -> bool:
    """Whether an equation is sure to end on a rank whose operands are all zero.

    That's the case if every loop inside it has a fixed length or a vote.

    Args:
        eqn: An equation of a flat jaxpr, where `jaxcross.program.lockstep` has already rewritten
            loops with a vote.
        present: Variables that are 0 on such a rank and 1 elsewhere. Every vote takes one of them
            as an operand.
    """
    here = [
        n for n, a in enumerate(eqn.invars) if not isinstance(a, compat.Literal) and a in present
    ]
    if eqn.primitive.name == "while":
        return bool(here)
    for jaxpr in compat.sub_jaxprs(eqn):
        inner, _ = compat.open_jaxpr(jaxpr)
        # Only `scan` passes its operands to the body in the same order.
        passed = {inner.invars[n] for n in here} if eqn.primitive.name == "scan" else ()
        if not all(ends_on_zeros(e, passed) for e in inner.eqns):
            return False
    return True
