"""The stages of a step as users see them. This is the only file that knows all passes.

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
from dataclasses import fields
from typing import Any, final

import jax

from jaxcross.errors import CutError
from jaxcross.program import trace
from jaxcross.program.assemble import assemble
from jaxcross.program.compile import ExecutableCache, collectives_to_await, compile_segments
from jaxcross.program.cut import BUCKET_BYTES, Cut, checked_bytes, checked_cut, place_equations
from jaxcross.program.execution import Compiled, live_bytes
from jaxcross.program.graph import Graph
from jaxcross.program.hand_over import on_accelerator
from jaxcross.program.ir import Program, Segment
from jaxcross.program.verify import verify


@final
class Traced(trace.Traced):
    """A step as one flat jaxpr, with the next stage as a method. `Step.trace` returns it."""

    def cut(self, how: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
        """Cuts this step into a verified program.

        See `jaxcross.program.stages.cut` for arguments and errors.
        """
        return cut(self, how, bucket_bytes=bucket_bytes)


def as_stage(traced: trace.Traced) -> Traced:
    """Returns the same traced step as the public class."""
    return Traced(**{f.name: getattr(traced, f.name) for f in fields(traced) if f.init})


def cut(traced: trace.Traced, cut: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """Cuts a traced step into a verified program.

    Does not wait or communicate. The result is the same on every rank.

    Args:
        traced: A step without a `cond` that the host still has to decide (`Traced.undecided` is
            None).
        cut: `"whole"` computes, makes all exchanges, and computes the rest. A number splits the
            exchanges that don't depend on one another into that many collective segments, in the
            order in which their operands become ready. `"auto"` makes one collective segment per 25
            MB of gradients, but at most 8. Ignored if the step calls mpi4jax.
        bucket_bytes: Exchanges smaller than this share flat buffers of up to this size.

    Raises:
        CutError: The host must decide a `cond` first.
        ValueError: `cut` is none of these, or `bucket_bytes` is not a number of bytes.
    """
    if traced.undecided is not None:
        raise CutError(
            "the host decides a conditional at each step: cut one of its "
            f"{traced.undecided.branches} branches, as in `step.trace(...).decide(0).cut()`"
        )
    n_segments = checked_cut(cut)
    limit = checked_bytes(bucket_bytes)
    graph = Graph(traced)
    accelerator = on_accelerator()
    placement = place_equations(graph, n_segments, accelerator=accelerator)
    return verify(assemble(graph, placement, limit, pack_on_device=accelerator))


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
