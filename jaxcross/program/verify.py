"""Checks that a program is well formed: how values flow, and where its exchanges are."""

from __future__ import annotations

from jaxcross.errors import InternalError
from jaxcross.program.ir import Program, Segment
from jaxcross.program.jaxpr_utils import holds_exchange

_REPORT = "This is a bug in jaxcross, please report it."


def verify(program: Program) -> Program:
    """Checks all values that segments pass along, and returns the program.

    Doesn't wait or communicate.

    Raises:
        InternalError: The program isn't well formed. The message shows the offending segment and
            its neighbours.
    """
    defined = set(program.inputs)
    returned = frozenset(program.outputs)
    dead: set[int] = set()
    for place, segment in enumerate(program.segments):

        def fail(cause: str, at: int = place) -> None:
            raise InternalError(
                f"program `{program.name}` is not well formed: {cause}. {_REPORT}\n"
                f"{_around(program, at)}"
            )

        if segment.index != place:
            fail(f"segment {segment.index} is at position {place}")
        for v in segment.inputs:
            if v not in defined:
                fail(f"value {v} is read before it is defined")
            if v in dead:
                fail(f"value {v} is read after its last use")
        for v in segment.outputs:
            if v in defined:
                fail(f"value {v} is defined twice")
            if not 0 <= v < len(program.values):
                fail(f"value {v} has no type")
        defined.update(segment.outputs)
        for v in segment.last_uses:
            if v in dead or v not in defined:
                fail(f"value {v} is freed twice, or before it is defined")
            if v in returned:
                fail(f"value {v} is freed, but the step returns it")
            if v not in segment.inputs:
                fail(f"value {v} is freed where it is not read")
        dead.update(segment.last_uses)
        if segment.kind == "compute" and (segment.exchanges or _holds_exchange(program, segment)):
            fail(f"compute segment {segment.index} contains an exchange")
        if segment.kind == "collective" and not segment.exchanges:
            fail(f"collective segment {segment.index} contains no exchange")
        if segment.jaxpr is not None and len(segment.jaxpr.jaxpr.invars) != len(segment.inputs):
            fail(
                f"segment {segment.index} has {len(segment.inputs)} inputs, but its jaxpr takes "
                f"{len(segment.jaxpr.jaxpr.invars)} arguments"
            )
        more = (
            0 if segment.jaxpr is None else len(segment.jaxpr.jaxpr.outvars) - len(segment.outputs)
        )
        if more < 0 or (more and segment.kind == "compute"):
            fail(
                f"segment {segment.index} has {len(segment.outputs)} outputs, but its jaxpr "
                f"returns {len(segment.outputs) + more} results"
            )
    for v in program.outputs:
        if v not in defined:
            raise InternalError(
                f"program `{program.name}` is not well formed: result {v} is never defined. "
                f"{_REPORT}"
            )
    # Every value must be freed by its last reader, except for the step's inputs and results.
    unfreed = defined - dead - set(program.outputs) - set(program.inputs)
    if unfreed:
        raise InternalError(
            f"program `{program.name}` is not well formed: values {sorted(unfreed)[:8]} are never "
            f"freed. {_REPORT}"
        )
    return program


def _holds_exchange(program: Program, segment: Segment) -> bool:
    if program.traced is None or segment.jaxpr is None:
        return False
    return holds_exchange(segment.jaxpr.jaxpr, dict(program.axes), program.traced.wire)


def _around(program: Program, place: int) -> str:
    lines = str(program).splitlines()[
        -len(program.segments) :
    ]  # the text ends with one line per segment
    return "\n".join(
        f"{'-->' if i == place else '   '} {line}"
        for i, line in enumerate(lines)
        if abs(i - place) <= 2
    )
