"""The stages of a step, as users see them; the only file that knows all passes.

    traced = crossover(step).trace(*args)    a flat jaxpr
    program = traced.cut(2)                  segments and the values between them, verified
    compiled = stages.compile(program)       XLA executables
    compiled.execution(leaves)               one step in flight

Each result is plain data that the next stage reads. Nothing here depends on MPI: the wire came with
the traced step.
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
    """A step as one flat jaxpr, as `Step.trace` returns it: `trace.Traced` with the next stage as a
    method.
    """

    def cut(self, how: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
        """Cuts this step into a verified program; `jaxcross.program.stages.cut` has arguments and
        errors.
        """
        return cut(self, how, bucket_bytes=bucket_bytes)


def as_stage(traced: trace.Traced) -> Traced:
    """Returns the same traced step as users get it."""
    return Traced(**{f.name: getattr(traced, f.name) for f in fields(traced) if f.init})


def cut(traced: trace.Traced, cut: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """Cuts a traced step into a verified program. Does not wait or communicate; the result is the
    same on every rank.

    Args:
        traced: A step whose `cond`s the host has decided (`Traced.undecided` is None).
        cut: `"whole"`: before, exchanges, after. A number: also split the exchanges that do not
            depend on one another into that many collective segments, in the order in which their
            operands become ready. `"auto"`: one segment per 25 MB of gradients, 8 at most. Has no
            effect on a step that calls mpi4jax.
        bucket_bytes: Exchanges smaller than this share flat buffers up to this size.

    Raises:
        CutError: The host must decide a `cond` first.
        ValueError: `cut` is not one of these, or `bucket_bytes` is not a number of bytes.
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
    """Compiles every segment. Waits for XLA; communicates only where the wire must create a
    communicator.

    Args:
        program: A verified program that was cut from a traced step.
        inputs: The flat arguments, or anything with shape, dtype and, where it matters, sharding;
            the traced types if None.
        cache: Shared by all programs that may have equal segments; a fresh one if None.
        host_device: CPU device of collective segments; the first one if None.
        notify: Called with each segment before it is compiled.

    Raises:
        ValueError: The program was parsed, so that its equations are unknown.
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
    # Worked out once, so that a step in flight only looks things up.
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
    """Returns the positions of the results that are not a segment's own output, and whether each
    may be moved.

    They are constants, inputs that come back, and values that are an earlier result already. A
    donated input may be moved, once. The others must be copied: the caller may donate every result
    that it gets.
    """
    inputs = frozenset(program.inputs)
    taken = set(program.inputs) - program.donated
    found = []
    # `taken` holds the values that belong to the user or to an earlier result already.
    for place, v in enumerate(program.outputs):
        if v in inputs or v in taken:
            found.append((place, v not in taken))
        taken.add(v)
    return tuple(found)


def _constants_on_host(program: Program, host: Any) -> dict[int, Any]:
    """Returns copies on the host, made once, of those constants that collective segments read and
    that are elsewhere.

    Compute segments may read a constant, too. Without a copy of its own it would go to the host in
    every step.
    """
    read = {v for segment in program.collectives for v in segment.inputs}
    constants = zip(program.inputs[: program.constants], program.traced.own_consts(), strict=True)
    return {v: jax.device_put(x, host) for v, x in constants if v in read and x.devices() != {host}}
