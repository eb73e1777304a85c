"""What do the kept results say? Writes their tables into the pages of docs/, so that no number is copied by hand.

    python benchmarks/tables.py [--check]

A line `<!-- table NAME -->` in a page is followed by the table NAME, up to the next blank line; by nothing where its
result is not kept yet.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from race_show import over_reference

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs"
MARK = re.compile(r"<!-- table (\S+)(?: (\S+))? -->\n(?:.+\n)*")
SHOWN = (
    "efficiency", "efficiency_with_tax", "steady_efficiency", "steady_efficiency_with_tax", "hidden_share",
    "over_own_compute", "cpu_s",
)  # fmt: skip


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def race(case: str) -> Iterator[tuple[str, ...]]:
    """Seconds a job-step of each rival at each rate with their spread, over jaxcross's, and against the bounds.

    hidden_share is blank where the result holds the trace's under that name.
    """
    rows = [row for row in read("race")["rows"] if row["case"] == case]
    for row in rows:
        if row.get("hidden_share_from") == "trace":
            del row["hidden_share"]
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


def wait_free(_: str) -> Iterator[tuple[str, ...]]:
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


def overhead(name: str) -> Iterator[tuple[str, ...]]:
    """One job, one rank, whole cut against `jax.jit`."""
    found = read(name)
    yield "step", "jit", "jaxcross", "ratio", "difference", "split by hand"
    for case in ("resnet50", "mlp"):
        row = found[case]
        yield (case, f"{row['jit']['median'] * 1e3:.3g} ms", f"{row['jaxcross']['median'] * 1e3:.3g} ms",
               f"{row['ratio_of_medians']:.3f}", f"{row['median_difference_us']:.0f} us",
               f"{row['by_hand_median_difference_us']:.0f} us")  # fmt: skip


def peak(name: str) -> Iterator[tuple[str, ...]]:
    """Peak live bytes over the fused step."""
    found = read(name)
    yield "step", "whole cut", "cut into four", "cut into four, without exchange buffers"
    for case in ("resnet50", "transformer"):
        row = found[f"memory_{case}"]
        keys = "cut_whole_over_fused", "cut_4_over_fused", "cut_4_over_fused_without_exchange_buffers"
        yield (case, *(f"{row[key]:.3f}" for key in keys))


def memory(_: str) -> Iterator[tuple[str, ...]]:
    """k jobs in one process against k processes."""
    yield "jobs", "way", "peak GB a host", "programs compiled", "compile s"
    for row in read("memory")["rows"]:
        yield (str(row["jobs"]), row["way"], f"{row['peak_rss_bytes'] / 1e9:.2f}", f"{row['compilations']:.0f}",
               f"{row['compile_s']:.0f}")  # fmt: skip


def scale(_: str) -> Iterator[tuple[str, ...]]:
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


def exchange_cost(_: str) -> Iterator[tuple[str, ...]]:
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


def imagenet(_: str) -> Iterator[tuple[str, ...]]:
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


def unequal(_: str) -> Iterator[tuple[str, ...]]:
    """A small job beside a large one."""
    found = read("unequal")
    yield "turns", "large", "small", "progress"
    for way, row in found["ways"].items():
        each = (f"{row['relative'][name]:.2f}" for name in ("large", "small"))
        yield way, *each, f"{row['progress']:.2f}"


def reliability(_: str) -> Iterator[tuple[str, ...]]:
    """What was tried, how often, and what came of it; a line for each result that is kept."""
    yield "tried", "how often", "came of it", "script"
    for name, lines in (
        ("model_check", _orders), ("faults", _faults), ("kill_resume", _killed), ("endurance", _lasting)
    ):  # fmt: skip
        with suppress(FileNotFoundError):
            for line in lines(read(name)):
                yield *line, f"{name}.py"


def _orders(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    rows = found["rows"]
    states, whole = sum(row["joint_states"] for row in rows), sum(row["explored"] for row in rows)
    often = f"{len(rows)} cases, {states:.2g} joint states"
    yield "orders of events", often, f"no rule broken; {whole} cases explored to their end"


def _faults(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    longest, told = (max(s for s in found[key].values() if s is not None) for key in ("longest_s", "told_s"))
    came = (
        f"{found['as_expected']} ended as the table says, after {longest:.1f} s at the latest, and went on when"
        f" restarted; the other ranks knew after {told:.1f} s"
    )
    yield "faults of one rank", f"{found['cases']}", came


def _killed(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    ways = [kill["at"] for row in found["rows"] for kill in row["kills"]]
    interrupts = ways.count("interrupt")
    often = f"{found['trials']} runs, {len(ways) - interrupts} kills, {interrupts} times Ctrl-C"
    yield "training killed and started again", often, f"{found['survived']} ended in the same bits"


def _lasting(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for part, what in (("joins", "jobs that join and leave"), ("steps", "steps of many jobs")):
        done, counts = found["raw"][0]["parts"][part]["total"], found["table"][part]
        grown = [n for n in ("threads", "files", "communicators") if counts[n]["last"] > counts[n]["first"]]
        first, last = (counts["rss_bytes"][when] / 1e6 for when in ("first", "last"))
        kept = ", ".join(grown) or "no thread, file or communicator"
        yield what, f"{done:,} on {found['ranks']} ranks", f"{kept} more; memory {first:.1f} MB, then {last:.1f} MB"


def convergence(_: str) -> Iterator[tuple[str, ...]]:
    """What each exchange reaches in the same steps, and what it receives meanwhile."""
    found = read("convergence")
    by = {(row["task"], row["strategy"]): row for row in found["rows"]}
    columns = "accuracy", "over the mean's", "MB"
    yield "exchange", *(f"{task}: {column}" for task in found["tasks"] for column in columns)
    for strategy in dict.fromkeys(row["strategy"] for row in found["rows"]):
        cells: list[str] = []
        for task in found["tasks"]:
            row, dense = by[task, strategy], by[task, "mean"]["final_accuracy"]
            cells += [f"{row['final_accuracy']:.3f}", f"{row['final_accuracy'] - dense:+.3f}",
                      f"{row['received_bytes'][-1] / 1e6:.2f}"]  # fmt: skip
        yield strategy, *cells


def longer(_: str) -> Iterator[tuple[str, ...]]:
    """Top-k over as many steps, and over three times as many."""
    found = read("convergence")
    parts = [[row for row in found["rows"] if row["task"] == "text"], found["longer"]["rows"]]
    yield ("exchange", *(f"{steps} steps" for steps in (found["tasks"]["text"]["steps"], found["longer"]["steps"])))
    of = [{row["strategy"]: row["final_accuracy"] for row in rows} for rows in parts]
    for name in of[1]:
        yield name, *(f"{each[name]:.3f} ({each[name] - each['mean']:+.3f})" for each in of)


def growth(_: str) -> Iterator[tuple[str, ...]]:
    """Steps to an accuracy as ranks are added at one rank's best rate, and the accuracy at the end."""
    found = read("convergence")["growth"]
    sizes = list(dict.fromkeys(row["ranks"] for row in found["rows"]))
    yield "way", *(f"{n} ranks" if n > 1 else "1 rank" for n in sizes)
    for way in dict.fromkeys(row["way"] for row in found["rows"]):
        by = {row["ranks"]: row for row in found["rows"] if row["way"] == way}
        yield way, *(f"{_steps(by[n]['steps_to_reach'])}, {by[n]['final_accuracy']:.3f}" for n in sizes)


def _steps(count: float | None) -> str:
    return "never" if count is None else f"{count:.0f}"


def exchanges(name: str) -> Iterator[tuple[str, ...]]:
    """Each exchange of a model's gradients over the mean's: a step of exchange and SGD, the wire alone, bytes."""
    models = read(name)["models"]
    heads = [f"{model}: {what}" for model in models for what in ("s", "over the mean's", "wire", "bytes")]
    yield "exchange", *heads
    for strategy in dict.fromkeys(s for rows in models.values() for s in rows["strategies"]):
        rows = [model["strategies"].get(strategy) for model in models.values()]
        cells = [
            ("", "", "", "") if row is None else
            (f"{row['total']['median']:.3f}", f"{row['total_over_mean']:.2f}", f"{row['wire_over_mean']:.3f}",
             f"{row['bytes_over_mean']:.3f}")
            for row in rows
        ]  # fmt: skip
        yield strategy, *(cell for row in cells for cell in row)


def selection(_: str) -> Iterator[tuple[str, ...]]:
    """Both ways to find the largest elements."""
    yield "elements", "k", "exact, ms", "threshold, ms", "the library takes"
    for row in read("selection")["rows"]:
        times = (f"{row['ways'][way]['s']['median'] * 1e3:.3g}" for way in ("exact", "threshold"))
        yield str(row["size"]), str(row["k"]), *times, row["chosen"]


def tensor(_: str) -> Iterator[tuple[str, ...]]:
    """Measured and modelled steps of tensor-parallel meshes."""
    yield ("ranks", "mesh", "batch", "measured s", "model s", "model / measured", "MB received", "MB of weights",
           "MB at most")  # fmt: skip
    for ranks, part in read("tensor")["scaling"].items():
        for row in part["rows"]:
            sizes = (f"{row[key] / 1e6:.1f}" for key in ("received_bytes", "weights_bytes", "peak_live_bytes"))
            yield (ranks, row["mesh"], str(row["batch"]), f"{row['s']['median']:.2f}", f"{row['model_s']:.2f}",
                   f"{row['model_over_measured']:.2f}", *sizes)  # fmt: skip


def tensor_crossover(_: str) -> Iterator[tuple[str, ...]]:
    """Two jobs, one of them or both tensor-parallel."""
    yield "jobs", "turns", "s a job-step", "times as fast", "exchange, share of a step", "dispatch and votes"
    for part, what in (("crossover", "two 1-D"), ("unlike", "1-D and data-parallel")):
        found = read("tensor")[part]
        for way, row in found["s_per_job_step"].items():
            alone = way != "crossover"
            fast, share = ("1", f"{found['exchange_share']:.0%}") if alone else (f"{found['speedup']:.2f}", "")
            yield what, way, f"{row['median']:.3f}", fast, share, f"{found['overhead'][way]:.1%}"


def tensor_far(_: str) -> Iterator[tuple[str, ...]]:
    """The model's word on 64 ranks: bytes, which no measurement enters, and times with the constants of four ranks."""
    yield "b, s, h", "b s / h", "mesh", "MB received", "MB of weights", "over [8,8,1]'s bytes", "over its time"
    rows = read("tensor")["far"]
    flat = {row["bs_over_h"]: row for row in rows if row["mesh"] == "2-D [8,8,1]"}
    for row in rows:
        sizes = (f"{row[key] / 1e6:.0f}" for key in ("received_bytes", "weights_bytes"))
        shape = f"{row['sequences']}, {row['length']}, {row['features']}"
        over = (f"{row[key] / flat[row['bs_over_h']][key]:.2f}" for key in ("received_bytes", "s"))
        yield shape, f"{row['bs_over_h']:.1f}", row["mesh"], *sizes, *over


TABLES: dict[str, Callable[[str], Iterator[tuple[str, ...]]]] = {
    "race": race, "wait-free": wait_free, "overhead": overhead, "peak": peak, "memory": memory,
    "scale": scale, "unequal": unequal, "exchange-cost": exchange_cost, "imagenet": imagenet,
    "tensor": tensor, "tensor-crossover": tensor_crossover, "tensor-far": tensor_far,
    "convergence": convergence, "growth": growth, "longer": longer, "exchanges": exchanges, "selection": selection,
    "reliability": reliability,
}  # fmt: skip


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    head, *body = list(rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, tuple("---" for _ in head), *body))


def table(name: str, argument: str) -> str:
    try:
        return markdown(TABLES[name](argument))
    except FileNotFoundError:
        return ""


def filled(page: str) -> str:
    """The page with its tables made anew."""
    return MARK.sub(lambda m: f"{m[0].splitlines()[0]}\n{table(m[1], m[2] or '')}", page)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    args = options.parse_args()
    stale = 0
    for page in sorted(PAGES.glob("*.md")):
        old = page.read_text()
        new = filled(old)
        if old != new and args.check:
            print(f"{page.name} is not what the results say: run `python benchmarks/tables.py`.")
            stale = 1
        elif old != new:
            page.write_text(new)
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
