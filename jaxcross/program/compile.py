"""Compiles a program's segments into XLA executables, which equal segments share across jobs."""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxcross import _jax_compat as compat
from jaxcross.program.digest import segment_key
from jaxcross.program.execution import Runnable
from jaxcross.program.graph import nbytes
from jaxcross.program.hand_over import can_be_pinned, on_device, pinned_memory
from jaxcross.program.ir import Program, Segment, Wire
from jaxcross.program.lowered import Lowered, Traceable, struct_of

V = TypeVar("V")

# How many of the most recently used executables to keep once no job uses them any more, in case an
# identical job comes along later.
MAX_IDLE_EXECUTABLES = 64


@final
class SingleFlightCache(Generic[V]):
    """A thread-safe cache that makes each value only once, even if several threads ask for it.

    Args:
        values: Where to store the values; a new dictionary if None.
    """

    def __init__(self, values: MutableMapping[Hashable, V] | None = None) -> None:
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._values: MutableMapping[Hashable, V] = {} if values is None else values

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Returns the value for `key`, making it if it isn't cached.

        If several threads ask for the same key, the first makes the value while the others wait.
        """
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                return found
            # Making a value usually means compiling, which can take minutes. We only lock this key,
            # so threads that ask for other keys aren't held up.
            key_lock = self._making.setdefault(key, threading.Lock())
        with key_lock:
            # Another thread may have made the value while we were waiting for the lock. If its
            # `make` failed, it's our turn to try.
            with self._lock:
                found = self._values.get(key)
            if found is None:
                found = make()
                with self._lock:
                    self._values[key] = found
                    self._making.pop(key, None)
        return found

    def __len__(self) -> int:
        return len(self._values)


@final
class ExecutableCache:
    """A thread-safe cache of executables, keyed by what they compute, which equal jobs share.

    Executables are freed along with the last job that uses them, so a process can run any number of
    jobs in a row without running out of memory. The exception is the `MAX_IDLE_EXECUTABLES` most
    recently used executables, which we hold on to in case a later job needs them.
    """

    def __init__(self) -> None:
        # These references are weak: only jobs and `_latest` keep an executable alive.
        self._executables = SingleFlightCache[Any](WeakValueDictionary())
        self._latest: OrderedDict[Hashable, object] = OrderedDict()
        self._lock = threading.Lock()
        self.compiled = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the executable for `key`, compiling it if it isn't cached.

        If several threads ask for the same key, the first compiles it while the others wait.
        """

        def counted() -> Any:
            made = make()
            with self._lock:
                self.compiled += 1
            return made

        executable = self._executables.get(key, counted)
        with self._lock:
            self._latest[key] = executable
            self._latest.move_to_end(key)
            if len(self._latest) > MAX_IDLE_EXECUTABLES:
                self._latest.popitem(last=False)
        return executable

    def __len__(self) -> int:
        """Returns the number of executables that are alive."""
        return len(self._executables)


def compile_segments(
    program: Program,
    inputs: Sequence[object],
    *,
    cache: ExecutableCache,
    host: Any,
    notify: Callable[[Segment], None] | None,
) -> tuple[Runnable, ...]:
    """Compiles every segment, or takes its executable from the cache.

    See `stages.compile` for the arguments.
    """
    traced = program.traced
    wire = traced.wire
    coords = dict(traced.wire.coords(traced.axes))
    given = [*map(_sharding, traced.consts), *map(_sharding, inputs)]
    shardings: dict[int, Sharding | None] = dict(zip(program.inputs, given, strict=True))
    # Create all communicators before compiling anything, because this blocks until the other ranks
    # have joined in. If we compiled first and the compiler failed on one rank, that rank would
    # never get as far as creating its communicator, and the others would wait for it forever.
    lowered = {s.index: _lowered(program, s, wire, coords) for s in program.collectives}
    returned = frozenset(program.outputs)
    exchanged = _only_exchanged(program)
    runnables = []
    lent: set[int] = set()  # values in the wire's memory; XLA copies these if they're donated
    for segment, may_donate in zip(program.segments, program.order.donates, strict=True):
        if notify is not None:
            notify(segment)
        sources = tuple(shardings[v] for v in segment.inputs)
        pinned = _pinned_results(segment, sources, exchanged, host)
        donated = _aliasable(program, segment, may_donate - lent, pinned)
        # Segments with equal keys share an executable, so the key covers everything that affects
        # what XLA compiles the segment to, and nothing else. In particular, it ignores names: two
        # jobs can share an executable even if they name their steps and values differently.
        key = (
            segment_key(segment),
            _avals(program, segment.inputs),
            sources,
            donated,
            pinned,
            _owned(program, segment),
            tuple(coords.items()),
            host,
            wire,
            compat.trace_context(),
            program.axes if segment.kind == "collective" else (),
        )
        releases = tuple(v for v in segment.inputs if v not in returned)
        if segment.kind == "compute":
            call = cache.get(
                key, _compute_maker(program, segment, sources, donated, coords, pinned)
            )
            # XLA picks the shardings of a segment's results, and the next segment has to be
            # compiled for exactly these shardings, so we look them up in the executable.
            results = [None] * len(segment.outputs)
            if any(s is not None for s in sources):
                results = list(call.output_shardings)[: len(segment.outputs)]
            results = [
                result if to is None else on_device(to)
                for result, to in zip(results, pinned, strict=True)
            ]
            memory = functools.cache(call.memory_analysis)
            runnables.append(Runnable(segment=segment, releases=releases, call=call, memory=memory))
        else:
            call = cache.get(key, _collective_maker(program, segment, lowered[segment.index], host))
            results = _return_shardings(program, segment, shardings, host)
            moves = any(s is not None for s in results)
            # The wire may return results that are still in its receive buffers. XLA has to copy
            # such a result before overwriting it, so we keep track of them. Results that move to
            # another device don't count, because moving makes a copy anyway. Only the segment's own
            # outputs are moved; additional results stay where they are.
            stays = [to is None or host in to.device_set for to in results]
            places = [n for n in lowered[segment.index].lent if n >= len(stays) or stays[n]]
            lent_here = tuple(segment.outputs[n] for n in places if n < len(stays))
            lent.update(lent_here)
            runnables.append(
                Runnable(
                    segment=segment,
                    releases=releases,
                    call=call,
                    memory=functools.cache(call.memory_analysis),
                    device=host,
                    is_single_rank=program.is_single_rank(segment),
                    through=_through(program, segment, sources, exchanged, host) if moves else None,
                    shardings=tuple(results) if moves else None,
                    lent=lent_here,
                    lent_nbytes=sum(nbytes(segment.jaxpr.jaxpr.outvars[n]) for n in places),
                )
            )
        shardings.update(zip(segment.outputs, results, strict=True))
    return tuple(runnables)


def collectives_to_await(program: Program) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Returns the collective segments that each segment waits for, and whether anything overlaps.

    This is used for steps that run outside of jobs, where compute segments run in list order. A
    segment waits for the collective segments it depends on, or for all of them if it comes after
    the commit. Collective segments that an earlier compute segment has already waited for are left
    out.

    The second result is whether any computation can overlap with an exchange that involves other
    ranks.
    """
    collectives = [s.index for s in program.collectives]
    waited_for = in_flight = 0  # sets of segments, as bits of an integer
    awaited = []
    overlaps = False
    for segment, before in zip(program.segments, program.order.after, strict=True):
        awaited.append(tuple(n for n in collectives if (before & ~waited_for) >> n & 1))
        if segment.kind == "compute":
            waited_for |= before
            overlaps = overlaps or bool(in_flight & ~before)
        elif not program.is_single_rank(segment):
            in_flight |= 1 << segment.index
    return tuple(awaited), overlaps


def bind_axis_index(jaxpr: compat.Jaxpr, coords: Mapping[str, int]) -> compat.Jaxpr:
    """Replaces `axis_index` with this rank's coordinates in an open jaxpr and its inner jaxprs."""
    env: dict[Any, Any] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        invars = [env.get(a, a) if not isinstance(a, compat.Literal) else a for a in eqn.invars]
        if eqn.primitive.name == "axis_index" and eqn.params["axis_name"] in coords:
            (out,) = eqn.outvars
            env[out] = compat.new_literal(np.int32(coords[eqn.params["axis_name"]]), out.aval)
            continue
        eqn = eqn.replace(invars=invars)
        if any(_asks_index(j, coords) for j in compat.sub_jaxprs(eqn)):
            eqn = compat.map_sub_jaxprs(eqn, lambda j: bind_axis_index(j, coords))
        eqns.append(eqn)
    outvars = [env.get(a, a) if not isinstance(a, compat.Literal) else a for a in jaxpr.outvars]
    return compat.replace_eqns(jaxpr, eqns, outvars)


def _asks_index(jaxpr: compat.Jaxpr, coords: Mapping[str, int]) -> bool:
    return any(
        (eqn.primitive.name == "axis_index" and eqn.params["axis_name"] in coords)
        or any(_asks_index(j, coords) for j in compat.sub_jaxprs(eqn))
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns
    )


def _compute_maker(
    program: Program,
    segment: Segment,
    places: Sequence[Any],
    donate: tuple[int, ...],
    coords: Mapping[str, int],
    pinned: Sequence[Sharding | None],
) -> Callable[[], Any]:
    def make() -> jax.stages.Compiled:
        function = jaxpr_as_fun(compat.close(bind_axis_index(segment.jaxpr.jaxpr, coords)))

        def compute(*args: Any) -> list[Any]:
            # Add a small result that's never donated, which tells the driver when the segment has
            # finished. The other results are no use for this: by then, they may all have been
            # donated to later segments.
            return [*function(*args), jnp.zeros((), jnp.uint32)]

        compute.__name__ = f"{program.name}_{segment.index}"
        structs = _structs(segment, places)
        if all(place is None for place in pinned):
            return (
                jax.jit(compute, donate_argnums=donate, keep_unused=True).lower(*structs).compile()
            )
        # If only exchanges read a result, have the accelerator write it straight into pinned host
        # memory, which it can do while it's still computing the other results.
        jitted = jax.jit(
            compute, donate_argnums=donate, keep_unused=True, out_shardings=[*pinned, None]
        )
        return jitted.lower(*structs).compile()

    return make


def _lowered(program: Program, segment: Segment, wire: Wire, coords: Mapping[str, int]) -> Lowered:
    return wire.lower(
        compat.close(bind_axis_index(segment.jaxpr.jaxpr, coords)), dict(program.axes)
    )


def _collective_maker(
    program: Program, segment: Segment, lowered: Lowered, host: Any
) -> Callable[[], Any]:
    def make() -> object:
        # On a single rank, most exchanges just return their operand. Don't compile anything for
        # these: even an empty executable would cost us a dispatch and some copies.
        if program.is_single_rank(segment):
            order = _forwarded(program, segment, lowered)
            if order is not None:
                return _Forward(order)
        # Commit to the host's CPU device, so that the segment never occupies the accelerator.
        anywhere = host.client.platform == jax.default_backend() and host == jax.local_devices()[0]
        place = None if anywhere else SingleDeviceSharding(host)
        structs = _structs(segment, [place] * len(segment.inputs))
        return lowered.compile(
            structs, name=f"{program.name}_{segment.index}", host=host, place=place
        )

    return make


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Forward:
    """Returns some of its arguments, standing in for an executable that would only copy them."""

    order: tuple[int, ...]

    def __call__(self, *args: Any) -> list[Any]:
        return [args[i] for i in self.order]

    def memory_analysis(self) -> None:
        return None


def _forwarded(program: Program, segment: Segment, lowered: Lowered) -> tuple[int, ...] | None:
    """Returns which argument can serve as each result, or None if that's impossible.

    On a single rank, a sum over ranks is just its operand, so a segment that does nothing else can
    simply return its arguments. This doesn't work if the segment does any computing, or if the user
    or another segment still needs the arguments: overwriting the results later on would destroy the
    arguments as well.
    """
    if not (isinstance(lowered, Traceable) and _owned(program, segment)):
        return None
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in segment.jaxpr.jaxpr.invars]
    inner, _ = compat.open_jaxpr(jax.make_jaxpr(lowered)(*avals))
    place = {v: n for n, v in enumerate(inner.invars)}
    if inner.eqns or any(isinstance(v, compat.Literal) or v not in place for v in inner.outvars):
        return None
    order = tuple(place[v] for v in inner.outvars)
    return order if len(set(order)) == len(order) else None


def _owned(program: Program, segment: Segment) -> bool:
    """Whether neither the user nor any other segment reads this segment's inputs after it."""
    return frozenset(segment.inputs) <= frozenset(segment.last_uses).difference(program.inputs)


def _structs(segment: Segment, places: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [
        struct_of(var.aval, place)
        for var, place in zip(segment.jaxpr.jaxpr.invars, places, strict=True)
    ]


def _avals(program: Program, ids: Sequence[int]) -> tuple[Any, ...]:
    return tuple(program.values[v] for v in ids)


def _aliasable(
    program: Program, segment: Segment, allowed: frozenset[int], pinned: Sequence[Sharding | None]
) -> tuple[int, ...]:
    """Returns the positions of the inputs to donate.

    XLA warns about donated buffers that it can't use, so we only donate an input if there's an
    output of the same shape and type. JAX hands the buffer to the first such output, even if that
    output goes to pinned memory and can't reuse it. So if any matching output is in pinned memory,
    we don't donate the input at all.
    """
    kinds = [(program.values[v].shape, program.values[v].dtype) for v in segment.outputs]
    elsewhere = {kind for kind, to in zip(kinds, pinned, strict=True) if to is not None}
    free = Counter(kind for kind in kinds if kind not in elsewhere)
    taken = []
    own = frozenset(program.inputs)
    # Each output can reuse the buffer of only one donated input. If there are several candidates,
    # prefer arrays that the user has donated on purpose; JAX then reports any later use of them.
    for position, v in sorted(enumerate(segment.inputs), key=lambda item: item[1] not in own):
        kind = (program.values[v].shape, program.values[v].dtype)
        if v in allowed and free[kind]:
            free[kind] -= 1
            taken.append(position)
    return tuple(sorted(taken))


def _sharding(value: object) -> Sharding | None:
    """Returns the sharding that an argument is committed to, or None if JAX is free to place it."""
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return None  # a traced type has an abstract mesh, if any
    if isinstance(value, jax.Array) and not getattr(value, "committed", False):
        return None
    return value.sharding


def _only_exchanged(program: Program) -> frozenset[int]:
    """Returns the results of compute segments that are only read by collective segments.

    Leaves out results that can't be put in pinned memory.
    """
    collectives = {s.index for s in program.collectives}
    readers = program.order.readers
    made = {v for s in program.segments if s.kind == "compute" for v in s.outputs} - {
        *program.outputs
    }
    return frozenset(
        v
        for v in made
        if collectives.issuperset(readers.get(v, ())) and can_be_pinned(program.values[v])
    )


def _pinned_results(
    segment: Segment, sources: Sequence[Sharding | None], exchanged: frozenset[int], host: Any
) -> tuple[Sharding | None, ...]:
    """Returns the pinned memory that each result of a compute segment is written to.

    This is None for a result that's read by anything other than an exchange.
    """
    if segment.kind != "compute" or exchanged.isdisjoint(segment.outputs):
        return (None,) * len(segment.outputs)
    memory = pinned_memory([s for s in sources if s is not None], host)
    return tuple(memory if v in exchanged else None for v in segment.outputs)


def _through(
    program: Program,
    segment: Segment,
    sources: Sequence[Sharding | None],
    made: frozenset[int],
    host: Any,
) -> tuple[Sharding | None, ...]:
    """Returns the pinned memory, if any, through which each operand is copied to the host."""
    memory = pinned_memory([s for s in sources if s is not None], host)
    return tuple(
        memory if can_be_pinned(program.values[v]) and v not in made else None
        for v in segment.inputs
    )


def _return_shardings(
    program: Program, segment: Segment, sharding: Mapping[int, Any], host: Any
) -> list[Any]:
    """Returns the sharding of each result of a collective segment.

    Exchanges run on the host's single CPU device. Afterwards, each result is sent to where the
    operand of the same shape came from, which is where the next segment expects it. A result whose
    shape matches no operand is replicated over the operands' mesh or, if they don't have a mesh,
    gets the first operand's sharding. If no operand has a sharding at all, results go to the
    accelerator, if there is one.
    """
    sources = [(program.values[v], sharding[v]) for v in segment.inputs]
    placed = [s for _, s in sources if s is not None]
    if not placed:
        accelerator = jax.local_devices()[0]
        return [None if accelerator == host else SingleDeviceSharding(accelerator)] * len(
            segment.outputs
        )
    meshes = [s.mesh for s in placed if isinstance(s, NamedSharding)]
    fallback = NamedSharding(meshes[0], PartitionSpec()) if meshes else placed[0]
    # Go backwards, so that the first of several operands with the same shape wins.
    by_shape = {aval.shape: s for aval, s in reversed(sources) if s is not None}
    return [by_shape.get(program.values[v].shape, fallback) for v in segment.outputs]
