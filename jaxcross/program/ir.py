"""Defines the IR: a program is a list of segments and the values that flow between them.

Programs can be printed (`str(program)`), parsed (`text.parse`) and checked (`verify.verify`). This
module contains nothing but plain data, and doesn't depend on any pass.

There are two hashes of a program, for different purposes. Programs on the same rank share
executables if their `digest.program_digest` matches. Before the first step, ranks compare a hash of
their `exchange_signature`, which has to match on all of them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from jaxcross._html import preformatted
from jaxcross.program.lowered import Lowered
from jaxcross.program.order import Order, order_of

Kind = Literal["compute", "collective"]


LAYOUT = "exchanges of each segment: "
"""How the last line of a signature begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An array that a named-axis collective moves between ranks.

    Attributes:
        op: The collective's usual name: `psum`, `pmax`, `all_gather`, `ppermute`, `mpi.allreduce`
            ...
        axes: The mesh axes it goes over, in the order the user wrote them.
        dtype: The operand's element type, as spelled by NumPy (including `bfloat16`).
        shape: The operand's shape on one rank.
        params: Everything else that determines the message: permutation, groups, split and concat
            dimensions, reduction.
        source: The user's line, `file.py:12 (function)`. Not part of any hash.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    params: tuple[tuple[str, Any], ...] = ()
    source: str = field(default="", compare=False)

    @property
    def count(self) -> int:
        """Number of elements in the operand on one rank."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the operand on one rank. `jaxcross.wire` counts the bytes on the wire."""
        return self.count * itemsize(self.dtype)

    @property
    def times(self) -> int:
        """How many times a single step performs the exchange.

        For an exchange inside loops, that's the product of their lengths. A `while` loop counts as
        a single iteration, because we don't know up front how many it will make.
        """
        # Loop parameters are text such as `scan 8`, because signatures are compared and parsed as
        # text.
        lengths = [str(value).split()[-1] for name, value in self.params if name == "loop"]
        return math.prod(int(n) for n in lengths if n.isdigit())

    def line(self) -> str:
        """Formats the exchange as one line of the signature that ranks compare."""
        extra = "".join(f" {name}={value!r}" for name, value in self.params)
        return f"{self.op} {','.join(map(_word, self.axes))} {self.dtype}{list(self.shape)}{extra}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aval:
    """A value's shape and element type."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{'*' if self.weak_type else ''}[{','.join(map(str, self.shape))}]"


class RankDecision(Protocol):
    """A decision that each rank makes based on its own values.

    Along with an exchange, the ranks count how many of them decided each way.
    """

    def mismatch(self, counts: Sequence[float]) -> str | None:
        """Returns an error text if ranks decided differently, or None if they all agreed.

        Args:
            counts: How many ranks decided each way. Failed ranks aren't counted at all.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part of a step that becomes a single XLA executable.

    Attributes:
        index: Position in the program. Segments are listed in an order in which they may run.
        kind: `compute` segments run on the accelerator, if there is one. `collective` segments run
            on the host's CPU device, together with their exchanges. Messages to users call them
            exchange segments.
        inputs: Ids of the values it reads.
        outputs: Ids of the values it defines.
        last_uses: Values that no later segment in the list reads. A value is dropped once all of
            its readers have run, and donated if it can't be read later in any order of the
            segments.
        exchanges: What a collective segment puts on the wire, in order. Empty for compute.
        decisions: Decisions for which a collective segment counts how many ranks decided each way.
        jaxpr: The computation as a closed jaxpr, with `len(inputs)` invars and `len(outputs)`
            outvars; None in a parsed program. The named-axis collectives are still in there as
            equations. A collective segment returns more than its outputs: first, every exchanged
            value that leaves the segment only through an operation that can hide a NaN (see
            `nonfinite.masked_by`), then a count for each decision.
    """

    index: int
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_uses: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    # Not compared, so that a parsed program equals the original.
    decisions: tuple[RankDecision, ...] = field(default=(), compare=False, repr=False)
    jaxpr: Any = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that its exchanges hand to the wire on one rank."""
        return sum(x.nbytes * x.times for x in self.exchanges)

    @property
    def extra_nbytes(self) -> int:
        """Bytes of the results beyond `outputs`."""
        extra = [] if self.jaxpr is None else self.jaxpr.jaxpr.outvars[len(self.outputs) :]
        return sum(v.aval.size * v.aval.dtype.itemsize for v in extra)


class Wire(Protocol):
    """Recognises exchanges in a jaxpr, and performs them when a collective segment runs."""

    def recognise(self, eqn: Any, axes: Mapping[str, int]) -> tuple[Exchange, ...] | None:
        """Returns an `Exchange` per operand if `eqn` moves data over any of `axes`, else None."""
        ...

    def lower(self, jaxpr: Any, axes: Mapping[str, int]) -> Lowered:
        """Returns a compilable form of the closed `jaxpr` that exchanges over the wire."""
        ...

    def coords(self, axes: Mapping[str, int]) -> Mapping[str, int]:
        """Returns this rank's index along each axis."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The work of one step: segments, and the values that flow between them.

    Attributes:
        name: Name of the step function.
        axes: `(name, size)` of every mesh axis, row-major over ranks.
        values: Each value's type. A value's id is its position in here.
        inputs: Ids of the step's inputs: the constants it closes over, followed by its flat
            arguments.
        constants: How many of `inputs` are constants.
        outputs: Ids of the step's flat results.
        donated: Inputs whose arrays the step may overwrite, though not before its last exchange.
        segments: The segments, in an order in which they may run.
        commit_flag_inputs: Inputs that no segment reads before the last exchange, so their values
            may still change up to the commit.
        calls: A hash of all ranks' mpi4jax calls, once the ranks have agreed on them; empty if
            there are no such calls.
        traced: The traced step that the program was cut from, or None in a parsed program.
        order: What must run before each segment, and what each segment may overwrite.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    values: tuple[Aval, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    segments: tuple[Segment, ...]
    constants: int = 0
    donated: frozenset[int] = frozenset()
    commit_flag_inputs: frozenset[int] = field(default=frozenset(), compare=False)
    calls: str = field(default="", compare=False)
    traced: Any = field(default=None, compare=False, repr=False)
    order: Order = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        order = order_of(
            self.segments,
            inputs=frozenset(self.inputs),
            donated=self.donated,
            without_peers=frozenset(s.index for s in self.collectives if self.is_single_rank(s)),
        )
        object.__setattr__(self, "order", order)

    @property
    def local_step(self) -> bool:
        """Whether the host chose a branch without exchanges when another branch has some."""
        return not self.exchanges and self.traced is not None and bool(self.traced.choices)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All of its exchanges, in order."""
        return tuple(x for s in self.segments for x in s.exchanges)

    @property
    def is_unit(self) -> bool:
        """Whether it calls mpi4jax. Its exchanges are then one segment, and may differ by rank."""
        return any(x.op.startswith("mpi.") for x in self.exchanges)

    def is_single_rank(self, segment: Segment) -> bool:
        """Whether a collective segment has no peers, i.e. only exchanges over axes of size 1."""
        sizes = dict(self.axes)
        return all(x.axes and all(sizes.get(a) == 1 for a in x.axes) for x in segment.exchanges)

    @property
    def collectives(self) -> tuple[Segment, ...]:
        """Its collective segments."""
        return tuple(s for s in self.segments if s.kind == "collective")

    def _lines(self) -> list[str]:
        lines = []
        for segment, needs in zip(self.segments, self.order.needs, strict=True):
            ops = "+".join(dict.fromkeys(x.op for x in segment.exchanges))
            what = f" {ops} [{human_bytes(segment.nbytes)}]" if segment.exchanges else ""
            what += ", carried" if segment.index in self.order.carried else ""
            lines.append(
                f"{segment.index} {segment.kind}{what} <- {','.join(map(str, needs)) or 'inputs'}"
            )
        return lines

    def __repr__(self) -> str:
        collective = len(self.collectives)
        compute = len(self.segments) - collective
        return (
            f"<Program `{self.name}`: segments {compute} compute, {collective} collective; print() "
            "lists them>"
        )

    def __str__(self) -> str:
        """Formats the program, one line per segment."""
        axes = ", ".join(f"{n}={s}" for n, s in self.axes)
        return "\n".join([f"program {self.name} over {axes}", *self._lines()])

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def text(self) -> str:
        """Formats everything except the equations. `text.parse` can read it back."""
        lines = [
            f"program {self.name}",
            f"axes {self._axes_text()}",
            f"inputs {_ranges(self.inputs)}",
            f"constants {self.constants}",
            f"donated {_ranges(sorted(self.donated))}",
            f"outputs {_ranges(self.outputs)}",
        ]
        for s, line in zip(self.segments, self._lines(), strict=True):
            lines.append(
                f"{line} | {_ranges(s.inputs)} -> {_ranges(s.outputs)} | dies "
                f"{_ranges(s.last_uses)}"
            )
            lines += [f"    {x.line()}" for x in s.exchanges]
        lines += [f"value {i} {aval}" for i, aval in enumerate(self.values)]
        return "\n".join(lines)

    def exchange_signature(self, *, sources: bool = False) -> str:
        """Returns the text that must be equal on all ranks before the first step.

        It lists all exchanges in order, and how many of them each segment makes, because the wire
        may pack a segment's exchanges into a single message. Ranks, handles and computation are
        left out because they're allowed to differ. So are mpi4jax calls, which is why they are
        represented by a hash of all ranks' lists of calls.

        Args:
            sources: Whether to add a tab and the user's line to each exchange, for error messages.
                `without_sources` removes them.
        """
        if self.is_unit:
            return (
                f"axes {self._axes_text()}\ncalls of mpi4jax "
                f"{self.calls or 'that are not agreed yet'}"
            )
        # Different cuts may make the same exchanges in the same order, yet pack them into different
        # messages.
        layout = ", ".join(str(len(s.exchanges)) for s in self.collectives)
        lines = [f"axes {self._axes_text()}"]
        lines += [
            f"{x.line()}\t{x.source}" if sources and x.source else x.line() for x in self.exchanges
        ]
        return "\n".join([*lines, f"{LAYOUT}{layout}"] if layout else lines)

    def _axes_text(self) -> str:
        return " ".join(f"{_word(n)}={s}" for n, s in self.axes)

    def exchange_hash(self) -> int:
        """Returns `exchange_signature` as 62 bits; see `hash_62`."""
        return hash_62(self.exchange_signature())


def without_sources(signatures: Iterable[str]) -> list[str]:
    """Returns signatures as they're compared between ranks, without the users' lines."""
    return [re.sub("\t.*", "", each) for each in signatures]


def hash_62(text: str) -> int:
    """Hashes a text to 62 bits, so that both the hash and its negative fit into int64.

    Ranks compare hashes with a single exchange, the minimum of `(h, -h)`.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def itemsize(dtype: str) -> int:
    """Returns the bytes per element; a key counts as the 32-bit words it wraps."""
    if dtype.startswith("key<"):
        return 8
    # NumPy doesn't know bfloat16 and narrower types by name.
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def human_bytes(count: int) -> str:
    """Formats a number of bytes, e.g. `26.2 MB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.1f} GB"


def _word(name: str) -> str:
    """Returns an axis name, quoted if `text.parse` couldn't read it back otherwise."""
    return name if re.fullmatch(r"[\w.:/+-]+", name) else repr(name)


def _ranges(ids: Sequence[int]) -> str:
    """Formats ids as ranges in the given order, e.g. `0-3,7`; `-` if there are none."""
    parts: list[list[int]] = []
    for i in ids:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "-"
