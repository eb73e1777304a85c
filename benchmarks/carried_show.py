"""Rows of `carried.py` as lines, and the picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TARGETS = {500: 0.97, 100: 0.95, 25: 0.90}
"""Seconds of computation alone over those of a carried step, by megabits per second."""
COLOURS = {"blocking": "#e69f00", "carried": "#0072b2"}


def lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields a part as lines."""
    yield f"{row['part']} at {row['rate']} Mbit/s"
    for way, seconds in row["s"].items():
        share = row.get("of_compute", {}).get(way)
        yield f"  {way:40} {seconds:8.3f} s" + ("" if share is None else f"   {share:.3f} of computation alone")
    for key in ("of_bound", "of_bound_beside", "two, gain", "mean and carried, gain"):
        if key in row:
            yield f"  {key}: {row[key]:.3f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes the picture: what is left of the speed of computation alone, by rate of the link."""
    from matplotlib.figure import Figure

    rows = sorted((row for row in result["rows"] if row["part"] == "alone"), key=lambda row: -row["rate"])
    figure = Figure(figsize=(9.5, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        for shift, way in ((-0.19, "blocking"), (0.19, "carried")):
            shares = _shares(row, way)
            middle = row["of_compute"][way]
            error = [[middle - min(shares)], [max(shares) - middle]]
            axes.barh(
                at + shift, middle, 0.36, color=COLOURS[way], xerr=error, error_kw={"lw": 0.8},
                label=LABELS[way] if at == 0 else None,
            )  # fmt: skip
            axes.text(0.01, at + shift, f"{middle:.2f}", va="center", color="white", fontsize=9.5, weight="bold")
    axes.axvline(1, color="#333333", lw=1, ls="--")
    axes.set_yticks(range(len(rows)), [f"{row['rate']} Mbit/s" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * max(1.06, *(share for row in rows for way in COLOURS for share in _shares(row, way))))
    axes.set_xlabel("speed over that of computation alone (ResNet-50, streaming DiLoCo, a round of 16 steps)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.45, 1.16), ncols=2)
    figure.suptitle(
        "How fast is training on a slow network when exchanges are carried?", x=0.01, ha="left",
        fontsize=12.5, weight="bold",
    )  # fmt: skip
    figure.savefig(path)


def _shares(row: Mapping[str, Any], way: str) -> list[float]:
    return [c / took for c, took in zip(row["raw"]["compute"], row["raw"][way], strict=True)]


LABELS = {
    "blocking": "exchange in the step that needs it",
    "carried": "exchange carried: it runs while later steps compute",
}
