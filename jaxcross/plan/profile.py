"""`Profile`: what one step of a job takes, segment by segment, measured while the job ran alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxcross.errors import clause
from jaxcross.interleave.step_graph import StepGraph

FORMAT = 1
MAX_SEGMENTS = 10_000
MAX_FILE_BYTES = 10_000_000
MAX_INTEGER = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The cost of a job's step, measured alone on some ranks and some link.

    Attributes:
        name: The job.
        graph: Kinds and dependences of the step's segments, and the bytes that each hands to the wire.
        seconds: Seconds of each segment: of the device for a computation, of the link for an exchange, without waiting
            for other ranks.
        host_s: Seconds between two steps in which the job's thread is at work: input, logging.
        ranks: The ranks that it was measured on.
        link: The link between them, in words.
        mbit_per_s: The rate of that link; None if unknown.
        peak_bytes: Device memory at the fullest moment of a step, arguments included; None if unknown.
        boundary_bytes: The most device memory that stays in use between two segments; None if unknown.

    Raises:
        ValueError: The numbers do not fit the graph, or are negative or not finite.
    """

    name: str
    graph: StepGraph
    seconds: tuple[float, ...]
    host_s: float = 0.0
    ranks: int = 1
    link: str = ""
    mbit_per_s: float | None = None
    peak_bytes: int | None = None
    boundary_bytes: int | None = None

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.graph.kinds):
            raise ValueError(f"`{self.name}` has {len(self.graph.kinds)} segments and {len(self.seconds)} times")
        if not self.seconds:
            raise ValueError(f"`{self.name}` has no segments")
        numbers = [*self.seconds, self.host_s, self.mbit_per_s or 0, self.peak_bytes or 0, self.boundary_bytes or 0]
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.ranks < 1:
            raise ValueError(f"the numbers of `{self.name}` must be finite and not negative")

    @classmethod
    def whole(cls, name: str, *, compute_s: float, exchange_s: float, nbytes: int = 0, ranks: int = 1) -> Self:
        """Returns the profile of an uncut step: its computation, then one exchange, then an update that takes no time.

        Raises:
            ValueError: A time is negative or not finite.
        """
        graph = StepGraph(
            kinds=("compute", "collective", "compute"),
            needs=((), (0,), (1,)),
            after_commit=frozenset({2}),
            nbytes=(0, nbytes, 0),
        )
        return cls(name=name, graph=graph, seconds=(compute_s, exchange_s, 0.0), ranks=ranks)

    @property
    def compute_s(self) -> float:
        """Seconds of device time a step: c."""
        return self._sum("compute")

    @property
    def exchange_s(self) -> float:
        """Seconds of the link a step: m."""
        return self._sum("collective")

    def _sum(self, kind: str) -> float:
        return math.fsum(s for s, own in zip(self.seconds, self.graph.kinds, strict=True) if own == kind)

    def to_json(self, path: str | Path) -> Path:
        """Writes the profile; `load` reads it back without loss."""
        path = Path(path)
        path.write_text(json.dumps(self.as_data(), allow_nan=False, indent=1))
        return path

    def as_data(self) -> dict[str, Any]:
        """Returns plain data, as in the file."""
        graph = self.graph
        return {
            "format": FORMAT,
            "name": self.name,
            "segments": [
                {
                    "kind": kind,
                    "needs": [*graph.needs[i]],
                    "seconds": self.seconds[i],
                    "nbytes": graph.nbytes[i] if graph.nbytes else 0,
                    "after_commit": i in graph.after_commit,
                }
                for i, kind in enumerate(graph.kinds)
            ],
            "local_step": graph.local_step,
            "host_s": self.host_s,
            "ranks": self.ranks,
            "link": self.link,
            "mbit_per_s": self.mbit_per_s,
            "peak_bytes": self.peak_bytes,
            "boundary_bytes": self.boundary_bytes,
        }

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file that `to_json` wrote.

        Raises:
            ValueError: The file holds something else, or is larger than a profile can be.
            OSError: The file cannot be read.
        """
        path = Path(path)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            return cls.from_data(json.loads(path.read_text()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"`{path}` is not a profile of jaxcross: {clause(str(error))}.") from error

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Returns the profile of what `as_data` returned.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError(f"this version reads profiles of format {FORMAT}")
        segments = _of_type(data, "segments", list)
        if not 1 <= len(segments) <= MAX_SEGMENTS:
            raise ValueError(f"a step has 1 to {MAX_SEGMENTS} segments, not {len(segments)}")
        if not all(isinstance(segment, Mapping) for segment in segments):
            raise ValueError("a segment is a table of its kind, needs, seconds, nbytes and after_commit")
        kinds = [_of_type(segment, "kind", str) for segment in segments]
        if not set(kinds) <= {"compute", "collective"}:
            raise ValueError(f"a segment is `compute` or `collective`, got {sorted(set(kinds))}")
        needs = [_of_type(segment, "needs", list) for segment in segments]
        if not all(type(need) is int for several in needs for need in several):
            raise ValueError("`needs` lists numbers of segments")
        graph = StepGraph(
            kinds=tuple(kinds),  # type: ignore[arg-type]
            needs=tuple(map(tuple, needs)),
            after_commit=frozenset(i for i, s in enumerate(segments) if _of_type(s, "after_commit", bool)),
            nbytes=tuple(_of_type(segment, "nbytes", int) for segment in segments),
            local_step=_of_type(data, "local_step", bool),
        )
        if any(nbytes < 0 for nbytes in graph.nbytes):
            raise ValueError("a segment sends a negative number of bytes")
        return cls(
            name=_of_type(data, "name", str),
            graph=graph,
            seconds=tuple(float(_of_type(segment, "seconds", int, float)) for segment in segments),
            host_s=float(_of_type(data, "host_s", int, float)),
            ranks=_of_type(data, "ranks", int),
            link=_of_type(data, "link", str),
            mbit_per_s=_of_type(data, "mbit_per_s", int, float, type(None)),
            peak_bytes=_of_type(data, "peak_bytes", int, type(None)),
            boundary_bytes=_of_type(data, "boundary_bytes", int, type(None)),
        )


def _of_type(table: Mapping[str, Any], key: str, *types: type) -> Any:
    """Returns an entry that has one of these types; a boolean is no number."""
    if key not in table:
        raise ValueError(f"`{key}` is missing")
    if type(table[key]) not in types:
        raise ValueError(f"`{key}` is {table[key]!r:.60}")
    if isinstance(table[key], int) and abs(table[key]) > MAX_INTEGER:
        raise ValueError(f"`{key}` is larger than any number of a profile")
    return table[key]
