"""Emulates a slow network link on machines that don't have one, and describes a real link."""

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
    """An emulated network link: each exchange takes as long as its bytes would take on the link.

    This lets you check on a single machine whether exchanges overlap with computation. Use the same
    link on every rank.

    Don't quote speed-ups measured with an emulated link, because it isn't a model of a real
    network. For example, an exchange that's waiting for the emulated link doesn't occupy a core,
    whereas a real exchange does.

    Args:
        mbps: The rate in Mbit/s.
        latency_s: Additional time per exchange, in seconds.

    Raises:
        TypeError: An argument isn't a number.
        ValueError: The rate isn't above 0, the latency is negative, or one of them is infinite.

    Example:
        >>> Link(500).seconds(62_500_000)
        1.0
    """

    mbps: float
    latency_s: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("mbps", self.mbps), ("latency_s", self.latency_s)):
            if isinstance(value, bool) or not isinstance(value, Real):
                hint = " `Link.parse` reads a text such as `500mbit`." if name == "mbps" else ""
                raise TypeError(f"`{name}` of `Link` must be a number, got {value!r}.{hint}")
        if not (0 < self.mbps < math.inf and 0 <= self.latency_s < math.inf):
            raise ValueError(
                "`mbps` of a `Link` must be above 0, `latency_s` must be at least 0, and both must "
                f"be finite, got {self!r}"
            )
        # The ranks compare their links as text. Convert the numbers to floats, or `Link(500)` and
        # `Link(500.0)` would count as different.
        for name in ("mbps", "latency_s"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def seconds(self, nbytes: int) -> float:
        """Returns how many seconds a message of `nbytes` occupies the link."""
        return self.latency_s + 8e-6 * nbytes / self.mbps

    def __str__(self) -> str:
        latency = f", {1000 * self.latency_s:g} ms" if self.latency_s else ""
        return f"emulated link {self.mbps:g}mbit{latency}"

    @staticmethod
    def parse(text: str) -> Link | None:
        """Parses a text such as `500mbit` or `10gbit`, and returns the link, or None for `none`.

        Raises:
            ValueError: The text isn't a rate in kbit, mbit or gbit, or `none`.
        """
        if text == "none":
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
        if match is None:
            raise ValueError(
                f"`{text}` is not a link rate. Write it like `500mbit` or `10gbit`, or `none`."
            )
        return Link(float(match[1]) * _MBPS[match[2]])


_EMULATED: dict[object, Link | None] = {}  # one per open `with` block, the innermost last


@contextmanager
def emulated_link(link: Link | None) -> Iterator[None]:
    """Emulates a slow network: holds each exchange for as long as it would occupy `link`.

    The link applies to every run that begins inside the `with` block, in any thread of this
    process, and for the whole run. Such a run's report says that its link was emulated. If you nest
    these blocks, the innermost block wins; pass None to turn off emulation inside an outer block.
    Entering a block doesn't involve any communication, so make sure that every rank enters it with
    the same link.

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
    """Returns the link that a run would emulate if it began now, or None."""
    return next(reversed(_EMULATED.values()), None)


def described_link(environ: Mapping[str, str]) -> str:
    """Returns the user's description of the real link, from `JAXCROSS_LINK`; "" if not set."""
    return environ.get(LINK_VARIABLE, "").strip()
