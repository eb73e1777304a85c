"""Prints a race's rows as a table, and draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rivals.cases import RIVALS

COLUMNS = (
    "rival",
    "s/job-step",
    "min to max",
    "steady",
    "efficiency",
    "with tax",
    "hidden",
    "T/c",
    "CPU s",
    "MB",
    "peak MB",
)


def show(facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Prints the table of one case at one rate."""
    there, back = (rate / 1e6 for rate in facts["tcp_bits_per_s"])
    first = rows[0]
    title = (
        f"{facts['case']} at {facts['rate']}: link {facts['link']}, TCP {there:.0f} and {back:.0f} "
        "Mbit/s"
    )
    table = Table(*COLUMNS, title=title)
    for row in rows:
        low, high = row["spread"]
        steady = row.get("steady_s_per_job_step")
        table.add_row(
            row["rival"],
            f"{row['s_per_job_step']:.3f}",
            f"{low:.3f} to {high:.3f}",
            "" if steady is None else f"{steady:.3f}",
            f"{row['efficiency']:.2f}",
            f"{row['efficiency_with_tax']:.2f}",
            f"{row['hidden_share']:.2f}",
            f"{row['over_own_compute']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['wire_bytes'] / 1e6:.1f}",
            f"{row['peak_rss_bytes'] / 1e6:.0f}",
        )
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    costs = ", ".join(f"{c:.3f} + {m:.3f}" for c, m in zip(first["c_s"], first["m_s"], strict=True))
    console.print(
        f"bound of {first['rival']}: {first['bound_s']:.3f} s a job-step, with tax "
        f"{first['bound_with_tax_s']:.3f}; c + m of each job: {costs}; tax of an exchange "
        f"{', '.join(f'{s:.3f}' for s in first['tax_s'])} s"
    )
    if (found := facts.get("wait_free")) is not None:
        console.print(
            f"wait-free: cut into {found['pieces']}; first bucket of the finest cut after "
            f"{found['first_bucket_s']:.3f} s, its last one takes {found['last_bucket_s']:.3f} s: "
            f"at best {found['best_s']:.3f} s a step"
        )


REFERENCES = {
    "float32": ("crossover", "wait-free"),
    "bfloat16": ("crossover-bf16", "wait-free-bf16"),
}
"""Per wire, the jaxcross rivals that all others are compared with: in cases with many jobs, and in
cases with one job.
"""


def over_reference(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Returns how many times as fast jaxcross is as this row's rival, or None if that's unknown.

    Compares the two values of T, for the same wire, run, case and rate.
    """
    same = [r for r in rows if all(r.get(key) == row.get(key) for key in ("run", "case", "rate"))]
    own = next((r for r in same if r["rival"] in REFERENCES[RIVALS[row["rival"]].wire]), None)
    return None if own is None else row["s_per_job_step"] / own["s_per_job_step"]


LOOKS = {"crossed": "#0072b2", "crossed-mpi4py": "#0072b2", "ddp": "#e69f00"}
"""The colours of jaxcross and PyTorch, the same in every picture. Other rivals are grey."""

BARS = (
    "crossover",
    "crossover-mpi4py",
    "crossover-cut",
    "crossover-shares",
    "wait-free",
    "uncut",
    "ddp-k",
    "ddp",
    "gloo-k",
    "fused-k",
    "fused",
)
"""The rivals to draw, from top to bottom. All of them send float32."""


def draw(case: str, result: dict[str, Any], path: Path) -> None:
    """Draws one case: the seconds per job-step of jaxcross and its rivals, with the bound.

    If a rate was measured in several runs, we take the run with the most rivals, and add from other
    runs on the same machine the rivals that it lacks.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["case"] == case]
    if not rows:
        return
    rates = list(
        dict.fromkeys(row["rate"] for row in sorted(rows, key=lambda row: row["rate_bits_per_s"]))
    )
    shown = {
        rate: _shown([row for row in rows if row["rate"] == rate], result["runs"]) for rate in rates
    }
    names = [name for name in BARS if any(name in shown[rate] for rate in rates)]
    size = (4.2 * len(rates) + 1, 0.42 * len(names) + 1.5)
    figure, axes = plt.subplots(
        1, len(rates), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, rate in zip(axes[0], rates, strict=True):
        own = shown[rate]
        for at, name in enumerate(names):
            if (row := own.get(name)) is None:
                continue
            color = LOOKS.get(RIVALS[name].team, "#b0b0b0")
            low, high = row["spread"]
            took = row["s_per_job_step"]
            axis.barh(
                at,
                took,
                color=color,
                height=0.75,
                xerr=[[took - low], [high - took]],
                error_kw={"lw": 0.8},
            )
            axis.text(
                0.02 * axis.get_xlim()[1],
                at,
                f"{took:.2f} s",
                va="center",
                fontsize=9,
                color="white",
            )
        bound = next(
            (own[name] for name in REFERENCES["float32"] if name in own), next(iter(own.values()))
        )["bound_with_tax_s"]
        axis.axvline(bound, color="black", lw=1, linestyle="--")
        axis.text(bound, -0.75, " bound", fontsize=8, va="center")
        axis.set_title(_named(next(iter(own.values()))), fontsize=10)
        axis.set_xlabel("seconds a job-step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    figure.suptitle(_answer(case, shown), fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _answer(case: str, shown: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the picture's title, which states the result that the picture shows."""
    own = next(
        (n for n in ("crossover", "wait-free") if any(n in rows for rows in shown.values())), ""
    )
    gains = [
        rows["fused"]["s_per_job_step"] / rows[own]["s_per_job_step"]
        for rows in shown.values()
        if own in rows and "fused" in rows
    ]
    if not gains:
        return f"Seconds a job-step of every rival, case {case}"
    times = f"{min(gains):.2f}" + (f" to {max(gains):.2f}" if len(gains) > 1 else "")
    return (
        f"{own.capitalize()} is {times} times as fast as one jit a step and mpi4jax (fused): case "
        f"{case}"
    )


def _shown(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns, for the rows of one rate, a mapping from rival to the row to draw."""
    raced = sorted(
        {row["run"] for row in rows}, key=lambda run: sum(row["run"] == run for row in rows)
    )
    alike = [run for run in raced if runs[run]["machine"] == runs[raced[-1]]["machine"]]
    return {row["rival"]: row for run in alike for row in rows if row["run"] == run}


def _named(row: dict[str, Any]) -> str:
    ratio = sum(row["m_s"]) / sum(row["c_s"])
    return f"exchange {ratio:.1f} times compute ({row['rate_bits_per_s'] / 1e6:.0f} Mbit/s)"
