"""The tables of benchmarks/results/plan.md."""

from __future__ import annotations

from collections.abc import Iterator

from plan_show import AGREE, verdict

from pages import Read, Table


def plan(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Predicted and measured seconds per job-step."""
    yield (
        "jobs",
        "Mbit/s",
        "predicted s",
        "interval",
        "measured s",
        "repeats within",
        "predicted / measured",
        "counts",
        "where the difference is",
    )
    for row in read("plan")["rows"]:
        low, high = row["interval_s"]
        causes = sorted(row["attribution"].items(), key=lambda item: -abs(item[1]))
        shown = [f"{cause} {share:+.1%}" for cause, share in causes[:2] if abs(share) >= 0.005]
        yield (
            row["case"],
            f"{row['rate']}",
            f"{row['predicted_s']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{row['achieved_s']:.3f}",
            f"{row['spread']:.1%}",
            f"{row['ratio']:.3f}",
            "yes" if row["spread"] <= AGREE else "no",
            ", ".join(shown),
        )


def plan_verdict(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """How many predictions are accurate enough."""
    found = verdict(read("plan"))
    yield "rows", "of which", "within 5%", "in the interval"
    yield (
        "measured here",
        f"{found['count']} of {found['rows']} count",
        f"{found['within']}",
        f"{found['covered']}",
    )
    yield (
        "kept rows of the race",
        f"{found['race_rows']}",
        f"{found['race_within']}",
        f"{found['race_covered']}",
    )


def plan_estimates(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """`jaxcross.estimate` against runs of equal jobs."""
    yield "jobs", "Mbit/s", "times as fast, expected", "measured", "expected / measured"
    for row in read("plan")["estimates"]:
        yield (
            row["case"],
            f"{row['rate']}",
            f"{row['predicted']:.2f}",
            f"{row['achieved']:.2f}",
            f"{row['ratio']:.3f}",
        )


def plan_pair(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """An unequal pair, with the pieces and shares that were chosen for it."""
    yield "pieces", "shares", "large", "small", "progress", "predicted progress"
    for row in read("plan")["pair"]:
        yield (
            ", ".join(map(str, row["pieces"])),
            ", ".join(f"{share:.2f}" for share in row["shares"]) or "by turns",
            *(f"{speed:.2f}" for speed in row["speeds"].values()),
            f"{row['progress']:.2f}",
            f"{row['predicted_progress']:.2f}",
        )


TABLES: dict[str, Table] = {
    "plan": plan,
    "plan-verdict": plan_verdict,
    "plan-estimates": plan_estimates,
    "plan-pair": plan_pair,
}
