"""What is raced: the jobs of each case and the rivals of each kind of process. Plain data; imports
no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RANKS = 2
WARM_UP = 2
"""Steps before any measured one: the first of them compile, and all of them get memory that later
ones keep.
"""
EVERY = 16
"""Local steps of rivals that do not exchange in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One job: which model, at which size. Jobs of equal specs are alike."""

    model: str
    options: tuple[tuple[str, int], ...]

    def sizes(self) -> dict[str, int]:
        return dict(self.options)


def _spec(model: str, **options: int) -> Spec:
    return Spec(model=model, options=tuple(options.items()))


RESNET = _spec("resnet50", batch_size=4, image_size=224, classes=1000)
LANGUAGE = _spec("transformer", layers=6, width=384, length=128, batch_size=4, vocabulary=4096)
TOY_RESNET = _spec("resnet8", batch_size=2, image_size=32, classes=8)
TOY_LANGUAGE = _spec("transformer", layers=1, width=64, length=16, batch_size=2, vocabulary=256)

CASES: dict[str, tuple[Spec, ...]] = {
    "two": (RESNET, RESNET),
    "mixed": (RESNET, LANGUAGE),
    "three": (RESNET, RESNET, RESNET),
    "one": (RESNET,),
    "four": (RESNET, RESNET, RESNET, RESNET),
}
_TOYS = {RESNET: TOY_RESNET, LANGUAGE: TOY_LANGUAGE}


def jobs_of(case: str, smoke: bool, image_size: int | None = None) -> tuple[Spec, ...]:
    """The case's jobs; images of another size than usual where it is given and the jobs have
    any.
    """
    jobs = [_TOYS[spec] if smoke else spec for spec in CASES[case]]
    if image_size is not None:
        jobs = [_with_images(spec, image_size) for spec in jobs]
    return tuple(jobs)


def _with_images(spec: Spec, size: int) -> Spec:
    return _spec(spec.model, **{k: size if k == "image_size" else v for k, v in spec.options})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One way to run a case's jobs.

    Attributes:
        name: As on the command line.
        team: Which program's processes run it.
        at_once: Whether the jobs' own processes run at the same time; else one after the other.
        variant: Told to the processes: how their jobs step.
        framework: Whose compute time counts as its own.
        overlaps_itself: Whether one job's exchange may run beside the same job's compute.
        wire: Element type on the wire.
        cases: `many` jobs, `one`, `any`, or a case's name.
    """

    name: str
    team: str
    at_once: bool = False
    variant: str = "plain"
    framework: str = "jax"
    overlaps_itself: bool = False
    wire: str = "float32"
    cases: str = "any"


def _with_k(name: str, **facts: Any) -> tuple[Rival, Rival]:
    return Rival(name=name, **facts), Rival(name=f"{name}-k", at_once=True, cases="many", **facts)


_TORCH: dict[str, Any] = {"team": "ddp", "framework": "torch", "overlaps_itself": True}
_BF16: dict[str, Any] = {"variant": "bfloat16", "wire": "bfloat16"}
RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        *_with_k("fused", team="fused"),
        *_with_k("gloo", team="gloo"),
        *_with_k("ddp", **_TORCH),
        *_with_k("ddp-bf16", **_TORCH, **_BF16),
        Rival(name="sequential", team="crossed", variant="sequential", cases="many"),
        Rival(name="crossover", team="crossed", variant="crossover", cases="many"),
        Rival(name="crossover-mpi4py", team="crossed-mpi4py", variant="crossover", cases="many"),
        Rival(
            name="crossover-cut",
            team="crossed",
            variant="crossover-cut",
            overlaps_itself=True,
            cases="many",
        ),
        Rival(
            name="crossover-bf16",
            team="crossed",
            variant="crossover-bf16",
            wire="bfloat16",
            cases="many",
        ),
        Rival(
            name="crossover-shares",
            team="crossed",
            variant="crossover-shares",
            overlaps_itself=True,
            cases="mixed",
        ),
        Rival(
            name="crossover-shares-bf16",
            team="crossed",
            variant="crossover-shares-bf16",
            overlaps_itself=True,
            wire="bfloat16",
            cases="mixed",
        ),
        Rival(name="uncut", team="crossed", variant="sequential", cases="one"),
        Rival(
            name="wait-free", team="crossed", variant="wait-free", overlaps_itself=True, cases="one"
        ),
        Rival(
            name="wait-free-bf16",
            team="crossed",
            variant="wait-free-bf16",
            overlaps_itself=True,
            wire="bfloat16",
            cases="one",
        ),
    )
}


def takes_all_jobs(team: str) -> bool:
    """Whether one process a rank runs all jobs of a case; else each job has its own."""
    return team.startswith("crossed")


def rivals_of(case: str, only: set[str] | None = None) -> list[Rival]:
    kind = "one" if len(CASES[case]) == 1 else "many"
    return [
        r
        for r in RIVALS.values()
        if r.cases in ("any", kind, case) and (only is None or r.name in only)
    ]


def parameters(spec: Spec) -> int:
    """How many parameters the model has: each float32 one is a gradient that must cross the
    link.
    """
    sizes = spec.sizes()
    if spec.model == "transformer":
        width, vocabulary = sizes["width"], sizes["vocabulary"]
        block = 12 * width * width + 13 * width
        ends = 2 * vocabulary * width + vocabulary + 2 * width
        return sizes["layers"] * block + sizes["length"] * width + ends
    features, convolutions = (2048, 23_508_032) if spec.model == "resnet50" else (64, 79_312)
    return convolutions + (features + 1) * sizes["classes"]
