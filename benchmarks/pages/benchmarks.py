"""The tables of docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from race_show import over_reference
from rivals.cases import RIVALS

from pages import Read, Table

RATES = ("network", "balanced", "compute")
SHOWN = {
    "over jaxcross's": "over_reference", "bound / T": "efficiency", "with tax": "efficiency_with_tax",
    "steady": "steady_efficiency", "steady, with tax": "steady_efficiency_with_tax", "hidden": "hidden_share",
    "T / own c": "over_own_compute", "CPU s": "cpu_s",
}  # fmt: skip


def race(read: Read, argument: str) -> Iterator[tuple[str, ...]]:
    """Of `CASE:RATE[:N]`: seconds a job-step of each rival, with their spread, over jaxcross's, and against bounds."""
    case, rate, *nth = argument.split(":")
    rows = _rows(read, ":".join((case, *nth)), rate)
    yield "rival", "s a job-step", "own c", "m", "bound", *SHOWN, "MB on the wire", "peak GB a host"
    first = {row["rival"]: row for row in reversed(rows)}  # whom later ones were held against may have run again
    for row in [row for row in rows if row is first[row["rival"]]]:
        shown = row | {"over_reference": over_reference(row, rows)}
        yield (
            row["rival"], _with_spread(row), _each(row["c_s"]), _each(row["m_s"]), f"{row['bound_s']:.2f}",
            *("" if (value := shown.get(key)) is None else f"{value:.2f}" for key in SHOWN.values()),
            f"{row['wire_bytes'] / 1e6:.0f}", f"{row['peak_rss_bytes'] / 1e9:.1f}",
        )  # fmt: skip


def race_links(read: Read, argument: str) -> Iterator[tuple[str, ...]]:
    """Of `CASE[:N]`: what was raced over: the link at each rate, what its exchanges cost, and who is not there."""
    case = argument.split(":")[0]
    yield ("rate", "link", "TCP carries", "sum m / sum c", "tax of an exchange", "a step beside exchanges", "repeats",
           "left out")  # fmt: skip
    found = read("race")
    for rate in dict.fromkeys(row["rate"] for row in _rows(read, argument)):
        rows = _rows(read, argument, rate)
        (link,) = (x for x in found["links"] if (x["case"], x["rate"], x["run"]) == (case, rate, rows[0]["run"]))
        # of the same wire as the rates are made for
        row = next(row for row in rows if RIVALS[row["rival"]].wire == "float32" and RIVALS[row["rival"]].team != "ddp")
        out = [name.split("/")[1] for name in found["left_out"] if name.split("/")[0] == case]
        yield (
            rate, f"{row['rate_bits_per_s'] / 1e6:.0f} Mbit/s", f"{min(link['tcp_bits_per_s']) / 1e6:.0f} Mbit/s",
            f"{sum(row['m_s']) / sum(row['c_s']):.2f}", f"{_each(row['tax_s'])} s", f"x {_each(row['slow_down'])}",
            str(len(row["raw"])), ", ".join(out) or "nobody",
        )  # fmt: skip


def race_account(read: Read, argument: str) -> Iterator[tuple[str, ...]]:
    """Of `CASE[:N]`: where the seconds of a job-step go once jobs are under way, by jaxcross's own trace, medians."""
    yield ("rate", "rival", "a job-step", "c alone", "c in the run", "m alone", "m in the run", "what bounds",
           "ranks unlike", "order", "peer", "dispatch, votes, rest")  # fmt: skip
    for row in [row for row in _rows(read, argument) if "account" in row["raw"][0]]:
        accounts = [raw["account"] for raw in row["raw"]]
        took = [a["period_s"] for a in accounts]
        computed, exchanged = (
            [sum(j[key] for j in a["jobs"]) for a in accounts] for key in ("compute_s", "exchange_s")
        )
        causes = (("imbalance",), ("order",), ("peer",), ("dispatch", "votes", "input", "other"))
        lost = [[sum(a["lost_s"][cause] for cause in some) for a in accounts] for some in causes]
        took, computed, exchanged, *lost = (
            f"{statistics.median(rounds) / len(row['c_s']):.2f}" for rounds in (took, computed, exchanged, *lost)
        )
        c, m = (f"{statistics.fmean(row[key]):.2f}" for key in ("c_s", "m_s"))
        limits = ", ".join(dict.fromkeys(a["limit"] for a in accounts))
        yield row["rate"], row["rival"], took, c, computed, m, exchanged, limits, *lost


def _rows(read: Read, argument: str, rate: str = "") -> list[dict[str, Any]]:
    """Rows of `CASE[:N]`, of all the case's runs or of its N-th alone, from 1 on: by rate, or at one alone.

    Raises:
        FileNotFoundError: There are none yet.
    """
    case, *nth = argument.split(":")
    rows = [row for row in read("race")["rows"] if row["case"] == case]
    if nth:
        runs = sorted({row["run"] for row in rows})
        rows = [row for row in rows if row["run"] == runs[int(nth[0]) - 1]]
    rows = [row for row in rows if rate in ("", row["rate"])]
    if not rows:
        raise FileNotFoundError(f"race.json has no rows of {argument} at {rate}")
    return sorted(rows, key=lambda row: RATES.index(row["rate"]))


def _with_spread(row: dict[str, Any]) -> str:
    """Median, and the smallest and largest of several repeats."""
    low, high = row["spread"]
    return f"{row['s_per_job_step']:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def _each(values: list[float]) -> str:
    """One number a job; one for all where they are alike."""
    return ", ".join(dict.fromkeys(f"{value:.2f}" for value in values))


def wait_free(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """One job alone: the cut that was found at each rate against uncut, and what could be reached."""
    found = read("race")
    links = [link for link in found["links"] if "wait_free" in link]
    if not links:
        raise FileNotFoundError("race.json has no job alone")
    yield ("rate", "cut into", "c", "m", "first bucket after", "last bucket takes", "uncut", "wait-free", "T / uncut",
           "T / (first + m)", "T / (c + last)")  # fmt: skip
    for link in sorted(links, key=lambda link: RATES.index(link["rate"])):
        facts = link["wait_free"]
        by = {r["rival"]: r["s_per_job_step"] for r in _rows(read, link["case"], link["rate"])}
        took = by["wait-free"]
        seconds = [facts[key] for key in ("c_s", "m_s", "first_bucket_s", "last_bucket_s")]
        yield (link["rate"], str(facts["pieces"]), *(f"{s:.2f} s" for s in (*seconds, by["uncut"], took)),
               f"{took / by['uncut']:.2f}", f"{took / (facts['first_bucket_s'] + facts['m_s']):.2f}",
               f"{took / (facts['c_s'] + facts['last_bucket_s']):.2f}")  # fmt: skip


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
    yield "jobs", "images", "way", "peak GB a host", "programs compiled", "compile s"
    for row in read("memory")["rows"]:
        yield (str(row["jobs"]), f"{row['image_size']}x{row['image_size']}", row["way"],
               f"{row['peak_rss_bytes'] / 1e9:.2f}", f"{row['compilations']:.0f}",
               f"{row['compile_s']:.0f}")  # fmt: skip


def backend(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """XLA's flags, pages and 1x1 products, the fastest first."""
    found = read("backend")
    yield "a ResNet-50 step", "s", "over the step as raced"
    for way, row in sorted(found["rows"].items(), key=lambda item: item[1]["ratio"]):
        low, high = row["s"]["p25"], row["s"]["p75"]
        yield way, f"{row['s']['median']:.2f} ({low:.2f} to {high:.2f})", f"{row['ratio']:.2f}"
    for way in found["unknown"]:
        yield way, "not known to this jaxlib", ""


def scale(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What jobs and segments cost the host."""
    found = read("scale")
    yield "what grows", "sizes", "us each, median", "mean", "99% below", "peak GB", "power"
    for kind in ("jobs", "segments"):
        for part, keys in (("decision", ("median_us", "mean_us", "p99_us")), ("run", ("us_per_segment",))):
            rows, power = found[f"{part}_by_{kind}"]["rows"], found[f"{part}_by_{kind}"]["slope_of_total"]
            shown = [", ".join(f"{row[key]['median']:.0f}" for row in rows) for key in keys]
            memory = ", ".join(f"{row['peak_rss_bytes'] / 1e9:.2f}" for row in rows if "peak_rss_bytes" in row)
            sizes = ", ".join(str(row[kind]) for row in rows)
            what = {"decision": "a decision", "run": "a segment of a run"}[part]
            yield f"{what}, by {kind}", sizes, *(*shown, "", "")[:3], memory, f"{power:.2f}"


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


def exchange_limits(read: Read, vendor: str) -> Iterator[tuple[str, ...]]:
    """What it does to send small sums together."""
    found = read(f"exchange_cost_{vendor}")
    word = ", sums up to "
    limits = [name.split(word)[1] for name in found["exchange"] if name.startswith(f"alone{word}")]
    if not limits:
        raise FileNotFoundError(f"exchange_cost_{vendor}.json was made without --limits")
    yield "sums up to", "exchange alone", "beside a computation", "its thread's CPU", "the computation beside it"
    for limit in limits:
        alone, beside = (found["exchange"][f"{what}{word}{limit}"] for what in ("alone", "beside"))
        computed = found["computation_s"][f"beside exchanges{word}{limit}"]["median"]
        yield (limit, *(f"{s:.2f} s" for s in (alone["s"]["median"], beside["s"]["median"], beside["cpu_s"]["median"],
                                               computed)))  # fmt: skip


def exchange_ways(read: Read, vendor: str) -> Iterator[tuple[str, ...]]:
    """How the thread that waits for an exchange shares its core with a computation."""
    found = read(f"exchange_cost_{vendor}")
    beside = [name for name in found["exchange"] if name.startswith("beside") and "sums" not in name]
    ways = {name[len("beside, ") :] or "slices of 250 us": name[len("beside") :] for name in beside}
    if len(ways) < 2:
        raise FileNotFoundError(f"exchange_cost_{vendor}.json was made without --ways")
    yield "the exchange's thread", "exchange beside a computation", "the computation beside it", "its thread's CPU"
    for way, suffix in ways.items():
        row, computed = found["exchange"][f"beside{suffix}"], found["computation_s"][f"beside exchanges{suffix}"]
        yield way, *(f"{s:.2f} s" for s in (row["s"]["median"], computed["median"], row["cpu_s"]["median"]))


def exchange_settings(read: Read, vendor: str) -> Iterator[tuple[str, ...]]:
    """An MPI's own settings, each in a launch of its own."""
    found = read(f"exchange_cost_{vendor}")
    if not found.get("settings"):
        raise FileNotFoundError(f"exchange_cost_{vendor}.json was made without --settings")
    yield ("setting", "exchange alone", "beside a computation", "fills the link", "the computation beside it",
           "over it alone")  # fmt: skip
    for row in ({"environment": {}, **found}, *found["settings"]):
        words = ", ".join(f"`{name}={value}`" for name, value in row["environment"].items())
        if "failed" in row:
            yield words, row["failed"], "", "", "", ""
            continue
        alone, beside = row["exchange"]["alone"], row["exchange"]["beside"]
        computed = [row["computation_s"][name]["median"] for name in ("alone", "beside exchanges")]
        yield (words or "as jaxcross starts it", f"{alone['s']['median']:.2f} s", f"{beside['s']['median']:.2f} s",
               f"{alone['fill']:.0%}, {beside['fill']:.0%}", f"{computed[1]:.2f} s",
               f"x {computed[1] / computed[0]:.2f}")  # fmt: skip


def imagenet(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Images a second from records on disk, by job and in all."""
    found = read("imagenet_resnet")
    yield ("records", "run", *found["jobs"], "all jobs, images/s", "min to max", "with start and end",
           "input wait a step")  # fmt: skip
    for cache in ("cold", "warm"):
        for policy in ("sequential", "crossover"):
            row = found["throughput"][cache][policy]
            runs, whole = row["runs"], row["images_per_s"]
            by_job = zip(*(run["images_per_s_by_job"].values() for run in runs), strict=True)
            waits = [max(run["input_wait_s"].values()) for run in runs]
            yield (
                cache, policy, *(f"{statistics.median(each):.2f}" for each in by_job), f"{whole['median']:.2f}",
                f"{min(whole['raw']):.2f} to {max(whole['raw']):.2f}",
                f"{statistics.median(run['wall_images_per_s'] for run in runs):.2f}",
                f"{statistics.median(waits) * 1e3:.0f} ms",
            )  # fmt: skip


def imagenet_accuracy(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Seconds until all jobs have an accuracy, evaluation included."""
    found = read("imagenet_resnet")["accuracy"]
    yield "run", f"seconds until all jobs have {found['goal']:g}", "steps of each job", "accuracy at the end"
    for policy in ("sequential", "crossover"):
        run = found[policy]
        jobs = run["jobs"].values()
        yield (policy, f"{run['s']:.0f}" if run["s"] else run["reason"], ", ".join(str(job["steps"]) for job in jobs),
               ", ".join(f"{job['step_s_accuracy'][-1][2]:.2f}" for job in jobs))  # fmt: skip


def crossover(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Two jobs, one after the other and in turn, by other exchanges than the mean."""
    yield "exchange", "sum m / sum c", "one after the other", "in turn", "times as fast", "bound", "bound / T"
    for row in read("crossover")["rows"]:
        yield (row["exchange"], f"{row['ratio']:.2f}", f"{row['sequential']['median']:.2f} s",
               f"{row['crossover']['median']:.2f} s", f"{row['speedup']:.2f}", f"{row['bound_s']:.2f} s",
               f"{row['efficiency']:.2f}")  # fmt: skip


def unequal(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """A small job beside a large one."""
    found = read("unequal")
    yield "turns", "large", "small", "progress", "large, over itself in pieces", "progress, over that"
    for way, row in found["ways"].items():
        over = row["over_pieces"]
        each = [row["relative"]["large"], row["relative"]["small"], row["progress"], over["relative"]["large"]]
        yield way, *(f"{value:.2f}" for value in (*each, over["progress"]))


TABLES: dict[str, Table] = {
    "race": race,
    "race-links": race_links,
    "wait-free": wait_free,
    "overhead": overhead,
    "peak": peak,
    "memory": memory,
    "backend": backend,
    "scale": scale,
    "crossover": crossover,
    "unequal": unequal,
    "race-account": race_account,
    "exchange-cost": exchange_cost,
    "exchange-limits": exchange_limits,
    "exchange-ways": exchange_ways,
    "exchange-settings": exchange_settings,
    "imagenet": imagenet,
    "imagenet-accuracy": imagenet_accuracy,
}
