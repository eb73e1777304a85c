"""The IR: a program is a list of segments and the values that flow between them.

It prints (`str(program)`), parses (`parse`), checks itself (`Program.verify`) and hashes itself twice: `digest`
keys the executable cache of one rank, `exchange_signature` is what all ranks must agree on before the first step.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from jaxcross.errors import CutError, InternalError

Kind = Literal["compute", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One array that one named-axis collective moves between ranks.

    Attributes:
        op: The field's name of the collective: `psum`, `pmax`, `all_gather`, `ppermute`, `mpi.allreduce` ...
        axes: The mesh axes it goes over, in the order the user wrote them.
        dtype: Element type of the operand, as NumPy spells it (`bfloat16` included).
        shape: Shape of the operand on one rank.
        params: What else decides the message: permutation, groups, split and concat dimensions, reduction.
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
        """Elements of the operand on one rank."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the operand on one rank (not the bytes on the wire; `jaxcross.wire` counts those)."""
        return self.count * itemsize(self.dtype)

    def line(self) -> str:
        """The exchange as one line of the signature that ranks compare."""
        extra = "".join(f" {name}={value!r}" for name, value in self.params)
        return f"{self.op} {','.join(self.axes)} {self.dtype}{list(self.shape)}{extra}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aval:
    """Shape and element type of a value."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{'*' if self.weak_type else ''}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One XLA executable.

    Attributes:
        index: Its place in the program; segments are listed in an order in which they may run.
        kind: `compute` runs on the accelerator, `collective` on the host CPU device with the exchanges.
        inputs: Value ids it reads.
        outputs: Value ids it defines.
        dies: Values whose last use is here; they are dropped (and donated, where XLA can use that) after it.
        exchanges: What a collective segment puts on the wire, in order. Empty for compute.
        jaxpr: What it computes: `len(inputs)` invars, `len(outputs)` outvars, closed. A collective segment's
            jaxpr holds the named-axis collective equations themselves. None in a parsed program.
    """

    index: int
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dies: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    jaxpr: Any = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that its exchanges hand to the wire on one rank."""
        return sum(x.nbytes for x in self.exchanges)
