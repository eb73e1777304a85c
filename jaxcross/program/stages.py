"""The stages of a step as users see them.

    traced = crossover(step).trace(*args)    a flat jaxpr
    program = traced.cut(2)                  segments and the values between them, verified
    compiled = stages.compile(program)       XLA executables
    compiled.execution(leaves)               one step in flight

Each result is plain data that the next stage reads. Nothing here depends on MPI, because the traced
step brings its wire along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcross.program.compile import ExecutableCache, collectives_to_await, compile_segments
from jaxcross.program.cut import cut
from jaxcross.program.execution import Compiled, live_bytes
from jaxcross.program.ir import Program, Segment
from jaxcross.program.trace import Traced, trace

__all__ = ["Traced", "compile", "cut", "trace"]


def compile(  # noqa: A001 (the name of this stage in JAX)
    program: Program,
    inputs: Sequence[object] | None = None,
    *,
    cache: ExecutableCache | None = None,
    host_device: object = None,
    notify: Callable[[Segment], None] | None = None,
) -> Compiled:
    """Compiles every segment.

    Waits for XLA. Communicates only if the wire has to create a communicator.

    Args:
        program: A verified program that was cut from a traced step.
        inputs: The flat arguments, or anything with a shape, a dtype and, if it matters, a
            sharding. Defaults to the traced types.
        cache: Share one cache between all programs that may have equal segments. Defaults to a new
            one.
        host_device: CPU device for collective segments. Defaults to the first one.
        notify: Called with each segment before it's compiled.

    Raises:
        ValueError: The program was parsed from text, so it has no equations.
    """
    if program.traced is None:
        raise ValueError(
            f"program `{program.name}` was read from text and has no equations to compile"
        )
    host = host_device or jax.local_devices(backend="cpu")[0]
    runnables = compile_segments(
        program,
        program.traced.in_avals if inputs is None else inputs,
        cache=ExecutableCache() if cache is None else cache,
        host=host,
        notify=notify,
    )
    # Computed once here, so that a step in flight only has to look things up.
    awaited, overlaps = collectives_to_await(program)
    carried = program.order.carried
    passthroughs = _passthroughs(program)
    return Compiled(
        program=program,
        runnables=runnables,
        passthroughs=passthroughs,
        shared={
            v: len(readers) for v, readers in program.order.readers.items() if len(readers) > 1
        },
        awaited=awaited,
        carried=carried,
        overlaps=overlaps or bool(carried),
        live_bytes=functools.cache(functools.partial(live_bytes, program, runnables, passthroughs)),
        constants=program.traced.own_consts(),
        on_host=_constants_on_host(program, host),
        out_tree=program.traced.out_tree,
    )


def _passthroughs(program: Program) -> tuple[tuple[int, bool], ...]:
    """Returns the positions of results that aren't a segment's own, and whether each may be moved.

    These results are constants, inputs that are returned, and values that are also an earlier
    result. A donated input may be moved, once. The others must be copied, because the caller may
    donate every result that it gets.
    """
    inputs = frozenset(program.inputs)
    taken = set(program.inputs) - program.donated
    found = []
    # `taken` holds the values that already belong to the user or to an earlier result.
    for place, v in enumerate(program.outputs):
        if v in inputs or v in taken:
            found.append((place, v not in taken))
        taken.add(v)
    return tuple(found)


def _constants_on_host(program: Program, host: Any) -> dict[int, Any]:
    """Returns host copies of the constants that collective segments read but that live elsewhere.

    The copies are made once. Compute segments may read the same constant, so it must stay on its
    device as well; without a separate copy, it would be transferred to the host in every step.
    """
    read = {v for segment in program.collectives for v in segment.inputs}
    constants = zip(program.inputs[: program.constants], program.traced.own_consts(), strict=True)
    return {v: jax.device_put(x, host) for v, x in constants if v in read and x.devices() != {host}}
