"""The tables of benchmarks/results/carried.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from statistics import median
from typing import Any

from carried_show import EXCHANGES, TARGETS, gains, of_bound, shares

from pages import Read, Table, with_spread


def carried(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """One job with streaming DiLoCo, against its computation alone."""
    yield (
        "Mbit/s",
        "jit alone, s a step",
        "computation alone, s a step",
        "blocking, s a step",
        "carried, s a step",
        "blocking, of computation alone",
        "carried, of computation alone",
        "target",
        "carried, of jit alone",
    )
    for row in sorted(_part(read, "alone"), key=lambda row: -row["rate"]):
        seconds = (f"{row['s'][way]:.3f}" for way in ("jit", "compute", "blocking", "carried"))
        speeds = (with_spread(shares(row, way), 3) for way in ("blocking", "carried"))
        of_jit = with_spread(shares(row, "carried", of="jit"), 3)
        yield (f"{row['rate']}", *seconds, *speeds, f"{TARGETS.get(row['rate'], '')}", of_jit)


def carried_rounds(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """`carried` against computation alone at the first rate: all comparisons, and their pool."""
    yield (
        "ways that took turns",
        "every",
        "repeats",
        "carried, of computation alone",
        "by the seconds of all repeats",
    )
    rows = [
        row
        for name in ("carried", "carried_rounds")
        for row in read(name)["rows"]
        if row["rate"] == 500
    ]
    everything: list[tuple[float, float]] = []
    for row in sorted(
        (row for row in rows if "turn_steps" in row),
        key=lambda row: (row["turn_steps"], row["part"]),
    ):
        pairs = [*zip(row["raw"]["compute"], row["raw"]["carried"], strict=True)]
        everything += pairs
        each = with_spread(shares(row, "carried"), 3)
        yield (
            ", ".join(row["raw"]),
            f"{row['turn_steps']} steps",
            f"{len(pairs)}",
            each,
            f"{_speed(pairs):.3f}",
        )
    random = Random(0)
    drawn = sorted(_speed(random.choices(everything, k=len(everything))) for _ in range(2000))
    spread = f"95% of 2000 resamples: {drawn[50]:.2f} to {drawn[-51]:.2f}"
    yield "all", "", f"{len(everything)}", "", f"{_speed(everything):.3f} ({spread})"


def _speed(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(alone for alone, _ in pairs) / sum(late for _, late in pairs)


def carried_work(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """The same strategy on an axis of one rank: its computation without its communication."""
    yield "way", "s a step", "of computation alone", "processor, s a step", "over computation alone"
    for row in _part(read, "work"):
        for way, seconds in row["s"].items():
            used, alone = row["processor_s"][way], row["processor_s"]["compute"]
            more = with_spread([a / b for a, b in zip(used, alone, strict=True)], 3)
            yield (
                way,
                f"{seconds:.3f}",
                with_spread(shares(row, way), 3),
                f"{median(used):.3f}",
                more,
            )


def carried_delayed(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """The previous step's mean, with images of two sizes."""
    yield (
        "image",
        "c",
        "m alone",
        "m next to c",
        "`mean`, s a step",
        "`delayed_mean`, s a step",
        "max(c, m) / T",
        "the same, m next to c",
    )
    for name in ("carried", "carried_small"):
        (row,) = (row for row in read(name)["rows"] if row["part"] == "delayed")
        seconds = (
            f"{row['s'][way]:.3f}" for way in ("compute", "m", "m next to c", "mean", "delayed")
        )
        size = read(name)["image_size"]
        yield (
            f"{size}x{size}",
            *seconds,
            *(with_spread(of_bound(row, exchange)) for exchange in EXCHANGES),
        )


def carried_rivals(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """The alternatives on the same link."""
    yield "way", "s a step", "over `carried`"
    for row in _part(read, "rivals"):
        for way, seconds in row["s"].items():
            over = [a / b for a, b in zip(row["raw"][way], row["raw"]["carried"], strict=True)]
            yield way, f"{seconds:.3f}", with_spread(over)
        for way, reason in row["left_out"].items():
            yield way, reason, ""


def carried_pairs(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Two jobs on the same ranks."""
    yield "jobs", "steps", "one after the other, s", "in crossover, s", "times as fast"
    for row in _part(read, "pairs"):
        for name, steps in row["steps"].items():
            seconds = (
                f"{row['s'][f'{name}, {way}']:.2f}"
                for way in ("one after the other", "in crossover")
            )
            yield name, " and ".join(map(str, steps)), *seconds, with_spread(gains(row, name))


def carried_memory(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Bytes of arrays and temporaries per rank."""
    yield "way", "programs", "state, MB", "of which pending, MB", "peak, MB"
    for key, found in read("carried")["memory"].items():
        way, _, number = key.rpartition(" ")
        if number == "0" and "peak_bytes" in found:
            sizes = (
                f"{found[name] / 1e6:.0f}"
                for name in ("state_bytes", "pending_bytes", "peak_bytes")
            )
            yield way, f"{found['programs']}", *sizes


def _part(read: Read, part: str) -> list[dict[str, Any]]:
    return [row for row in read("carried")["rows"] if row["part"] == part]


TABLES: dict[str, Table] = {
    "carried": carried,
    "carried-rounds": carried_rounds,
    "carried-work": carried_work,
    "carried-delayed": carried_delayed,
    "carried-rivals": carried_rivals,
    "carried-pairs": carried_pairs,
    "carried-memory": carried_memory,
}
