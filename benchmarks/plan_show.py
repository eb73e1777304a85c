"""Derives intervals, verdicts, causes, lines and a picture from predictions and runs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxcross.interleave.instrument import Span
from jaxcross.plan.machine_contention import TWO_CORES
from jaxcross.plan.twin import Prediction, predict
from jaxcross.report import Report
from jaxcross.step.profile import Profile

AGREE, WITHIN, ESTIMATE_WITHIN = 0.03, 0.05, 0.10
"""Largest spread of the repeats of a case that counts.

Then the largest relative errors of a good prediction and of a good estimate.
"""
BELOW, ABOVE = 0.95, 1.10
"""The ends of an interval, relative to the prediction."""


def pooled(profiles: Sequence[Profile], name: str) -> Profile:
    """Returns the mean of several solo runs of one kind, under a different name."""

    def mean(several: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return tuple(statistics.fmean(each) for each in zip(*several, strict=True))

    ranks = tuple(map(mean, zip(*(p.rank_seconds for p in profiles), strict=True)))
    slowest = tuple(map(max, zip(*ranks, strict=True)))
    return replace(
        profiles[0],
        name=name,
        seconds=slowest or mean(p.seconds for p in profiles),
        host_s=statistics.fmean(p.host_s for p in profiles),
        rank_seconds=ranks,
    )


def spread(values: Sequence[float]) -> float:
    """Returns the difference between the largest and the smallest value, over the median."""
    return (max(values) - min(values)) / statistics.median(values)


def s_per_step(spans: Iterable[Span]) -> float:
    """Returns a run's seconds per job-step after all jobs have made their first step.

    The result is that of the slowest rank. A step in progress at that moment counts with the
    fraction of its time that comes after.
    """
    steps: dict[int, dict[tuple[str, int], tuple[int, int]]] = {}
    for span in spans:
        if span.in_step and span.step > 0 and span.kind in ("compute", "collective"):
            start, end = steps.setdefault(span.rank, {}).get(
                (span.job, span.step), (span.start_ns, span.end_ns)
            )
            steps[span.rank][span.job, span.step] = (
                min(start, span.start_ns),
                max(end, span.end_ns),
            )
    found = []
    for own in steps.values():
        begin = max(end for (_, step), (_, end) in own.items() if step == 1)
        count = sum(
            min(1.0, (end - begin) / (end - start)) for start, end in own.values() if end > begin
        )
        found.append((max(end for _, end in own.values()) - begin) / 1e9 / count)
    return max(found)


def contention_row(rate: int, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the slowdown factors at a rate, as medians over rounds.

    A median below 1 is noise, and becomes 1.
    """
    row: dict[str, Any] = {"rate": rate}
    for what in ("compute", "exchange"):
        ratios = sorted(each[f"{what}_beside_s"] / each[f"{what}_s"] for each in rounds)
        row[what] = max(1.0, statistics.median(ratios))
        row[f"{what}_ratios"] = ratios
    return {**row, "megabytes": rounds[0]["megabytes"], "raw": [*map(dict, rounds)]}


def interval_s(predicted_s: float, apart: float) -> tuple[float, float]:
    """Returns the seconds per job-step between which we expect a run.

    The interval goes from 5% below the prediction to 10% above it. It reaches further up because
    runs lose time to caches and memory, which no solo run shows. 10% is what 36 of the race's 37
    kept rows need. Half of the difference between solo runs is added on both sides.
    """
    return predicted_s * (BELOW - apart / 2), predicted_s * (ABOVE + apart / 2)


def attribution(predicted: Prediction, run: Report) -> dict[str, float]:
    """Returns the causes of the difference between two rounds, as shares of the predicted round.

    Empty if the prediction or the run has no round.
    """
    if not predicted.rounds.period_s or not run.rounds.period_s:
        return {}
    found = run.against(predicted)
    return {part: length / found.predicted_ns for part, length in found.parts_ns.items() if length}


def breakdown(prediction: Prediction) -> dict[str, Any]:
    """Returns the numbers of a predicted round under the names of `report.summary()`."""
    rounds = prediction.rounds
    return {
        "period_s": rounds.period_s,
        "bound_s": rounds.bound_s,
        "limit": rounds.bottleneck,
        "s_per_step": rounds.s_per_step,
        "hidden_share": rounds.hidden_share,
        "lost_s": dict(rounds.lost_s),
        "jobs": [
            {
                "name": j.facts.name,
                "steps": j.facts.steps,
                "compute_s": j.compute_s,
                "exchange_s": j.exchange_s,
            }
            for j in rounds.jobs
        ],
    }


def race_rows(race: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns predictions for the race's kept rows with whole jobs, from the c and m of the
    race.
    """
    found = []
    for row in race["rows"]:
        if row["rival"] not in ("crossover", "crossover-bf16"):
            continue
        costs = zip(row["c_s"], row["m_s"], strict=True)
        profiles = [
            Profile.whole(f"job{n}", compute_s=c, exchange_s=m) for n, (c, m) in enumerate(costs)
        ]
        there = TWO_CORES.at(row["rate_bits_per_s"] / 1e6)
        steps = [race["runs"][row["run"]]["steps"]] * len(profiles)
        took = [raw["s_per_job_step"] for raw in row["raw"]]
        predicted = predict(profiles, contention=there, steps=tuple(steps)).s_per_step
        low, high = interval_s(predicted, 0.0)
        achieved = row["s_per_job_step"]
        found.append(
            {
                "case": row["case"],
                "rival": row["rival"],
                "run": row["run"],
                "rate": row["rate_bits_per_s"] / 1e6,
                "predicted_s": predicted,
                "achieved_s": achieved,
                "ratio": predicted / achieved,
                "interval_s": [low, high],
                "covered": low <= achieved <= high,
                "spread": spread(took),
            }
        )
    return found


def rates(ends: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns each job's steps per second, over its steps that end while all jobs run.

    The first tenth of that time is left out.
    """
    last = min(each[-1] for each in ends.values())
    inside = {name: [t for t in each if last / 10 < t <= last] for name, each in ends.items()}
    return {
        name: (len(each) - 1) / (each[-1] - each[0])
        if len(each) > 1
        else len(ends[name]) / ends[name][-1]
        for name, each in inside.items()
    }


def keep(result: dict[str, Any], made: Mapping[str, list[dict[str, Any]]]) -> None:
    """Puts rows into a result, and replaces older rows of the same case, kind and rate."""

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row.get("case"), row.get("kind"), row["rate"]

    for name, rows in made.items():
        new = {key(row) for row in rows}
        result[name] = [row for row in result[name] if key(row) not in new] + rows


def verdict(result: Mapping[str, Any]) -> dict[str, Any]:
    """Counts how many predictions are as accurate as they should be."""
    counted = [row for row in result["rows"] if row["spread"] <= AGREE]
    found: dict[str, Any] = {
        "rows": len(result["rows"]),
        "count": len(counted),
        "within": sum(abs(row["ratio"] - 1) <= WITHIN for row in counted),
        "covered": sum(row["covered"] for row in counted),
        "estimates": len(result["estimates"]),
        "estimates_within": sum(
            abs(row["ratio"] - 1) <= ESTIMATE_WITHIN for row in result["estimates"]
        ),
    }
    kept = result.get("race")
    if kept:
        found |= {"race_rows": len(kept), "race_covered": sum(row["covered"] for row in kept)}
        found["race_within"] = sum(abs(row["ratio"] - 1) <= WITHIN for row in kept)
    return found


def say(row: Mapping[str, Any]) -> str:
    low, high = row["interval_s"]
    causes = sorted(row["attribution"].items(), key=lambda item: -abs(item[1]))[:2]
    why = ", ".join(f"{cause} {share:+.1%}" for cause, share in causes)
    return (
        f"{row['case']} at {row['rate']} Mbit/s: predicted {row['predicted_s']:.3f} s a job-step "
        f"({low:.3f} to {high:.3f}), achieved {row['achieved_s']:.3f} (repeats within "
        f"{row['spread']:.1%}): {row['ratio']:.3f}; {why or 'no round'}"
    )


COLOURS = {500: "#0072b2", 1000: "#e69f00", 2000: "#009e73"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws measured over predicted seconds per job-step."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    rows = sorted(result["rows"], key=lambda row: (cases.index(row["case"]), row["rate"]))
    figure = Figure(figsize=(9.5, 0.34 * len(rows) + 1.7), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(1 - WITHIN, 1 + WITHIN, color="#666666", alpha=0.12, lw=0)
    axes.axvline(1, color="#333333", lw=1)
    for at, row in enumerate(rows):
        color = COLOURS.get(row["rate"], "#333333")
        low, high = (bound / row["predicted_s"] for bound in row["interval_s"])
        axes.plot([low, high], [at, at], color=color, alpha=0.3, lw=6, solid_capstyle="butt")
        each = [seconds / row["predicted_s"] for seconds in row["raw_s"]]
        axes.plot([min(each), max(each)], [at, at], color=color, lw=1.5)
        axes.plot(
            1 / row["ratio"],
            at,
            "o",
            color=color,
            ms=7,
            mfc=color if row["spread"] <= AGREE else "white",
            zorder=3,
        )
        axes.text(
            1.005,
            at,
            f"{row['achieved_s']:.2f} s",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    axes.set_yticks(
        range(len(rows)), [f"{row['case']}, {row['rate']} Mbit/s" for row in rows], fontsize=8.5
    )
    axes.invert_yaxis()
    axes.set_xlabel(
        "measured over predicted time of a job-step\n"
        f"thick: predicted interval; thin: all repeats; hollow: they are over {100 * AGREE:g}% "
        "apart"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    counts, near = verdict(result), sum(abs(row["ratio"] - 1) <= WITHIN for row in rows)
    steady = f"{counts['within']} of {counts['count']} whose repeats agree"
    figure.suptitle(
        f"Can the time of several jobs be predicted from each alone?\n{near} of {len(rows)} within "
        f"5%, {steady}",
        x=0.01,
        ha="left",
        fontsize=12.5,
        weight="bold",
    )
    figure.savefig(path)
