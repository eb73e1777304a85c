"""Shows the results of `data_cache.py` as a table, and draws the bytes that each level served.

    python benchmarks/data_cache_show.py RESULT.json PICTURE.png

Measures nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLORS = {"origin": "#d55e00", "disk": "#0072b2", "memory": "#009e73"}


def show(result: dict[str, Any]) -> None:
    print(f"{result['images']} records, {result['set_bytes'] / 1e6:.1f} MB, link {result['rate']}")
    print(f"{'':44}{'images/s by pass':>20}  {'sets from the origin':>20}  {'all/predicted':>13}")
    for name, row in result["ways"].items():
        if "missing" in row:
            print(f"{name:44}{row['missing']}")
            continue
        rates = " ".join(f"{each['images_per_s']:.0f}" for each in row["passes"])
        sets = " ".join(f"{each['origin_sets']:.2f}" for each in row["passes"])
        over = "" if row["over_predicted"] is None else f"{row['over_predicted']['median']:.3f}"
        print(f"{name:44}{rates:>20}  {sets:>20}  {over:>13}")
    print(
        "second pass through the cache over the local folder's: "
        f"{result['second_pass_over_local']:.3f}"
    )
    print(
        f"its CPU time an image over the local folder's: {result['second_pass_cpu_over_local']:.3f}"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the bytes that each level served to one job over time.

    One panel is for a data set that fits on disk, the other for one of which half fits.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name, runs in result["raw"].items() if runs[0].get("samples")]
    figure, (axes,) = plt.subplots(
        1,
        len(names),
        figsize=(5.2 * len(names), 3.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes, names, strict=True):
        run = result["raw"][name][0]
        times = [sample["s"] for sample in run["samples"]]
        for level, color in COLORS.items():
            given = [sample[level] / result["set_bytes"] for sample in run["samples"]]
            axis.plot(times, given, color=color, lw=2)
            axis.annotate(
                level,
                (times[-1], given[-1]),
                (5, -3),
                textcoords="offset points",
                color=color,
                fontsize=10,
            )
        for each in run["passes"]:
            axis.axvline(each["ended_s"], color="#c0c0c0", lw=0.8, zorder=0)
        title = name.removeprefix("cache, ").removesuffix(", 1 job")
        axis.set(title=f"{title} on the node's disk", xlabel="seconds; a grey line ends a pass")
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("times the data set, read from the level")
    figure.suptitle(_answer(result, names), fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _answer(result: dict[str, Any], names: list[str]) -> str:
    """Returns the picture's question with its answer: what the last pass reads from the origin."""
    shares = [
        (
            f"{result['ways'][name]['passes'][-1]['origin_sets']:.0%} where "
            f"{'half' if 'half' in name else 'all'} fits"
        )
        for name in names
    ]
    return f"How much of a later pass does the origin send?  {', '.join(shares)}"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
