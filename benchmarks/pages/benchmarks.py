"""The tables of benchmarks/results/benchmarks.md, except those of the race."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from paired import with_interval

from pages import Read, Table


def overhead(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """One job on one rank: the step cut whole against `jax.jit`."""
    found = read(name)
    yield "step", "jit", "jaxcross", "ratio", "difference", "split by hand"
    for case in ("resnet50", "mlp"):
        row = found[case]
        yield (
            case,
            f"{row['jit']['median'] * 1e3:.3g} ms",
            f"{row['jaxcross']['median'] * 1e3:.3g} ms",
            f"{row['ratio_of_medians']:.3f}",
            f"{row['median_difference_us']:.0f} us",
            f"{row['by_hand_median_difference_us']:.0f} us",
        )


def peak(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """Peak live bytes relative to the fused step."""
    found = read(name)
    yield "step", "whole cut", "cut into four", "cut into four, without exchange buffers"
    for case in ("resnet50", "transformer"):
        row = found[f"memory_{case}"]
        keys = (
            "cut_whole_over_fused",
            "cut_4_over_fused",
            "cut_4_over_fused_without_exchange_buffers",
        )
        yield (case, *(f"{row[key]:.3f}" for key in keys))


def memory(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """k jobs in one process against k processes."""
    yield "jobs", "images", "way", "peak GB a host", "programs compiled", "compile s"
    for row in read("memory")["rows"]:
        yield (
            str(row["jobs"]),
            f"{row['image_size']}x{row['image_size']}",
            row["way"],
            f"{row['peak_rss_bytes'] / 1e9:.2f}",
            f"{row['compilations']:.0f}",
            f"{row['compile_s']:.0f}",
        )


def backend(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """XLA's flags, pages and 1x1 products, fastest first."""
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
    for kind, size in (("jobs", "jobs"), ("jobs_of_3", "jobs"), ("segments", "segments")):
        for part, keys in (
            ("decision", ("median_us", "mean_us", "p99_us")),
            ("run", ("us_per_segment",)),
        ):
            if f"{part}_by_{kind}" not in found:
                continue
            rows, power = (
                found[f"{part}_by_{kind}"]["rows"],
                found[f"{part}_by_{kind}"]["slope_of_total"],
            )
            shown = [", ".join(f"{row[key]['median']:.0f}" for row in rows) for key in keys]
            memory = ", ".join(
                f"{row['peak_rss_bytes'] / 1e9:.2f}" for row in rows if "peak_rss_bytes" in row
            )
            sizes = ", ".join(str(row[size]) for row in rows)
            what = {"decision": "a decision", "run": "a segment of a run"}[part]
            of = "" if size == "segments" else f" of {rows[0]['segments']} segments"
            yield f"{what}, by {size}{of}", sizes, *(*shown, "", "")[:3], memory, f"{power:.2f}"


def exchange_cost(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What an exchange costs the link and the core.

    Results with two exchanges at once come from an earlier version.
    """
    yield (
        "MPI",
        "exchange alone",
        "two at once, each",
        "beside computation",
        "fills the link",
        "computation alone",
        "beside exchanges",
        "tax",
    )
    for vendor in ("mpich", "openmpi"):
        found = read(f"exchange_cost_{vendor}")
        names = ("alone", "at once", "beside")
        rows = {name: found["exchange"][name] for name in names if name in found["exchange"]}
        took = {name: f"{row['s']['median']:.2f} s" for name, row in rows.items()}
        computed = [found["computation_s"][name] for name in ("alone", "beside exchanges")]
        fill = ", ".join(f"{row['fill']:.0%}" for row in rows.values())
        yield (
            found["mpi"],
            *(took.get(name, "-") for name in names),
            fill,
            *(f"{row['median']:.2f} s" for row in computed),
            f"{found['tax_s']:.2f} s",
        )


def exchange_limits(read: Read, vendor: str) -> Iterator[tuple[str, ...]]:
    """What joining small sums into one message changes."""
    found = read(f"exchange_cost_{vendor}")
    word = ", sums up to "
    limits = [name.split(word)[1] for name in found["exchange"] if name.startswith(f"alone{word}")]
    if not limits:
        raise FileNotFoundError(f"exchange_cost_{vendor}.json was made without --limits")
    yield (
        "sums up to",
        "exchange alone",
        "beside a computation",
        "its thread's CPU",
        "the computation beside it",
    )
    for limit in limits:
        alone, beside = (found["exchange"][f"{what}{word}{limit}"] for what in ("alone", "beside"))
        computed = found["computation_s"][f"beside exchanges{word}{limit}"]["median"]
        yield (
            limit,
            *(
                f"{s:.2f} s"
                for s in (
                    alone["s"]["median"],
                    beside["s"]["median"],
                    beside["cpu_s"]["median"],
                    computed,
                )
            ),
        )


def exchange_ways(read: Read, vendor: str) -> Iterator[tuple[str, ...]]:
    """How the thread that waits for an exchange shares its core with a computation."""
    found = read(f"exchange_cost_{vendor}")
    beside = [
        name for name in found["exchange"] if name.startswith("beside") and "sums" not in name
    ]
    ways = {name[len("beside, ") :] or "slices of 250 us": name[len("beside") :] for name in beside}
    if len(ways) < 2:
        raise FileNotFoundError(f"exchange_cost_{vendor}.json was made without --ways")
    yield (
        "the exchange's thread",
        "exchange beside a computation",
        "the computation beside it",
        "its thread's CPU",
    )
    for way, suffix in ways.items():
        row, computed = (
            found["exchange"][f"beside{suffix}"],
            found["computation_s"][f"beside exchanges{suffix}"],
        )
        yield (
            way,
            *(
                f"{s:.2f} s"
                for s in (row["s"]["median"], computed["median"], row["cpu_s"]["median"])
            ),
        )


def exchange_core(read: Read, rates: str) -> Iterator[tuple[str, ...]]:
    """What slows a computation down during exchanges.

    The argument `A,B` names rates of results with MPICH.
    """
    yield (
        "link",
        "an exchange alone",
        "beside a computation",
        "a step alone",
        "beside exchanges",
        "its threads alone",
        "beside exchanges",
        "the exchange's thread",
        "two exchanges at once, each",
    )
    for rate in rates.split(","):
        found = read(f"exchange_cost_mpich_{rate}")
        exchange, took, ran = found["exchange"], found["computation_s"], found["computation_ran_s"]
        seconds = (
            exchange["alone"]["s"],
            exchange["beside"]["s"],
            took["alone"],
            took["beside exchanges"],
            ran["alone"],
            ran["beside exchanges"],
        )
        share = exchange["beside"]["cpu_s"]["median"] / exchange["beside"]["s"]["median"]
        at_once = exchange.get("at once")
        yield (
            rate,
            *(f"{s['median']:.2f} s" for s in seconds),
            f"{share:.0%} of the core",
            "-" if at_once is None else f"{at_once['s']['median']:.2f} s",
        )


def exchange_settings(read: Read, vendor: str) -> Iterator[tuple[str, ...]]:
    """An MPI's own settings, each in a separate launch."""
    found = read(f"exchange_cost_{vendor}")
    if not found.get("settings"):
        raise FileNotFoundError(f"exchange_cost_{vendor}.json was made without --settings")
    yield (
        "setting",
        "exchange alone",
        "beside a computation",
        "fills the link",
        "the computation beside it",
        "over it alone",
    )
    for row in ({"environment": {}, **found}, *found["settings"]):
        settings = ", ".join(f"`{name}={value}`" for name, value in row["environment"].items())
        if "failed" in row:
            yield settings, row["failed"], "", "", "", ""
            continue
        alone, beside = row["exchange"]["alone"], row["exchange"]["beside"]
        computed = [row["computation_s"][name]["median"] for name in ("alone", "beside exchanges")]
        yield (
            settings or "as jaxcross starts it",
            f"{alone['s']['median']:.2f} s",
            f"{beside['s']['median']:.2f} s",
            f"{alone['fill']:.0%}, {beside['fill']:.0%}",
            f"{computed[1]:.2f} s",
            f"x {computed[1] / computed[0]:.2f}",
        )


def exchange_wires(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """Each wire and way of waiting, from a result with `--wires`."""
    found = read(name)
    if "over_mpi4jax" not in found:
        raise FileNotFoundError(f"{name}.json was made without --wires")
    yield (
        "wire",
        "exchange alone",
        "its thread's CPU",
        "beside a computation",
        "its thread's CPU",
        "the computation beside it",
        "alone, over mpi4jax",
        "beside, over mpi4jax",
        "the computation, over mpi4jax",
    )
    for wire in [key.removeprefix("alone") for key in found["exchange"] if key.startswith("alone")]:
        alone, beside = (found["exchange"][way + wire] for way in ("alone", "beside"))
        computed = found["computation_s"][f"beside exchanges{wire}"]["median"]
        seconds = [row[key]["median"] for row in (alone, beside) for key in ("s", "cpu_s")]
        ratios = [
            found["over_mpi4jax"].get(f"{what}{wire}")
            for what in ("exchange alone", "exchange beside", "computation beside exchanges")
        ]
        yield (
            wire.removeprefix(", ") or "mpi4jax",
            *(f"{s:.2f} s" for s in (*seconds, computed)),
            *("" if ratio is None else with_interval(ratio) for ratio in ratios),
        )


def imagenet(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Images per second from records on disk, by job and in total."""
    found = read("imagenet_resnet")
    yield (
        "records",
        "run",
        *found["jobs"],
        "all jobs, images/s",
        "min to max",
        "with start and end",
        "input wait a step",
    )
    for cache in ("cold", "warm"):
        for policy in ("sequential", "crossover"):
            row = found["throughput"][cache][policy]
            runs, whole = row["runs"], row["images_per_s"]
            by_job = zip(*(run["images_per_s_by_job"].values() for run in runs), strict=True)
            waits = [max(run["input_wait_s"].values()) for run in runs]
            yield (
                cache,
                policy,
                *(f"{statistics.median(each):.2f}" for each in by_job),
                f"{whole['median']:.2f}",
                f"{min(whole['raw']):.2f} to {max(whole['raw']):.2f}",
                f"{statistics.median(run['wall_images_per_s'] for run in runs):.2f}",
                f"{statistics.median(waits) * 1e3:.0f} ms",
            )


def imagenet_accuracy(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Seconds until all jobs have reached an accuracy, including evaluation."""
    found = read("imagenet_resnet")["accuracy"]
    yield (
        "run",
        f"seconds until all jobs have {found['goal']:g}",
        "steps of each job",
        "accuracy at the end",
    )
    for policy in ("sequential", "crossover"):
        run = found[policy]
        jobs = run["jobs"].values()
        yield (
            policy,
            f"{run['s']:.0f}" if run["s"] else run["reason"],
            ", ".join(str(job["steps"]) for job in jobs),
            ", ".join(f"{job['step_s_accuracy'][-1][2]:.2f}" for job in jobs),
        )


def data_cache(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Passes over a data set behind a slow link, with the cache and in other ways."""
    found = read("data_cache")
    yield (
        "way",
        "images/s, by pass",
        "times the set from the origin, by pass",
        "all over the prediction, min to max",
    )
    for way, row in found["ways"].items():
        if "missing" in row:
            yield way, row["missing"], "", ""
            continue
        over = row["over_predicted"]
        yield (
            way,
            ", ".join(f"{each['images_per_s']:.0f}" for each in row["passes"]),
            ", ".join(f"{each['origin_sets']:.2f}" for each in row["passes"]),
            f"{over['median']:.3f} ({over['min']:.3f} to {over['max']:.3f})" if over else "",
        )


def crossover(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Two jobs one after the other and in crossover, with exchanges other than the mean."""
    yield (
        "exchange",
        "sum m / sum c",
        "one after the other",
        "in turn",
        "times as fast",
        "bound",
        "bound / T",
    )
    for row in read("crossover")["rows"]:
        yield (
            row["exchange"],
            f"{row['ratio']:.2f}",
            f"{row['sequential']['median']:.2f} s",
            f"{row['crossover']['median']:.2f} s",
            f"{row['speedup']:.2f}",
            f"{row['bound_s']:.2f} s",
            f"{row['efficiency']:.2f}",
        )


def unequal(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """A small job alongside a large one."""
    found = read("unequal")
    yield (
        "turns",
        "large",
        "small",
        "progress",
        "large, over itself in pieces",
        "progress, over that",
    )
    for way, row in found["ways"].items():
        over = row["over_pieces"]
        each = [
            row["relative"]["large"],
            row["relative"]["small"],
            row["progress"],
            over["relative"]["large"],
        ]
        yield way, *(f"{value:.2f}" for value in (*each, over["progress"]))


TABLES: dict[str, Table] = {
    "overhead": overhead,
    "peak": peak,
    "memory": memory,
    "backend": backend,
    "scale": scale,
    "crossover": crossover,
    "unequal": unequal,
    "exchange-cost": exchange_cost,
    "exchange-limits": exchange_limits,
    "exchange-ways": exchange_ways,
    "exchange-settings": exchange_settings,
    "exchange-core": exchange_core,
    "exchange-wires": exchange_wires,
    "imagenet": imagenet,
    "imagenet-accuracy": imagenet_accuracy,
    "data-cache": data_cache,
}
