"""The cases of a race with their jobs, and the rivals. Plain data, so it imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RANKS = 2
WARM_UP = 2
"""Steps before the measured ones. They compile, and allocate the memory that later steps reuse."""
EVERY = 16
"""Local steps per exchange, for rivals that don't exchange in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A job's model and its sizes. Jobs with equal specs run the same step."""

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
    """Returns the case's jobs. `image_size` replaces the usual size for jobs that use images."""
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
        name: Its name on the command line.
        team: The kind of team, i.e. the program whose processes run it.
        at_once: Whether the processes of the jobs run at the same time. Otherwise they run one
            after the other.
        variant: Passed to the processes, and says how their jobs run a step.
        framework: Rivals of the same framework share one compute time.
        overlaps_itself: Whether a job's exchange can overlap with the same job's computation.
        wire: The element type on the wire.
        cases: The cases in which it takes part: those with `many` jobs, those with `one`, `any`, or
            the name of a case.
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
    """Returns whether one process per rank runs all jobs of a case, rather than one per job."""
    return team.startswith("crossed")


def rivals_of(case: str, only: set[str] | None = None) -> list[Rival]:
    kind = "one" if len(CASES[case]) == 1 else "many"
    return [
        r
        for r in RIVALS.values()
        if r.cases in ("any", kind, case) and (only is None or r.name in only)
    ]


def parameters(spec: Spec) -> int:
    """Returns the model's number of parameters, each of which has a gradient to exchange."""
    sizes = spec.sizes()
    if spec.model == "transformer":
        width, vocabulary = sizes["width"], sizes["vocabulary"]
        block = 12 * width * width + 13 * width
        ends = 2 * vocabulary * width + vocabulary + 2 * width
        return sizes["layers"] * block + sizes["length"] * width + ends
    features, convolutions = (2048, 23_508_032) if spec.model == "resnet50" else (64, 79_312)
    return convolutions + (features + 1) * sizes["classes"]
