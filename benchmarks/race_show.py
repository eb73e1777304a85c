"""A race's rows as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rivals.cases import RIVALS

COLUMNS = (
    "rival", "s/job-step", "min to max", "steady", "efficiency", "with tax", "hidden", "T/c", "CPU s", "MB", "peak MB",
)  # fmt: skip


def show(facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Prints one table: a case at a rate."""
    there, back = (rate / 1e6 for rate in facts["tcp_bits_per_s"])
    first = rows[0]
    title = f"{facts['case']} at {facts['rate']}: link {facts['link']}, TCP {there:.0f} and {back:.0f} Mbit/s"
    table = Table(*COLUMNS, title=title)
    for row in rows:
        low, high = row["spread"]
        steady = row.get("steady_s_per_job_step")
        table.add_row(
            row["rival"], f"{row['s_per_job_step']:.3f}", f"{low:.3f} to {high:.3f}",
            "" if steady is None else f"{steady:.3f}", f"{row['efficiency']:.2f}", f"{row['efficiency_with_tax']:.2f}",
            f"{row['hidden_share']:.2f}", f"{row['over_own_compute']:.2f}", f"{row['cpu_s']:.2f}",
            f"{row['wire_bytes'] / 1e6:.1f}", f"{row['peak_rss_bytes'] / 1e6:.0f}",
        )  # fmt: skip
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    words = ", ".join(f"{c:.3f} + {m:.3f}" for c, m in zip(first["c_s"], first["m_s"], strict=True))
    console.print(
        f"bound of {first['rival']}: {first['bound_s']:.3f} s a job-step, with tax {first['bound_with_tax_s']:.3f}; "
        f"c + m of each job: {words}; tax of an exchange {', '.join(f'{s:.3f}' for s in first['tax_s'])} s"
    )
    if (found := facts.get("wait_free")) is not None:
        console.print(
            f"wait-free: cut into {found['pieces']}; first bucket of the finest cut after "
            f"{found['first_bucket_s']:.3f} s, its last one takes {found['last_bucket_s']:.3f} s: "
            f"at best {found['best_s']:.3f} s a step"
        )


REFERENCES = {
    "float32": ("crossover", "wait-free"), "bfloat16": ("crossover-bf16", "wait-free-bf16"),
}  # fmt: skip
"""Of a case with many jobs, and with one: whom the others with the same wire are held against."""


def over_reference(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """The row's T over jaxcross's on the same wire, in the same run, case and rate: how many times as fast it is."""
    same = [r for r in rows if all(r.get(key) == row.get(key) for key in ("run", "case", "rate"))]
    own = next((r for r in same if r["rival"] in REFERENCES[RIVALS[row["rival"]].wire]), None)
    return None if own is None else row["s_per_job_step"] / own["s_per_job_step"]


def draw(case: str, result: dict[str, Any], path: Path) -> None:
    """Writes a picture of one case: what each rival took at each rate, against the bounds, and what it cost.

    Of a rate that was raced several times, the run with the most rivals counts; others of the same machine add theirs.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["case"] == case]
    if not rows:
        return
    rows = [{**row, "over_reference": over_reference(row, rows) or 0.0} for row in rows]
    rates = list(dict.fromkeys(row["rate"] for row in sorted(rows, key=lambda row: row["rate_bits_per_s"])))
    shown = {rate: _shown([row for row in rows if row["rate"] == rate], result["runs"]) for rate in rates}
    rivals = [name for name in RIVALS if any(name in shown[rate] for rate in rates)]
    panels = (
        ("s_per_job_step", 1.0, "s a job-step"), ("over_reference", 1.0, "T / jaxcross's T"),
        ("efficiency", 1.0, "bound / T"), ("hidden_share", 1.0, "hidden share"), ("cpu_s", 1.0, "CPU s a job-step"),
        ("wire_bytes", 1e-6, "MB a job-step"), ("peak_rss_bytes", 1e-9, "peak GB a host"),
    )  # fmt: skip
    figure, axes = plt.subplots(len(panels), 1, figsize=(1.2 * len(rivals) + 3, 16), sharex=True, layout="constrained")
    width = 0.8 / len(rates)
    for axis, (key, scale, label) in zip(axes, panels, strict=True):
        for n, rate in enumerate(rates):
            own = shown[rate]
            at = [i + (n - (len(rates) - 1) / 2) * width for i, r in enumerate(rivals) if r in own]
            chosen = [own[r] for r in rivals if r in own]
            bars = axis.bar(at, [row[key] * scale for row in chosen], width, label=_named(chosen[0]))
            if key == "s_per_job_step":
                low = [row[key] - row["spread"][0] for row in chosen]
                high = [row["spread"][1] - row[key] for row in chosen]
                axis.errorbar(at, [row[key] for row in chosen], [low, high], fmt="none", ecolor="black", lw=0.8)
                for x, row, bar in zip(at, chosen, bars, strict=True):
                    ends = x - width / 2, x + width / 2
                    axis.hlines(row["bound_s"], *ends, colors="black", lw=1.5)
                    axis.hlines(row["bound_with_tax_s"], *ends, colors="black", lw=1.0, linestyles="dotted")
                    bar.set_alpha(0.85)
        if key in ("over_reference", "efficiency", "hidden_share"):
            axis.axhline(1.0, color="black", lw=0.8, linestyle="dashed")
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(rates))
    axes[0].set_title(f"case `{case}`: bounds as lines, with the exchange's tax dotted")
    axes[-1].set_xticks(range(len(rivals)), rivals, rotation=30, ha="right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shown(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of one rate: rival -> the row to draw."""
    raced = sorted({row["run"] for row in rows}, key=lambda run: sum(row["run"] == run for row in rows))
    alike = [run for run in raced if runs[run]["machine"] == runs[raced[-1]]["machine"]]
    return {row["rival"]: row for run in alike for row in rows if row["run"] == run}


def _named(row: dict[str, Any]) -> str:
    return f"{row['rate']} ({row['rate_bits_per_s'] / 1e6:.0f} Mbit/s)"
