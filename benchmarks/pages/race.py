"""The tables of benchmarks/results/race.md that are filled from race.json."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from paired import ratios, with_interval
from race_show import over_reference
from rivals.cases import RIVALS, rivals_of, takes_all_jobs

from pages import Read, Table, with_spread

RATES = ("network", "balanced", "compute")
ALIKE = ("case", "rate", "run")
WAYS = (
    "crossover",
    "crossover-cut",
    "crossover-shares",
    "wait-free",
    "crossover-bf16",
    "crossover-shares-bf16",
    "wait-free-bf16",
)
SHOWN = {
    "over jaxcross's": "over_reference",
    "bound / T": "efficiency",
    "with tax": "efficiency_with_tax",
    "steady": "steady_efficiency",
    "steady, with tax": "steady_efficiency_with_tax",
    "hidden": "hidden_share",
    "T / own c": "over_own_compute",
    "CPU s": "cpu_s",
}


def race(read: Read, argument: str) -> Iterator[tuple[str, ...]]:
    """Seconds per job-step of each rival, relative to jaxcross's and to the bounds.

    The argument is `CASE:RATE[:N]`.
    """
    case, rate, *nth = argument.split(":")
    rows = _rows(read, ":".join((case, *nth)), rate)
    yield "rival", "s a job-step", "own c", "m", "bound", *SHOWN, "MB on the wire", "peak GB a host"
    first = {
        row["rival"]: row for row in reversed(rows)
    }  # a reference may have run again with later rivals
    for row in [row for row in rows if row is first[row["rival"]]]:
        shown = row | {"over_reference": over_reference(row, rows)}
        yield (
            row["rival"],
            _with_spread(row),
            _each(row["c_s"]),
            _each(row["m_s"]),
            f"{row['bound_s']:.2f}",
            *(
                "" if (value := shown.get(key)) is None else f"{value:.2f}"
                for key in SHOWN.values()
            ),
            f"{row['wire_bytes'] / 1e6:.0f}",
            f"{row['peak_rss_bytes'] / 1e9:.1f}",
        )


def race_verdicts(read: Read, arguments: str) -> Iterator[tuple[str, ...]]:
    """Compares each way of jaxcross with its bounds and with the best of the others, at each rate.

    The argument is `CASE[:N],...`. We use all runs of the case that have as many steps as the
    latest, and show the median, minimum and maximum over their repeats. A repeat is compared with
    the fastest rival of the same run, provided that all rivals of a kind took part.
    """
    yield (
        "jobs",
        "rate",
        "way",
        "repeats",
        "bound / T",
        "with tax",
        "over `fused`",
        "over the best of JAX's",
        "over the best DDP",
        "the same of T / own c",
    )
    for argument in arguments.split(","):
        case, found = argument.split(":")[0], raced_alike(read, argument)
        for rate, name in itertools.product(RATES, WAYS):
            at_rate = [row for row in found if row["rate"] == rate]
            own = [row for row in at_rate if row["rival"] == name]
            if not own:
                continue
            alike = [
                r
                for r in rivals_of(case)
                if not takes_all_jobs(r.team) and r.wire == RIVALS[name].wire
            ]
            jax, torch = (
                {r.name for r in alike if r.framework == each} for each in ("jax", "torch")
            )
            yield (
                case,
                rate,
                name,
                str(sum(len(row["raw"]) for row in own)),
                *(
                    with_spread([row[key] for row in own])
                    for key in ("efficiency", "efficiency_with_tax")
                ),
                *(
                    with_spread(_over(at_rate, name, others))
                    for others in ({"fused"} & jax, jax, torch)
                ),
                with_spread(_over(at_rate, name, torch, own_c=True)),
            )


def race_summary(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Two and three equal jobs in crossover at each rate: speed-ups over others, and the bound."""
    yield (
        "jobs",
        "exchange / compute",
        "over `jit` and mpi4jax",
        "over the best JAX rival",
        "over the best DDP",
        "bound / T",
        "repeats",
    )
    named = {"network": "2", "balanced": "1", "compute": "1/2"}
    for _, *rows in (race_verdicts(read, "two:1"), race_verdicts(read, "three")):
        for jobs, rate, way, repeats, _, taxed, fused, jax, ddp, _ in rows:
            if way == "crossover":
                yield f"{jobs} ResNet-50", named[rate], fused, jax, ddp, taxed, repeats


def raced_alike(read: Read, argument: str) -> list[dict[str, Any]]:
    """Returns the rows of a case's runs, or its N-th run, with as many steps as the latest."""
    runs, rows = read("race")["runs"], _rows(read, argument)
    steps = runs[max(row["run"] for row in rows)]["steps"]
    return [row for row in rows if runs[row["run"]]["steps"] == steps]


def _over(
    rows: list[dict[str, Any]], name: str, others: set[str], *, own_c: bool = False
) -> list[float]:
    """Returns T of the fastest of `others` over T of `name`, in each repeat.

    Ignores runs in which one of these rivals is missing. With `own_c`, each T is first divided by
    the c of its own framework in that repeat.
    """

    def took(row: dict[str, Any]) -> list[float]:
        return [
            raw["s_per_job_step"] / (statistics.fmean(raw["c_s"]) if own_c else 1)
            for raw in row["raw"]
        ]

    found: list[float] = []
    for run in dict.fromkeys(row["run"] for row in rows):
        seconds = {row["rival"]: took(row) for row in rows if row["run"] == run}
        if others and others | {name} <= seconds.keys():
            best = min((seconds[other] for other in others), key=statistics.median)
            # a rival that failed in a later repeat has fewer values
            found += [theirs / ours for theirs, ours in zip(best, seconds[name], strict=False)]
    return found


def race_links(read: Read, argument: str) -> Iterator[tuple[str, ...]]:
    """The link at each rate, what its exchanges cost, and who was left out.

    The argument is `CASE[:N]`.
    """
    case = argument.split(":")[0]
    yield (
        "rate",
        "link",
        "TCP carries",
        "sum m / sum c",
        "tax of an exchange",
        "a step beside exchanges",
        "repeats",
        "left out",
    )
    found = read("race")
    for rate in dict.fromkeys(row["rate"] for row in _rows(read, argument)):
        rows = _rows(read, argument, rate)
        (link,) = (
            x
            for x in found["links"]
            if (x["case"], x["rate"], x["run"]) == (case, rate, rows[0]["run"])
        )
        # with the wire that the rates are calibrated for
        alike = (
            r
            for r in rows
            if RIVALS[r["rival"]].wire == "float32" and RIVALS[r["rival"]].team != "ddp"
        )
        row = next(alike, rows[0])
        raced = {RIVALS[row["rival"]].team for row in rows}
        out = [
            team
            for of, team in (name.split("/") for name in found["left_out"])
            if of == case and team not in raced
        ]
        each = [(r["rival"], len(r["raw"]), found["runs"][r["run"]]["repeats"]) for r in rows]
        out += [
            f"{name} after {n} of {wanted}" for name, n, wanted in each if n < wanted
        ]  # failed in a later repeat
        yield (
            rate,
            f"{row['rate_bits_per_s'] / 1e6:.0f} Mbit/s",
            f"{min(link['tcp_bits_per_s']) / 1e6:.0f} Mbit/s",
            f"{sum(row['m_s']) / sum(row['c_s']):.2f}",
            f"{_each(row['tax_s'])} s",
            f"x {_each(row['slow_down'])}",
            str(found["runs"][row["run"]]["repeats"]),
            ", ".join(out) or "nobody",
        )


def race_account(read: Read, argument: str) -> Iterator[tuple[str, ...]]:
    """Where the seconds of a job-step go in steady state, by jaxcross's own trace, as medians.

    The argument is `CASE[:N]`.
    """
    yield (
        "rate",
        "rival",
        "a job-step",
        "c alone",
        "c in the run",
        "m alone",
        "m in the run",
        "what bounds",
        "ranks unlike",
        "order",
        "peer",
        "dispatch, votes, rest",
    )
    for row in [row for row in _rows(read, argument) if "account" in row["raw"][0]]:
        accounts = [raw["account"] for raw in row["raw"]]
        took = [a["period_s"] for a in accounts]
        computed, exchanged = (
            [sum(j[key] for j in a["jobs"]) for a in accounts]
            for key in ("compute_s", "exchange_s")
        )
        causes = (("imbalance",), ("order",), ("peer",), ("dispatch", "votes", "input", "other"))
        lost = [[sum(a["lost_s"][cause] for cause in some) for a in accounts] for some in causes]
        took, computed, exchanged, *lost = (
            # avoids "-0.00"
            f"{round(statistics.median(rounds) / len(row['c_s']), 2) + 0.0:.2f}"
            for rounds in (took, computed, exchanged, *lost)
        )
        c, m = (f"{statistics.fmean(row[key]):.2f}" for key in ("c_s", "m_s"))
        limits = ", ".join(dict.fromkeys(a["limit"] for a in accounts))
        yield row["rate"], row["rival"], took, c, computed, m, exchanged, limits, *lost


def race_wires(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """The same jobs in crossover over both wires: seconds per job-step, and their ratios."""
    found = read(name)
    yield "jobs", "rate", "sum m / sum c", "mpi4jax", "mpi4py", "mpi4py over mpi4jax", "repeats"
    for link in found["links"]:
        old, new = (
            next(
                row
                for row in found["rows"]
                if row["rival"] == name and all(row[key] == link[key] for key in ALIKE)
            )
            for name in ("crossover", "crossover-mpi4py")
        )
        took = [[sample["s_per_job_step"] for sample in row["raw"]] for row in (new, old)]
        yield (
            link["case"],
            link["rate"],
            f"{sum(old['m_s']) / sum(old['c_s']):.2f}",
            _with_spread(old),
            _with_spread(new),
            with_interval(ratios(*took)),
            str(len(took[0])),
        )


def wait_free(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """One job alone: the cut found at each rate against uncut, and what could be reached."""
    found = read("race")
    took = {tuple(r[key] for key in (*ALIKE, "rival")): r["s_per_job_step"] for r in found["rows"]}
    # A different run may have had a different rate, so we can't compare across runs.
    links = [
        x
        for x in found["links"]
        if "wait_free" in x and (*(x[key] for key in ALIKE), "uncut") in took
    ]
    if not links:
        raise FileNotFoundError("race.json has no job alone")
    yield (
        "rate",
        "cut into",
        "c",
        "m",
        "first bucket after",
        "last bucket takes",
        "uncut",
        "wait-free",
        "T / uncut",
        "T / (first + m)",
        "T / (c + last)",
    )
    for link in sorted(links, key=_by_rate):
        facts = link["wait_free"]
        uncut, cut = (
            took[(*(link[key] for key in ALIKE), rival)] for rival in ("uncut", "wait-free")
        )
        seconds = [facts[key] for key in ("c_s", "m_s", "first_bucket_s", "last_bucket_s")]
        yield (
            link["rate"],
            str(facts["pieces"]),
            *(f"{s:.2f} s" for s in (*seconds, uncut, cut)),
            f"{cut / uncut:.2f}",
            f"{cut / (facts['first_bucket_s'] + facts['m_s']):.2f}",
            f"{cut / (facts['c_s'] + facts['last_bucket_s']):.2f}",
        )


def _rows(read: Read, argument: str, rate: str = "") -> list[dict[str, Any]]:
    """Returns the rows of `CASE[:N]`, sorted by rate, or only those at `rate`.

    The rows are those of all the case's runs, or of its N-th run, counted from 1.

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
    return sorted(rows, key=_by_rate)


def _by_rate(each: dict[str, Any]) -> int:
    """Sort key for rows or links. Rates that were given as numbers come last."""
    return RATES.index(each["rate"]) if each["rate"] in RATES else len(RATES)


def _with_spread(row: dict[str, Any]) -> str:
    """Returns the median, with the smallest and largest if there are several repeats."""
    low, high = row["spread"]
    digits = 2 if high >= 0.1 else 4
    return f"{row['s_per_job_step']:.{digits}f}" + (
        f" ({low:.{digits}f} to {high:.{digits}f})" if low < high else ""
    )


def _each(values: list[float]) -> str:
    """Returns one number per job, or a single number if they're all the same."""
    return ", ".join(dict.fromkeys(f"{value:.2f}" for value in values))


TABLES: dict[str, Table] = {
    "race": race,
    "race-summary": race_summary,
    "race-verdicts": race_verdicts,
    "race-links": race_links,
    "race-account": race_account,
    "race-wires": race_wires,
    "wait-free": wait_free,
}
