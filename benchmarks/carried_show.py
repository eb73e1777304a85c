"""Prints and draws rows of `carried.py`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

TARGETS = {500: 0.97, 100: 0.95, 25: 0.90}
"""Targets by Mbit/s: seconds of computation alone over those of a carried step."""
EXCHANGES = ("m", "m next to c")
"""Entries of part `delayed` that are exchanges rather than steps."""
COLOURS = {"blocking": "#e69f00", "carried": "#0072b2"}


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines to print for a part."""
    yield f"{row['part']} at {row['rate']} Mbit/s"
    for way, seconds in row["s"].items():
        has_share = "compute" in row["raw"] and way not in EXCHANGES
        share = f"   {median(shares(row, way)):.3f} of computation alone" if has_share else ""
        yield f"  {way:40} {seconds:8.3f} s{share}"
    for bound in EXCHANGES if "delayed" in row["raw"] else ():
        yield f"  max(c, {bound}) / T: {median(of_bound(row, bound)):.3f}"
    for name in row.get("steps", ()):
        yield f"  {name}, times as fast: {median(gains(row, name)):.3f}"


def shares(row: Mapping[str, Any], way: str, of: str = "compute") -> list[float]:
    """Returns the speed of `way` relative to `of`, in each repeat."""
    return _ratios(row, of, way)


def of_bound(row: Mapping[str, Any], exchange: str) -> list[float]:
    """Returns max(computation, exchange) over the seconds of `delayed_mean`, in each repeat."""
    each = zip(*(row["raw"][way] for way in ("compute", exchange, "delayed")), strict=True)
    return [max(c, m) / took for c, m, took in each]


def gains(row: Mapping[str, Any], jobs: str) -> list[float]:
    """Returns the speed-up of a pair of jobs in crossover, in each repeat."""
    return _ratios(row, f"{jobs}, one after the other", f"{jobs}, in crossover")


def _ratios(row: Mapping[str, Any], above: str, below: str) -> list[float]:
    raw: Mapping[str, Sequence[float]] = row["raw"]
    return [a / b for a, b in zip(raw[above], raw[below], strict=True)]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws which share of the speed of computation alone is left, by the rate of the link."""
    from matplotlib.figure import Figure

    rows = sorted(
        (row for row in result["rows"] if row["part"] == "alone"), key=lambda row: -row["rate"]
    )
    figure = Figure(figsize=(9.5, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        for shift, way in ((-0.19, "blocking"), (0.19, "carried")):
            each = shares(row, way)
            middle = median(each)
            error = [[middle - min(each)], [max(each) - middle]]
            axes.barh(
                at + shift, middle, 0.36, color=COLOURS[way], xerr=error, error_kw={"lw": 0.8},
                label=LABELS[way] if at == 0 else None,
            )  # fmt: skip
            axes.text(
                0.01,
                at + shift,
                f"{middle:.2f}",
                va="center",
                color="white",
                fontsize=9.5,
                weight="bold",
            )
    axes.axvline(1, color="#333333", lw=1, ls="--")
    axes.set_yticks(range(len(rows)), [f"{row['rate']} Mbit/s" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(
        0,
        1.02 * max(1.06, *(share for row in rows for way in COLOURS for share in shares(row, way))),
    )
    axes.set_xlabel(
        "speed over that of computation alone (ResNet-50, streaming DiLoCo, a round of 16 steps)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.45, 1.16), ncols=2)
    figure.suptitle(
        "How fast is training on a slow network when exchanges are carried?", x=0.01, ha="left",
        fontsize=12.5, weight="bold",
    )  # fmt: skip
    figure.savefig(path)


LABELS = {
    "blocking": "exchange in the step that needs it",
    "carried": "exchange carried: it runs while later steps compute",
}
