"""An emulated network link, for machines without a real slow one."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that holds each exchange for at least `latency_s + bytes / rate_bytes_per_s`, without
    using a core.

    It shows whether computation hides the exchanges, not how fast a network is: do not quote a
    speed-up from it. The same on every rank.
    """

    rate_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate_bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(
                f"a link needs a rate above 0 and a latency of 0 or more, not {self!r}"
            )

    def seconds(self, nbytes: int) -> float:
        """Returns how long a message of `nbytes` occupies the link."""
        return self.latency_s + nbytes / self.rate_bytes_per_s

    def __str__(self) -> str:
        return f"emulated link {self.rate_bytes_per_s * 8 / 1e6:g}mbit"

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
        return Link(rate_bytes_per_s=float(match[1]) * _UNITS[match[2]] / 8)
