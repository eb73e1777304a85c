"""An emulated network link, for machines without a real slow one, and the words for a real one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real

LINK_VARIABLE = "JAXCROSS_LINK"
_MBPS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


@dataclass(frozen=True, slots=True)
class Link:
    """A link that holds each exchange for as long as its bytes need on it, without using a core.

    It shows whether computation hides the exchanges, not how fast a network is: do not quote a
    speed-up from it. The same on every rank.

    Args:
        mbps: The rate in Mbit/s.
        latency_s: Seconds that each exchange takes on top.

    Raises:
        TypeError: An argument is not a number.
        ValueError: The rate is not above 0, the latency is negative, or one is infinite.

    Example:
        >>> Link(500).seconds(62_500_000)
        1.0
    """

    mbps: float
    latency_s: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("mbps", self.mbps), ("latency_s", self.latency_s)):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(
                    f"`{name}` of `Link` must be a number, got {value!r}. `Link.parse` reads a "
                    "text such as `500mbit`."
                )
        if not (0 < self.mbps < math.inf and 0 <= self.latency_s < math.inf):
            raise ValueError(
                f"a link needs a rate above 0 and a latency of 0 or more, not {self!r}"
            )

    def seconds(self, nbytes: int) -> float:
        """Returns how long a message of `nbytes` occupies the link."""
        return self.latency_s + 8e-6 * nbytes / self.mbps

    def __str__(self) -> str:
        return f"emulated link {self.mbps:g}mbit"

    @staticmethod
    def parse(text: str) -> Link | None:
        """Returns the link that a text like `500mbit` or `10gbit` describes; None for `none`.

        Raises:
            ValueError: The text is anything else.
        """
        if text == "none":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
        if match is None:
            raise ValueError(
                f"`{text}` is not a link rate. Write it like `500mbit` or `10gbit`, or `none`."
            )
        return Link(float(match[1]) * _MBPS[match[2]])


_EMULATED: dict[object, Link | None] = {}  # one for each open `with` block, the innermost last


@contextmanager
def emulated_link(link: Link | None) -> Iterator[None]:
    """Emulates a slow network: holds each exchange for as long as it would occupy `link`.

    It applies to the runs that start inside the `with` block in this process, whatever their
    thread, until they end. Their reports say that the link is emulated. Of nested blocks the
    innermost counts, and None emulates nothing. Neither waits nor communicates: enter it on every
    rank, with the same link.

    Raises:
        TypeError: `link` is neither a `Link` nor None.

    Example:
        >>> with jaxcross.lab.emulated_link(jaxcross.Link(500)):  # doctest: +SKIP
        ...     report = jaxcross.run(jobs)
    """
    if link is not None and not isinstance(link, Link):
        raise TypeError(
            f"`link` must be a `Link`, such as `jaxcross.Link(500)`, or None, got {link!r}."
        )
    block = object()
    _EMULATED[block] = link
    try:
        yield
    finally:
        del _EMULATED[block]


def current_link() -> Link | None:
    """Returns the link that runs which start now emulate; None if they emulate nothing."""
    return next(reversed(_EMULATED.values()), None)


def described_link(environ: Mapping[str, str]) -> str:
    """Returns the description of the real link that `JAXCROSS_LINK` gives for reports; empty
    without it.
    """
    return environ.get(LINK_VARIABLE, "").strip()
