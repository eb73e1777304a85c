"""The kinds of jobs that `plan.py` predicts and runs, and which of them run together.

This module has only data and doesn't import any framework.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rivals.cases import RESNET, TOY_LANGUAGE, TOY_RESNET, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A job's step. Jobs of the same kind share the step and its profile.

    Attributes:
        spec: The model.
        cut: As for `crossover`.
        wire: Element type of the gradients on the wire.
        rank_1_batches: How many times as many examples rank 1 has per step. It then computes longer
            than rank 0, as if its processor were slower.
    """

    spec: Spec
    cut: int | str = "whole"
    wire: str = "float32"
    rank_1_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Jobs that run together.

    Attributes:
        kinds: The name of each job's kind.
        rates: The link rates at which the case runs, in megabits per second.
        shares: The shares of `Weighted`. Without shares, the policy is round robin.
        part: Cases of the same part run in turn, along with the same solo runs.
    """

    kinds: tuple[str, ...]
    rates: tuple[int, ...]
    shares: tuple[float, ...] = ()
    part: str


def _language(layers: int, width: int, vocabulary: int, batch_size: int = 4) -> Spec:
    sizes = dict(
        layers=layers, width=width, length=128, batch_size=batch_size, vocabulary=vocabulary
    )
    return Spec(model="transformer", options=tuple(sizes.items()))


_VISION = Spec(model="resnet18", options=(("batch_size", 16), ("image_size", 96), ("classes", 100)))
_LANGUAGE, _LARGE, _SMALL = (
    _language(6, 256, 4096),
    _language(6, 384, 4096),
    _language(2, 192, 1024),
)
SLOW = {25: 64, 100: 16, 200: 8}
"""Maps the rate of a slow link, in Mbit/s, to a batch size for the small model. With this batch
size, a step's exchange takes about twice as long as its computation.
"""
_SLOW = {rate: _language(2, 192, 1024, batch_size) for rate, batch_size in SLOW.items()}
PIECES = (2, 4, 8, 16)
"""The cuts of an unequal pair's large job, in addition to the whole step."""

KINDS: dict[str, Kind] = {
    "language": Kind(spec=_LANGUAGE),
    "language bfloat16": Kind(spec=_LANGUAGE, wire="bfloat16"),
    "language cut in 4": Kind(spec=_LANGUAGE, cut=4),
    "vision": Kind(spec=_VISION),
    "large": Kind(spec=_LARGE),
    **{f"large cut in {pieces}": Kind(spec=_LARGE, cut=pieces) for pieces in PIECES},
    "small": Kind(spec=_SMALL),
    "ResNet-50": Kind(spec=RESNET),
    **{f"batch {SLOW[rate]}": Kind(spec=spec) for rate, spec in _SLOW.items()},
    "language, rank 1 slower": Kind(spec=_LANGUAGE, rank_1_batches=2),
}
RATES = (500, 1000, 2000)
_UNEQUAL = ("large cut in 16", "small")
CASES: dict[str, Case] = {
    "two": Case(part="equal", kinds=("language", "language"), rates=RATES),
    "three": Case(part="equal", kinds=("language", "language", "language"), rates=RATES),
    "mixed": Case(part="equal", kinds=("vision", "language"), rates=RATES),
    "unequal whole": Case(part="unequal", kinds=("large", "small"), rates=(500,)),
    "unequal pieces": Case(part="unequal", kinds=_UNEQUAL, rates=(500,)),
    "unequal shares": Case(part="unequal", kinds=_UNEQUAL, rates=(500,), shares=(1.0, 1.0)),
    "two bfloat16": Case(part="variants", kinds=("language bfloat16",) * 2, rates=(500,)),
    "two cut": Case(part="variants", kinds=("language cut in 4",) * 2, rates=(1000,)),
    "two ResNet-50": Case(part="ResNet-50", kinds=("ResNet-50", "ResNet-50"), rates=(1000,)),
    **{
        f"two, batch {size}": Case(part="slow", kinds=(f"batch {size}",) * 2, rates=(rate,))
        for rate, size in SLOW.items()
    },
    "two, like ranks": Case(part="unlike", kinds=("language", "language"), rates=(1000,)),
    "two, rank 1 slower": Case(
        part="unlike", kinds=("language, rank 1 slower",) * 2, rates=(1000,)
    ),
}
PARTS = ("contention", "equal", "unequal", "pair", "variants", "ResNet-50", "slow", "unlike")
CONTENTION_RATES = (25, 100, 200, 500, 1000)
"""The rates at which contention is measured, by turns."""
ALL_RATES = tuple(sorted({*RATES, *CONTENTION_RATES}))
ESTIMATED = {
    "two": "language",
    "three": "language",
    "two ResNet-50": "ResNet-50",
    **{f"two, batch {size}": f"batch {size}" for size in SLOW.values()},
}
"""Cases of equal jobs -> their kind, whose gain `jaxcross.estimate` predicts."""

_TINY = Spec(model="transformer", options=(*TOY_LANGUAGE.options[:-1], ("vocabulary", 64)))
_TOYS = {
    _LANGUAGE: TOY_LANGUAGE,
    _LARGE: TOY_RESNET,
    _VISION: TOY_RESNET,
    _SMALL: _TINY,
    RESNET: TOY_RESNET,
    **dict.fromkeys(_SLOW.values(), _TINY),
}


def kind_of(name: str, *, smoke: bool) -> Kind:
    """Returns a kind, at toy size if `smoke` is set."""
    kind = KINDS[name]
    return replace(kind, spec=_TOYS[kind.spec]) if smoke else kind
