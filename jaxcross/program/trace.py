"""Traces a train step over a rank's own shards, with the axes bound, into one flat jaxpr.

Tracing doesn't use any device or communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import is_cast_outside_of_shard_map
from jaxcross._pytree import hold_static, release_static, static_places, why_not_static
from jaxcross._tracing import tracing
from jaxcross.errors import CutError, clause
from jaxcross.program.conditional import Predicate
from jaxcross.program.cut import BUCKET_BYTES, Cut, cut
from jaxcross.program.flatten import Flattener
from jaxcross.program.ir import Program, RankDecision, Wire
from jaxcross.program.jaxpr_utils import holds_exchange, holds_shard_map, rewritten
from jaxcross.program.shard_map_step import (
    check_no_vmap,
    check_nothing_else,
    is_shard_map,
    trace_shards,
)
from jaxcross.program.step_checks import (
    argument_path,
    check_mesh_axes,
    copy_signature,
    explain_failed_trace,
    remedy_for,
)
from jaxcross.program.wire_types import convert_wire_types


@final
@dataclass(frozen=True, kw_only=True)
class Traced:
    """A step as a flat jaxpr, which `cut` turns into a program. Returned by `Step.trace`.

    Attributes:
        name: Name of the step function.
        axes: Axis name -> size, row-major over ranks.
        jaxpr: Flat, and closed over constants; exchanges are top-level equations.
        consts: Arrays that the step closes over, one for each of the jaxpr's leading inputs.
        in_tree, out_tree: How the arguments `(args, kwargs)` and the results are flattened. Static
            leaves are part of these structures; see `jaxcross._pytree.Static`.
        in_avals: Abstract values of the flat arguments.
        donated: Positions of the flat arguments that the user donates.
        wire: Recognises and performs exchanges.
        commit_flag_inputs: Positions of the flat arguments whose values aren't known until after
            the step's exchanges.
        undecided: A `cond` around an exchange, which the host decides in each step. None once they
            have all been decided.
        decisions: Conditionals whose predicates depend on values alone, keyed by the variable that
            counts how many ranks took which branch.
        present: Variables that are 0 on a rank that contributes zeros to an exchange, and 1
            otherwise.
        until: For each loop that ranks don't vote on, a hash of what determines its number of
            exchanges, keyed by the loop's first result.
        choices: Branches that the host has chosen so far, in order.
        unflattened: The jaxpr before flattening, which `decide` derives the variants from.
        paths: Tree paths of the flat arguments and of the flat results, for messages.
        whole_out_tree: The structure of the results in which static leaves are leaves.
        static_results: The positions of these leaves in `whole_out_tree`, in ascending order, and
            the leaves.
        memo: Results of passes that run only once per step, such as `exchange_labels.labelled`.
    """

    name: str
    axes: Mapping[str, int]
    jaxpr: Any
    consts: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    in_avals: tuple[Any, ...]
    donated: frozenset[int]
    wire: Wire
    commit_flag_inputs: frozenset[int] = frozenset()
    undecided: Predicate | None = None
    decisions: Mapping[Any, RankDecision] = field(default_factory=dict)
    present: frozenset[Any] = frozenset()
    until: Mapping[Any, str] = field(default_factory=dict)
    choices: tuple[int, ...] = ()
    unflattened: Any = field(default=None, repr=False)
    paths: tuple[Sequence[str], Sequence[str]] = field(default=((), ()), repr=False)
    whole_out_tree: Any = field(default=None, repr=False)
    static_results: Sequence[tuple[int, Any]] = field(default=(), repr=False)
    _own: dict[int, tuple[Any, Any]] = field(
        default_factory=dict, repr=False, compare=False
    )  # shared by all variants
    memo: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def cut(self, how: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
        """Cuts this step into a verified program.

        For arguments and errors, see `jaxcross.program.stages.cut`.
        """
        return cut(self, how, bucket_bytes=bucket_bytes)

    def decide(self, choice: int) -> Traced:
        """Returns the variant in which the first undecided `cond` takes branch `choice`."""
        return _flatten(self, (*self.choices, choice))

    def own_consts(self) -> tuple[Any, ...]:
        """Returns copies of `consts`, made once for all cuts and variants. Waits for them.

        Users may write to a NumPy constant at any time. JAX may share the array's memory, or may
        not have read it yet, so that could change what the step computes. Copies rule this out.
        """
        for x in self.consts:
            if id(x) not in self._own:
                self._own[id(x)] = x, jnp.array(x)
        return jax.block_until_ready(tuple(self._own[id(x)][1] for x in self.consts))

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"<Traced step `{self.name}` over {axes}; print() shows the jaxpr>"

    def __str__(self) -> str:
        return str(self.jaxpr)


def trace(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, int],
    wire: Wire,
    donate_argnums: Sequence[int] = (),
    donate_argnames: Sequence[str] = (),
    commit_flag_argnums: Sequence[int] = (),
) -> Traced:
    """Traces `step` once with `axes` bound. Doesn't wait or communicate.

    Args:
        step: Any function that JAX can trace, jitted or not.
        args: Positional arguments: arrays, `jax.ShapeDtypeStruct` objects, or pytrees of these.
        kwargs: Keyword arguments, likewise.
        axes: Axis name -> size.
        wire: Recognises exchanges.
        donate_argnums: Positional arguments whose arrays the step may overwrite.
        donate_argnames: Keyword arguments, likewise.
        commit_flag_argnums: Positional arguments whose values aren't known until after the step's
            exchanges, so no exchange may read them.

    Raises:
        CutError: A leaf of the arguments isn't an array, an axis name is unknown, the step is the
            body of a `shard_map` without the `shard_map` (`pcast`), an array is laid out along an
            axis over ranks, or an exchange is in a place where we can't cut.
    """
    check_arrays(step, args, kwargs or {})
    named: dict[str, Any]
    args, named = hold_static((tuple(args), dict(kwargs or {})))
    leaves, in_tree = jax.tree.flatten((args, named))
    names = sorted(named)  # in the order JAX flattens them
    counts = [len(jax.tree.leaves(a)) for a in (*args, *(named[name] for name in names))]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    # Translate arguments into the positions of their flat leaves.
    donate = (*donate_argnums, *(len(args) + names.index(name) for name in donate_argnames))
    donated = frozenset(p for n in donate for p in range(starts[n], starts[n + 1]))
    flags = frozenset(p for n in commit_flag_argnums for p in range(starts[n], starts[n + 1]))
    avals = tuple(x if isinstance(x, jax.ShapeDtypeStruct) else compat.aval_of(x) for x in leaves)
    box = []

    def flat_step(*flat: Any) -> list[Any]:
        a, k = release_static(jax.tree.unflatten(in_tree, flat))
        results = step(*a, **k)
        _check_results(step_name(step), results)
        held = hold_static(results)
        out, tree = jax.tree.flatten(held)
        paths = [
            f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(held)
        ]
        every, whole_tree = jax.tree.flatten(results)
        static = tuple((n, every[n]) for n in static_places(every, results))
        box.append((tree, paths, whole_tree, static))
        return out

    def named_step(*a: Any, **k: Any) -> list[Any]:
        return flat_step(*jax.tree.leaves((a, k)))

    # Make JAX's errors name the user's function and arguments instead of our wrapper.
    copy_signature(named_step, step)
    try:
        with tracing(axes):
            whole = _trace_whole(flat_step, named_step, args, named, avals, axes, step_name(step))
            whole = _call_solvers(compat.with_plain_equations(whole, axes), axes, wire)
    except Exception as error:
        explain_failed_trace(step, error, step_name(step))
        raise
    whole = convert_wire_types(whole, axes, wire)
    out_tree, results, whole_out_tree, static_results = box[-1]
    given = [argument_path(path) for path, _ in jax.tree.leaves_with_path((args, named))]
    blank = Traced(
        name=step_name(step),
        axes=dict(axes),
        jaxpr=None,
        consts=(),
        in_tree=in_tree,
        out_tree=out_tree,
        whole_out_tree=whole_out_tree,
        static_results=static_results,
        in_avals=avals,
        donated=donated,
        wire=wire,
        commit_flag_inputs=flags,
        unflattened=whole,
        paths=(given, results),
    )
    return _flatten(blank, ())


def _trace_whole(
    flat_step: Callable[..., Any],
    named_step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    avals: Sequence[Any],
    axes: Mapping[str, int],
    name: str,
) -> compat.Jaxpr:
    try:
        whole = jax.make_jaxpr(named_step, axis_env=list(axes.items()))(*args, **kwargs)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise CutError(
            f"`{name}` uses an axis that is not bound: {clause(str(error))}. The axes of this step "
            f"are {', '.join(f'`{a}` of {n}' for a, n in axes.items())}; pass axes= to "
            "jaxcross.crossover, or rename it."
        ) from error
    except Exception as error:
        # A `shard_map` may reject a rank's shards, because it expects global arrays and maybe a
        # mesh.
        shards = trace_shards(flat_step, avals, axes, name)
        if shards is not None:
            return shards
        if is_cast_outside_of_shard_map(error):
            raise CutError(
                f"`{name}` calls `jax.lax.pcast` at {compat.user_line_of(error)}, which only the "
                "body of a `jax.shard_map(check_vma=True)` may do, where JAX inserts the exchanges "
                "of gradients. A bare function has pmap's semantics, in which `psum` transposes to "
                "`psum`, so its gradients would be different numbers. Make the whole step the "
                "`shard_map`: `jax.shard_map(step, in_specs=..., out_specs=...)`. "
                "See docs/explanation/bit-for-bit.md#gradients."
            ) from error
        if "shard_map" in str(error):
            check_no_vmap(flat_step, avals, axes, name)
        raise
    if not is_shard_map(whole, axes):
        if holds_shard_map(whole, axes):
            check_nothing_else(whole, name)
        check_mesh_axes(whole, (args, kwargs), axes, name)
        return whole
    shards = trace_shards(flat_step, avals, axes, name)
    if shards is None:
        check_no_vmap(flat_step, avals, axes, name)
        raise CutError(
            f"it is not known how the `shard_map` of `{name}` splits its arguments, because it "
            "has no `in_specs`, or takes values that the step computes before it. Pass it the "
            "step's own arguments, and a PartitionSpec for each."
        )
    return shards


def check_arrays(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that all leaves are arrays, types of arrays, or static leaves.

    Raises:
        CutError: Some leaf isn't; the message contains its path.
    """
    for path, leaf in jax.tree.leaves_with_path((tuple(args), dict(kwargs))):
        reason = _why_unusable(leaf)
        if reason is not None:
            what = (
                f"a `{type(leaf).__name__}`, which is not an array. It cannot be static either, "
                f"because {reason}"
            )
            if isinstance(leaf, np.ndarray | np.generic):
                what = f"a NumPy array of type `{leaf.dtype}`, which JAX does not have"
            remedy = remedy_for(leaf, (args, kwargs))
            raise CutError(
                f"argument `{argument_path(path)}` of `{step_name(step)}` holds {what}. {remedy}"
            )


def _check_results(name: str, results: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(results):
        reason = _why_unusable(leaf)
        if reason is not None:
            raise CutError(
                f"`result{jax.tree_util.keystr(path)}` of `{name}` is a `{type(leaf).__name__}`, "
                "but a step returns arrays, static leaves, and pytrees of them. It cannot be "
                f"static, because {reason}. Leave it out, and return it from the code that calls "
                f"the step. Otherwise: {remedy_for(leaf, results)}"
            )


def _why_unusable(leaf: object) -> str | None:
    """Returns why a leaf can neither be traced nor held static. None if it can."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or compat.is_array_type(leaf):
        return None
    if isinstance(leaf, np.ndarray | np.generic):
        return f"JAX does not have the type `{leaf.dtype}`"
    return why_not_static(leaf)


def _flatten(base: Traced, choices: tuple[int, ...]) -> Traced:
    # First replay the branches chosen so far. The next conditional is the undecided one.
    remaining = list(choices)
    found = []

    def choose(predicate: Predicate) -> int:
        if remaining:
            return remaining.pop(0)
        found.append(predicate)
        return 0

    inner, _ = compat.open_jaxpr(base.unflattened)
    invars = [compat.new_var(v.aval) for v in inner.invars]
    walker = Flattener(base.axes, base.wire, invars, base.unflattened, choose=choose)
    outs = walker.run(base.unflattened)
    eqns = walker.read(outs)
    read = {a for e in eqns for a in e.invars if not isinstance(a, compat.Literal)}
    read |= {a for a in outs if not isinstance(a, compat.Literal)}
    constvars = [v for v in walker.consts if v in read]
    jaxpr = compat.make_jaxpr_of([*constvars, *invars], outs, eqns, base.unflattened)
    return replace(
        base,
        jaxpr=jaxpr,
        consts=tuple(walker.consts[v] for v in constvars),
        undecided=found[0] if found else None,
        decisions=walker.decisions,
        choices=choices,
        present=frozenset(walker.present),
        until=walker.until,
    )


def step_name(step: Callable[..., Any]) -> str:
    """Returns a step's name for messages.

    For a `functools.partial`, that's the name of the wrapped function.
    """
    inner = getattr(step, "func", step)
    return getattr(step, "__name__", getattr(inner, "__name__", type(step).__name__))


_SOLVER = "custom_linear_solve"


def _call_solvers(jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire) -> compat.Jaxpr:
    """Turns linear solvers whose operator exchanges into plain calls, even inside loops.

    JAX's solvers `cg`, `gmres` and `bicgstab` use `custom_linear_solve`, an equation that contains
    four functions: the operator, its transpose and two solvers. JAX needs them all to differentiate
    the equation, but by the time we get the jaxpr, that has already happened. The step only runs
    one solver, so we replace the equation with a call of that solver.

    Args:
        jaxpr: Closed or open.
        axes: Axis name -> size.
        wire: Recognises exchanges.
    """

    def called(eqn: compat.Equation) -> compat.Equation:
        exchanges = any(holds_exchange(j, axes, wire) for j in compat.sub_jaxprs(eqn))
        return compat.call_of_solver(eqn) if exchanges else eqn

    return rewritten(jaxpr, lambda eqn: eqn.primitive.name == _SOLVER, called)
