"""Whether the ranks are about to make the same exchanges, and if not, where they part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


def disagreement(name: str, signatures: Sequence[str]) -> str:
    """The message of an `ExchangeError` for ranks whose signatures differ: two ranks and the first unequal line.

    Args:
        name: The step.
        signatures: `Program.exchange_signature()` of each rank, in rank order.

    Raises:
        ValueError: They are all equal.
    """
    other = next((rank for rank, text in enumerate(signatures) if text != signatures[0]), None)
    if other is None:
        raise ValueError("the signatures are equal")
    lines = zip_longest(signatures[0].splitlines(), signatures[other].splitlines(), fillvalue="(no further exchange)")
    number, (mine, theirs) = next((n, pair) for n, pair in enumerate(lines) if pair[0] != pair[1])
    return (
        f"ranks 0 and {other} exchange different things in `{name}`: exchange {number} is"
        f"\n    rank 0: {mine}\n    rank {other}: {theirs}\n"
        "All ranks must trace the same step with the same shapes; look for a branch on the rank, or unequal batches."
    )
