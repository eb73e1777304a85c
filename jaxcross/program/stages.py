"""The stages of a step as users see them.

A step goes through four stages. First, `crossover(step).trace(*args)` traces it to a flat jaxpr.
`traced.cut(2)` then cuts the jaxpr into a program, which consists of segments and the values
between them, and verifies it. `stages.compile(program)` compiles the segments to XLA executables.
Finally, each call of `compiled.execution(leaves)` starts a single step.

Each stage returns plain data for the next stage to read. None of them depends on MPI, because the
traced step refers to an object, the wire, that performs the exchanges.
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

    Waits for XLA. Only communicates if the wire has to create a communicator.

    Args:
        program: A verified program, cut from a traced step.
        inputs: The flat arguments, or anything with a shape, a dtype and (if it matters) a
            sharding. Defaults to the traced types.
        cache: Share this between all programs that may have equal segments. Defaults to a new
            cache.
        host_device: CPU device for collective segments. Defaults to the first CPU device.
        notify: Called with each segment before it's compiled.

    Raises:
        ValueError: The program was parsed from text, so it has no equations.
    """
    if program.traced is None:
        raise ValueError(
            f"Program `{program.name}` cannot be compiled, because it was parsed from text and has "
            "no equations. Compile a program that was cut from a traced step."
        )
    host = host_device or jax.local_devices(backend="cpu")[0]
    runnables = compile_segments(
        program,
        program.traced.in_avals if inputs is None else inputs,
        cache=ExecutableCache() if cache is None else cache,
        host=host,
        notify=notify,
    )
    # Compute these once, so that a step in flight only has to look them up.
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
        out_tree=program.traced.whole_out_tree,
        static_results=program.traced.static_results,
    )


def _passthroughs(program: Program) -> tuple[tuple[int, bool], ...]:
    """Returns the positions of results that no segment computes, and whether each may be moved.

    Some of a step's results aren't computed by any segment: constants, inputs returned unchanged,
    and values already returned as an earlier result. We usually copy these, because if the caller
    donated such a result, the original would be gone as well. Only a donated input may be moved,
    and only once.
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
    """Returns host copies of constants that collective segments read but that live elsewhere.

    Collective segments run on the host, but may read a constant that lives on the accelerator.
    Without a copy on the host, it would be transferred on every step. We can't simply move it
    there, because compute segments may read it as well. The copies are made only once.
    """
    read = {v for segment in program.collectives for v in segment.inputs}
    constants = zip(program.inputs[: program.constants], program.traced.own_consts(), strict=True)
    return {v: jax.device_put(x, host) for v, x in constants if v in read and x.devices() != {host}}
