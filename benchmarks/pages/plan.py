"""The tables of benchmarks/results/plan.md."""

from __future__ import annotations

from collections.abc import Iterator

from plan_show import AGREE, verdict

from pages import Read, Table, with_spread


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


def contention(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """How much computation and exchange slow each other down, by the link's rate."""
    yield "Mbit/s", "a computation takes, times as long", "an exchange takes, times as long"
    for row in read("plan_slow")["contention"]:
        yield (
            f"{row['rate']}",
            with_spread(row["compute_ratios"]),
            with_spread(row["exchange_ratios"]),
        )


def slow_estimates(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Expected and measured gains of two equal jobs on slow links, by two kinds of prediction."""
    yield (
        "Mbit/s",
        "times as fast, expected",
        "by the twin",
        "measured",
        "repeats within",
        "expected / measured",
    )
    kept = read("plan_slow")
    for row in kept["estimates"]:
        run = next(r for r in kept["rows"] if (r["case"], r["rate"]) == (row["case"], row["rate"]))
        yield (
            f"{row['rate']}",
            f"{row['predicted']:.2f}",
            f"{row['achieved'] / run['ratio']:.2f}",
            f"{row['achieved']:.2f}",
            f"{run['spread']:.1%}",
            f"{row['ratio']:.3f}",
        )


def unlike(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Two jobs on ranks that are equally fast, and with a rank that's slower."""
    yield (
        "jobs",
        "Mbit/s",
        "predicted s",
        "measured s",
        "predicted / measured",
        "repeats within",
        "slow rank",
        "its cost, predicted",
        "its cost, measured",
        "its cost in the report",
    )
    rows = {row["case"]: row for row in read("plan_slow")["rows"]}
    like = rows.get("two, like ranks")
    for case in ("two, like ranks", "two, rank 1 slower"):
        row = rows.get(case)
        if row is None or like is None:
            continue
        slow, reported = row["slow_rank"], row["reported_slow_rank"]
        measured = 1 - like["achieved_s"] / row["achieved_s"]
        yield (
            case,
            f"{row['rate']}",
            f"{row['predicted_s']:.3f}",
            f"{row['achieved_s']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['spread']:.1%}",
            "none" if slow is None else f"{slow['rank']}, {slow['factor']:.2f} times as long",
            "" if slow is None else f"{slow['cost_share']:.0%}",
            "" if row is like else f"{measured:.0%}",
            "" if reported is None else f"{reported['cost_share']:.0%}",
        )


TABLES: dict[str, Table] = {
    "plan": plan,
    "plan-verdict": plan_verdict,
    "plan-estimates": plan_estimates,
    "plan-pair": plan_pair,
    "plan-contention": contention,
    "plan-slow": slow_estimates,
    "plan-unlike": unlike,
}
