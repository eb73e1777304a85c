"""The tables of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from race_show import over_reference

from pages import Read, Table

SHOWN = (
    "efficiency", "efficiency_with_tax", "steady_efficiency", "steady_efficiency_with_tax", "hidden_share",
    "over_own_compute", "cpu_s",
)  # fmt: skip


def race(read: Read, case: str) -> Iterator[tuple[str, ...]]:
    """Seconds a job-step of each rival at each rate with their spread, over jaxcross's, and against the bounds."""
    rows = [row for row in read("race")["rows"] if row["case"] == case]
    rows = [row | ({} if (ratio := over_reference(row, rows)) is None else {"over_reference": ratio}) for row in rows]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    by = {(row["rival"], row["rate"]): row for row in rows}
    yield ("rival", *(f"{r} ({by[rows[0]['rival'], r]['rate_bits_per_s'] / 1e6:.0f} Mbit/s)" for r in rates),
           "over jaxcross's", "bound / T", "with tax", "steady", "steady, with tax", "hidden", "T / own c", "CPU s",
           "MB on the wire", "peak GB a host")  # fmt: skip
    for rival in dict.fromkeys(row["rival"] for row in rows):
        own = [by.get((rival, rate)) for rate in rates]
        yield (
            rival,
            *("" if row is None else _with_spread(row) for row in own),
            _each(own, "over_reference", "{:.2f}"),
            *(_each(own, key, "{:.2f}") for key in SHOWN),
            _each(own, "wire_bytes", "{:.0f}", 1e-6),
            _each(own, "peak_rss_bytes", "{:.1f}", 1e-9),
        )


def _with_spread(row: dict[str, Any]) -> str:
    """Median, and the smallest and largest of several repeats."""
    low, high = row["spread"]
    return f"{row['s_per_job_step']:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def _each(rows: list[Any], key: str, form: str, scale: float = 1.0) -> str:
    return ", ".join("" if row is None or key not in row else form.format(row[key] * scale) for row in rows).strip(", ")


def wait_free(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """One job alone: the cut that was found at each rate against uncut, and what could be reached."""
    found = read("race")
    yield "rate", "exchange segments", "uncut s", "wait-free s", "at best s", "best / T"
    for link in found["links"]:
        if (facts := link.get("wait_free")) is None:
            continue
        same = [r for r in found["rows"] if all(r.get(key) == link.get(key) for key in ("run", "case", "rate"))]
        by = {r["rival"]: r["s_per_job_step"] for r in same}
        uncut = f"{by['uncut']:.2f}" if "uncut" in by else ""
        yield (link["rate"], str(facts["pieces"]), uncut, f"{by['wait-free']:.2f}",
               f"{facts['best_s']:.2f}", f"{facts['best_s'] / by['wait-free']:.2f}")  # fmt: skip


def overhead(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """One job, one rank, whole cut against `jax.jit`."""
    found = read(name)
    yield "step", "jit", "jaxcross", "ratio", "difference", "split by hand"
    for case in ("resnet50", "mlp"):
        row = found[case]
        yield (case, f"{row['jit']['median'] * 1e3:.3g} ms", f"{row['jaxcross']['median'] * 1e3:.3g} ms",
               f"{row['ratio_of_medians']:.3f}", f"{row['median_difference_us']:.0f} us",
               f"{row['by_hand_median_difference_us']:.0f} us")  # fmt: skip


def peak(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """Peak live bytes over the fused step."""
    found = read(name)
    yield "step", "whole cut", "cut into four", "cut into four, without exchange buffers"
    for case in ("resnet50", "transformer"):
        row = found[f"memory_{case}"]
        keys = "cut_whole_over_fused", "cut_4_over_fused", "cut_4_over_fused_without_exchange_buffers"
        yield (case, *(f"{row[key]:.3f}" for key in keys))


def memory(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """k jobs in one process against k processes."""
    yield "jobs", "way", "peak GB a host", "programs compiled", "compile s"
    for row in read("memory")["rows"]:
        yield (str(row["jobs"]), row["way"], f"{row['peak_rss_bytes'] / 1e9:.2f}", f"{row['compilations']:.0f}",
               f"{row['compile_s']:.0f}")  # fmt: skip


def scale(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What jobs and segments cost the host."""
    found = read("scale")
    yield "what grows", "sizes", "one decision, median us", "of a whole run, us a segment", "peak GB", "power"
    for kind in ("jobs", "segments"):
        for part, key in (("decision", "median_us"), ("run", "us_per_segment")):
            rows, power = found[f"{part}_by_{kind}"]["rows"], found[f"{part}_by_{kind}"]["slope_of_total"]
            values = [row[key]["median"] if isinstance(row[key], dict) else row[key] for row in rows]
            shown = ", ".join(f"{value:.0f}" for value in values)
            memory = ", ".join(f"{row['peak_rss_bytes'] / 1e9:.2f}" for row in rows if "peak_rss_bytes" in row)
            sizes = ", ".join(str(row[kind]) for row in rows)
            yield kind, sizes, *((shown, "") if part == "decision" else ("", shown)), memory, f"{power:.2f}"


def exchange_cost(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What an exchange costs the link and the core, and two at once."""
    yield ("MPI", "exchange alone", "two at once, each", "beside computation", "fills the link",
           "computation alone", "beside exchanges", "tax")  # fmt: skip
    for vendor in ("mpich", "openmpi"):
        found = read(f"exchange_cost_{vendor}")
        rows = [found["exchange"][name] for name in ("alone", "at once", "beside")]
        computed = [found["computation_s"][name] for name in ("alone", "beside exchanges")]
        seconds = [row["s"]["median"] for row in rows] + [row["median"] for row in computed]
        shown = [f"{value:.2f} s" for value in seconds]
        fill = ", ".join(f"{row['fill']:.0%}" for row in rows)
        yield found["mpi"], *shown[:3], fill, *shown[3:], f"{found['tax_s']:.2f} s"


def imagenet(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Images a second from records on disk, and seconds to an accuracy."""
    found = read("imagenet_resnet")
    yield "records", "run", "images/s, all jobs", "input wait a step", "wall s"
    for cache in ("cold", "warm"):
        for policy in ("sequential", "crossover"):
            row = found["throughput"][cache][policy]
            waits, walls = zip(*((max(r["input_wait_s"].values()), r["wall_s"]) for r in row["runs"]), strict=True)
            yield (cache, policy, f"{row['images_per_s']['median']:.2f}", f"{statistics.median(waits) * 1e3:.0f} ms",
                   f"{statistics.median(walls):.0f}")  # fmt: skip
    for policy in ("sequential", "crossover"):
        run, goal = found["accuracy"][policy], found["accuracy"]["goal"]
        yield f"to accuracy {goal:g}", policy, "", "", f"{run['s']:.0f}" if run["s"] else run["reason"]


def unequal(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """A small job beside a large one."""
    found = read("unequal")
    yield "turns", "large", "small", "progress"
    for way, row in found["ways"].items():
        each = (f"{row['relative'][name]:.2f}" for name in ("large", "small"))
        yield way, *each, f"{row['progress']:.2f}"


TABLES: dict[str, Table] = {
    "race": race,
    "wait-free": wait_free,
    "overhead": overhead,
    "peak": peak,
    "memory": memory,
    "scale": scale,
    "unequal": unequal,
    "exchange-cost": exchange_cost,
    "imagenet": imagenet,
}
