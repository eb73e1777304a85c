"""Runs all ranks of a step in one process, in lockstep, without MPI.

Use this module to test on a single machine whether a step computes what it should. You can run a
cut program on all ranks (`run_program`), and compare the results with those of the `vmap` oracle
(`vmap_oracle`), which knows nothing about cuts, segments or wires: it's just the uncut step under
`jax.vmap`, leaving the exchanges to JAX itself. The `LocalRanks` class can be used wherever a
`Wire` is expected.

XLA may round differently depending on which equations it compiles together. So `run_program` and
`run_jaxpr` evaluate every equation of the jaxpr on its own, which lets you compare the results of
two programs bit for bit if they contain the same equations, even in a different order. Nothing in
this module waits or communicates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross._pytree import hold_static, is_key, release_static
from jaxcross._tracing import tracing
from jaxcross.errors import ExchangeError
from jaxcross.program import Exchange, Program, Segment, Traceable, Traced
from jaxcross.wire import (
    LOCAL_PRIMITIVES,
    RankGrid,
    group_of,
    make_rank_grid,
    names_axis,
    recognise,
)

__all__ = ["LocalRanks", "over_ranks", "run_program", "vmap_oracle"]

_CALLS = INLINED | {"shard_map"}
_NO_OPS = LOCAL_PRIMITIVES | {"pcast"}


def __dir__() -> list[str]:
    return [*__all__]


@final
class LocalRanks:
    """A `Wire` whose ranks are all in this process.

    A wire is the component that implements exchanges. This wire lets a single rank run without the
    others: its `lower` method returns a function that replaces each exchange with a local
    computation, whose result is what this rank would receive if every other rank sent the same
    values as this rank.

    Args:
        rank: The rank whose results `lower` computes.
    """

    __slots__ = ("_rank",)

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank

    def recognise(self, eqn: Any, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
        """Returns the equation's exchanges over `axes`, or None, in the same way as a real wire."""
        return recognise(eqn, axes)

    def lower(self, jaxpr: Any, axes: Mapping[str, int]) -> Traceable:
        """Returns `jaxpr` as a function for this rank, if all ranks have the same operands."""
        function = vmapped(jaxpr_as_fun(jaxpr), axes, in_axes=None)
        coords = tuple(self.coords(axes).values())
        return Traceable(lambda *args: [x[coords] for x in function(*args)])

    def coords(self, axes: Mapping[str, int]) -> dict[str, int]:
        """Returns this rank's index along each axis."""
        mesh = make_rank_grid(axes, rank=self._rank, size=math.prod(axes.values()))
        return dict(zip(mesh.names, mesh.coords, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalRanks) and self._rank == other._rank

    def __hash__(self) -> int:
        return hash(self._rank)


def vmapped(
    function: Callable[..., Any], axes: Mapping[str, int], in_axes: int | None = 0
) -> Callable[..., Any]:
    """Returns `function` wrapped in one `jax.vmap` per axis, the first axis outermost.

    While it's being traced, the exchanges in it perform the same checks as in a step.
    """

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with tracing():
            return function(*args, **kwargs)

    mapped: Callable[..., Any] = traced
    for name, size in reversed(list(axes.items())):
        mapped = jax.vmap(mapped, in_axes=in_axes, axis_name=name, axis_size=size)
    return mapped


def vmap_oracle(
    step: Callable[..., Any], axes: Mapping[str, int], args_per_rank: Sequence[Sequence[Any]]
) -> list[Any]:
    """Computes a step on all ranks with JAX alone, using compiled `vmap` calls, nested over ranks.

    Args:
        step: A function with named-axis collectives over `axes`. They can't have
            `axis_index_groups`, because `vmap` doesn't support these.
        axes: The size of each axis, by name. Ranks are in row-major order.
        args_per_rank: The positional arguments of each rank, in rank order.

    Returns:
        The step's result on each rank, as NumPy arrays.
    """
    return over_ranks(step, axes)(args_per_rank)


def over_ranks(
    step: Callable[..., Any], axes: Mapping[str, int]
) -> Callable[[Sequence[Sequence[Any]]], list[Any]]:
    """Returns a `vmap_oracle` for repeated calls, which is compiled only once per set of shapes.

    Args:
        step: As for `vmap_oracle`.
        axes: As for `vmap_oracle`.

    Returns:
        A function that takes `args_per_rank` and returns the step's result on each rank.
    """
    sizes = tuple(axes.values())

    def held_step(*args: Any) -> Any:
        return hold_static(step(*release_static(args)))

    compiled = jax.jit(vmapped(held_step, axes))

    def grid(*parts: Any) -> Any:
        if is_key(parts[0]):
            return jnp.stack(parts).reshape(*sizes, *parts[0].shape)
        return np.stack([np.asarray(jnp.asarray(p)) for p in parts]).reshape(
            *sizes, *np.shape(parts[0])
        )

    def one(x: Any, place: tuple[Any, ...]) -> Any:
        return x[place] if is_key(x) else np.asarray(x)[place]

    def call(args_per_rank: Sequence[Sequence[Any]]) -> list[Any]:
        out = compiled(*jax.tree.map(grid, *map(hold_static, args_per_rank)))
        places = [np.unravel_index(r, sizes) for r in range(math.prod(sizes))]
        return [
            release_static(jax.tree.map(functools.partial(one, place=place), out))
            for place in places
        ]

    return call


def decide(traced: Traced, leaves: Sequence[Any]) -> Traced:
    """Returns the variant of a traced step for these flat arguments, given the host's decisions."""
    while traced.undecided is not None:
        inputs = [jnp.asarray(leaves[p]) for p in traced.undecided.inputs]
        (index,) = jaxpr_as_fun(traced.undecided.jaxpr)(*inputs)
        traced = traced.decide(min(max(int(index), 0), traced.undecided.branches - 1))
    return traced


def run_program(
    program: Program,
    leaves_per_rank: Sequence[Sequence[Any]],
    *,
    compute: Callable[..., Any] | None = None,
) -> list[list[Any]]:
    """Runs one step of a program on all ranks, in lockstep.

    This also catches programs that free values too early. A program declares after which segment a
    value is no longer needed, and that's when we delete it. If a later segment still reads it,
    there's an error.

    Args:
        program: The program of a traced and cut step.
        leaves_per_rank: The flat arguments of each rank, without constants.
        compute: A function that evaluates a compute segment on all ranks. It's called with the
            segment, the axes and the arguments of each rank, and returns the results of each rank.
            If None, segments are evaluated one equation at a time.

    Returns:
        Each rank's flat results.

    Raises:
        ExchangeError: The ranks decided differently, e.g. took different branches. A real step
            would raise the same error on all ranks.
    """
    axes = dict(program.axes)
    envs = [
        dict(zip(program.inputs, (*program.traced.consts, *leaves), strict=True))
        for leaves in leaves_per_rank
    ]
    mismatches: list[str | None] = []
    for segment in program.segments:
        args = [[env[v] for v in segment.inputs] for env in envs]
        if segment.kind == "compute" and compute is not None:
            results = compute(segment, axes, args)
        else:
            results = run_jaxpr(segment.jaxpr, axes, args)
        for outs in results if segment.decisions else ():
            counts = outs[-len(segment.decisions) :]
            mismatches += [
                d.mismatch(np.asarray(n).tolist())
                for d, n in zip(segment.decisions, counts, strict=True)
            ]
        for env, outs in zip(envs, results, strict=True):
            for v in segment.last_uses:
                del env[v]
            env.update(zip(segment.outputs, outs[: len(segment.outputs)], strict=True))
    if any(mismatches):
        raise ExchangeError(next(filter(None, mismatches)))
    return [[env[v] for v in program.outputs] for env in envs]


class ComputeUnderVmap:
    """Runs a compute segment on all ranks as a single XLA executable.

    Faster than evaluating each equation on its own, but the results aren't bitwise identical.
    """

    def __init__(self) -> None:
        # Compiled functions, keyed by the `id` of the segment's jaxpr. Each entry also holds a
        # reference to the jaxpr itself to keep it alive, because Python could otherwise give the
        # same id to another jaxpr.
        self._calls: dict[int, Any] = {}

    def __call__(
        self, segment: Segment, axes: Mapping[str, int], args: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Returns each rank's results."""
        function = jaxpr_as_fun(segment.jaxpr)
        if not segment.inputs:
            return [list(jax.jit(function)()) for _ in args]
        _, call = self._calls.setdefault(
            id(segment.jaxpr), (segment.jaxpr, over_ranks(function, axes))
        )
        return call(args)


def run_jaxpr(
    jaxpr: Any, axes: Mapping[str, int], args_per_rank: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Runs a jaxpr on all ranks, one equation at a time.

    Equations with an exchange are evaluated for all ranks together, and all others for each rank
    separately.

    Args:
        jaxpr: The jaxpr.
        axes: The size of each axis, by name. Ranks are in row-major order.
        args_per_rank: The arguments of each rank, in rank order.
    """
    size = math.prod(axes.values())
    meshes = [make_rank_grid(axes, rank=r, size=size) for r in range(size)]
    return _evaluate(jaxpr, meshes, [list(args) for args in args_per_rank])


def _evaluate(
    jaxpr: Any, meshes: Sequence[RankGrid], args: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    inner, consts = compat.open_jaxpr(jaxpr)
    variables = [*inner.constvars, *inner.invars]
    envs: list[dict[Any, Any]] = [dict(zip(variables, [*consts, *a], strict=True)) for a in args]

    def read(env: Mapping[Any, Any], atom: Any) -> Any:
        if not isinstance(atom, compat.Literal):
            return env[atom]
        aval: Any = atom.aval
        return jnp.asarray(atom.val, dtype=aval.dtype)

    for eqn in inner.eqns:
        values = [[read(env, a) for a in eqn.invars] for env in envs]
        for env, outs in zip(envs, _equation(eqn, meshes, values), strict=True):
            env.update(zip(eqn.outvars, outs, strict=True))
    return [[read(env, a) for a in inner.outvars] for env in envs]


def _equation(
    eqn: Any, meshes: Sequence[RankGrid], values: Sequence[list[Any]]
) -> Sequence[Sequence[Any]]:
    """Returns the results of one equation on each rank."""
    name = eqn.primitive.name
    axes = meshes[0].sizes
    exchanges = recognise(eqn, axes)
    if exchanges is not None:
        columns = [
            _exchange(x, meshes, [np.asarray(v[n]) for v in values], eqn.outvars[n].aval)
            for n, x in enumerate(exchanges)
        ]
        return list(zip(*columns, strict=True))
    if name == "axis_index" and names_axis(eqn, axes):
        return [[jnp.int32(mesh.index(eqn.params["axis_name"]))] for mesh in meshes]
    if name in _NO_OPS and names_axis(eqn, axes):
        return values
    if name in _CALLS:
        (body, *_) = compat.sub_jaxprs(eqn)
        return _evaluate(body, meshes, values)
    if name == "cond":
        return _cond(eqn, meshes, values)
    if name == "scan":
        return _scan(eqn, meshes, values)
    if name == "while":
        return _while(eqn, meshes, values)
    return [compat.bind_equation(eqn, v, eqn.params) for v in values]


def _cond(
    eqn: Any, meshes: Sequence[RankGrid], values: Sequence[list[Any]]
) -> Sequence[Sequence[Any]]:
    branches = eqn.params["branches"]
    taken = [min(max(int(v[0]), 0), len(branches) - 1) for v in values]
    results: dict[int, list[Any]] = {}
    for way in sorted(set(taken)):  # raises if an exchange needs a rank that took another branch
        places = [p for p, t in enumerate(taken) if t == way]
        outs = _evaluate(
            branches[way], [meshes[p] for p in places], [values[p][1:] for p in places]
        )
        results.update(zip(places, outs, strict=True))
    return [results[p] for p in range(len(values))]


def _scan(
    eqn: Any, meshes: Sequence[RankGrid], values: Sequence[list[Any]]
) -> Sequence[Sequence[Any]]:
    params = eqn.params
    n_consts, n_carry = compat.scan_counts(eqn)
    length = params["length"]
    consts = [v[:n_consts] for v in values]
    carry = [v[n_consts : n_consts + n_carry] for v in values]
    xs = [v[n_consts + n_carry :] for v in values]
    stacks: list[dict[int, list[Any]]] = [{} for _ in values]
    for i in reversed(range(length)) if params["reverse"] else range(length):
        args = [[*c, *k, *(x[i] for x in x_)] for c, k, x_ in zip(consts, carry, xs, strict=True)]
        for rank, outs in enumerate(_evaluate(params["jaxpr"], meshes, args)):
            carry[rank] = list(outs[:n_carry])
            stacks[rank][i] = list(outs[n_carry:])
    avals = [v.aval for v in eqn.outvars[n_carry:]]
    return [
        [
            *c,
            *(
                jnp.stack([s[i][n] for i in range(length)])
                if length
                else jnp.zeros(a.shape, a.dtype)
                for n, a in enumerate(avals)
            ),
        ]
        for c, s in zip(carry, stacks, strict=True)
    ]


def _while(
    eqn: Any, meshes: Sequence[RankGrid], values: Sequence[list[Any]]
) -> Sequence[Sequence[Any]]:
    params = eqn.params
    n_cond = params["cond_nconsts"]
    n_body = params["body_nconsts"]
    cond_consts = [v[:n_cond] for v in values]
    body_consts = [v[n_cond : n_cond + n_body] for v in values]
    carry = [v[n_cond + n_body :] for v in values]
    places = list(range(len(values)))
    # Each rank leaves the loop when its own condition is false. If other ranks carry on and still
    # need it for an exchange in the loop, the exchange raises an error.
    while True:
        here = [meshes[p] for p in places]
        more = _evaluate(params["cond_jaxpr"], here, [[*cond_consts[p], *carry[p]] for p in places])
        active = {
            p: jnp.asarray(continues)
            for p, (continues,) in zip(places, more, strict=True)
            if jnp.any(continues)
        }
        places = [*active]
        if not places:
            return carry
        here = [meshes[p] for p in places]
        outs = _evaluate(params["body_jaxpr"], here, [[*body_consts[p], *carry[p]] for p in places])
        # If the user's step applies `vmap` to the loop, the condition is an array with one element
        # per batch item. The loop then runs until all elements are false, and items whose own
        # condition is already false keep their values.
        for p, new in zip(places, outs, strict=True):
            masks = [
                jnp.reshape(active[p], active[p].shape + (1,) * (jnp.ndim(x) - active[p].ndim))
                for x in new
            ]
            carry[p] = [
                jnp.where(m, x, y) if m.ndim else x
                for m, x, y in zip(masks, new, carry[p], strict=True)
            ]


def _exchange(
    exchange: Exchange, meshes: Sequence[RankGrid], xs: list[np.ndarray], aval: Any
) -> list[Any]:
    """Returns the result of one exchange on each rank.

    Sums are computed in rank order, and for floats with fewer than 32 bits, in float32.
    """
    params = dict(exchange.params)
    positions = params.get("positions", ())
    if exchange.op in ("psum", "pmax", "pmin") and positions:
        local = {"psum": np.sum, "pmax": np.max, "pmin": np.min}[exchange.op]
        xs = [local(x, axis=positions).astype(x.dtype) for x in xs]
    outs = []
    by_rank = {mesh.rank: x for mesh, x in zip(meshes, xs, strict=True)}
    for mesh in meshes:
        group = mesh.group(*group_of(exchange, mesh))
        absent = [rank for rank in group if rank not in by_rank]
        if absent:
            raise ValueError(
                f"`{exchange.op}`: rank {mesh.rank} enters this exchange, but ranks {absent} of "
                f"its group {[*group]} are in another branch or have left the loop. All ranks that "
                "exchange with one another must enter the exchange at the same time."
            )
        parts = [by_rank[r] for r in group]
        outs.append(
            jnp.asarray(
                _combine(exchange.op, parts, group.index(mesh.rank), params), dtype=aval.dtype
            )
        )
    return outs


def _combine(
    op: str, parts: Sequence[np.ndarray], me: int, params: Mapping[str, Any]
) -> np.ndarray:
    if op == "psum":
        return _sum(parts)
    if op in ("pmax", "pmin"):
        return functools.reduce(np.maximum if op == "pmax" else np.minimum, parts)
    if op == "all_gather":
        join = np.concatenate if params["tiled"] else np.stack
        return join(parts, axis=params["dimension"])
    if op == "reduce_scatter":
        total = _sum(parts)
        if params["tiled"]:
            return np.split(total, len(parts), axis=params["dimension"])[me]
        return np.take(total, me, axis=params["dimension"])
    if op == "all_to_all":
        mine = [np.split(p, len(parts), axis=params["split_axis"])[me] for p in parts]
        return np.concatenate(mine, axis=params["concat_axis"])
    if op == "ppermute":
        source = next((s for s, d in params["perm"] if d == me), None)
        return np.zeros_like(parts[me]) if source is None else parts[source]
    if op == "pbroadcast":
        return parts[params["source"]]
    raise NotImplementedError(
        f"`LocalRanks` does not support the exchange `{op}`. Test this step with `mpirun`."
    )


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    dtype = parts[0].dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return functools.reduce(np.add, [p.astype(np.float32) if narrow else p for p in parts]).astype(
        dtype
    )
