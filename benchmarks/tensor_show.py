"""Prints and draws the results of `tensor.py`, and predicts meshes that don't fit on this machine.

This module doesn't measure anything.
"""

from __future__ import annotations

import statistics
from typing import Any

FAR = {"1-D": {"tensor": 64}, "2-D [8,8,1]": {"side": 8}, "2.5-D [4,4,4]": {"side": 4, "depth": 4}}
# A batch has b sequences of s tokens each, and the model has h features. We chose sizes for which
# b s is 12, 96 and 2.7 times h, because a rank receives less with [4,4,4] than with [8,8,1] if b s
# is more than 3 times h.
SIZES = ((96, 512, 4096), (384, 512, 2048), (16, 512, 3072))


def far(machine: dict[str, float]) -> list[dict[str, Any]]:
    """Predicts a layer's bytes and seconds on 64 ranks, by subtracting one layer from two."""
    from jaxcross import tensor

    constants, rows = tensor.Machine(**machine), []
    for b, s, h in SIZES:
        for name, sizes in FAR.items():
            one, two = (
                tensor.step_cost(
                    tensor.Transformer(64 * h, h, n, 64, s, tensor.Mesh(**sizes)), b, s
                )
                for n in (1, 2)
            )
            rows.append({
                "mesh": name, "sequences": b, "length": s, "features": h, "bs_over_h": b * s / h,
                "received_bytes": two.received_bytes - one.received_bytes,
                "weights_bytes": two.weights_bytes - one.weights_bytes,
                "exchange_s": two.exchange_s(constants) - one.exchange_s(constants),
                "s": two.seconds(constants) - one.seconds(constants),
            })  # fmt: skip
    return rows


def overhead(summary: dict[str, Any]) -> float:
    """Returns the share of a round in which the slower lane waited for dispatches and votes."""
    return sum(summary["lost_s"][cause] for cause in ("dispatch", "votes")) / summary["period_s"]


def speedup(found: dict[str, Any]) -> float:
    """Returns the median over the repeats of how much faster two jobs are in crossover.

    Within a repeat, both ways run right after each other.
    """
    alone, together = (
        found["s_per_job_step"][name]["raw"] for name in ("one after the other", "crossover")
    )
    return statistics.median(a / b for a, b in zip(alone, together, strict=True))


def say(result: dict[str, Any]) -> None:
    """Prints the numbers, and adds derived ones to the result."""
    for ranks, part in result["scaling"].items():
        machine, fit = part["machine"], part["fit"]
        print(
            f"{ranks} ranks: alpha {machine['alpha_s'] * 1e3:.2f} ms, "
            f"{machine['bytes_per_s'] / 1e6:.1f} MB/s, {machine['operations_per_s'] / 1e9:.1f} "
            f"Gflop/s a rank, off by {fit['relative_rms']:.0%}"
        )  # fmt: skip
        if fit["found_free"]:
            print(
                f"  the fit cannot tell {' and '.join(fit['found_free'])} from the rest: trust its "
                "sums, not its parts"
            )
        for row in part["rows"]:
            row["model_over_measured"] = row["model_s"] / row["s"]["median"]
            print(
                f"  {row['mesh']:5} batch {row['batch']:3} {row['s']['median']:.3f} s, model "
                f"{row['model_s']:.3f} ({row['model_over_measured']:.2f}); computing "
                f"{row['compute_s']:.3f} s, model {row['model_s'] - row['model_exchange_s']:.3f}, "
                f"exchange {row['exchange_s']:.3f} s, model {row['model_exchange_s']:.3f}; "
                f"{row['received_bytes'] / 1e6:.1f} MB received, {row['weights_bytes'] / 1e6:.2f} "
                f"MB of weights, {row['peak_live_bytes'] / 1e6:.1f} MB at most; {row['segments']} "
                f"segments, {row['executables']} executables"
            )  # fmt: skip
    for part, what in (("crossover", "two 1-D jobs"), ("unlike", "a 1-D and a data-parallel job")):
        found = result[part]
        found["speedup"], summary = speedup(found), found["accounts"]["one after the other"]
        exchange_s, compute_s = (
            sum(job[key] for job in summary["jobs"]) for key in ("exchange_s", "compute_s")
        )
        found["exchange_share"] = exchange_s / (exchange_s + compute_s)
        steady = {name: account for name, account in found["accounts"].items() if account["lost_s"]}
        found["overhead"] = {name: overhead(account) for name, account in steady.items()}
        host = (
            f"{max(found['overhead'].values()):.1%}"
            if steady
            else "an unknown share: no run reached a steady state"
        )
        found_efficiency = found["accounts"]["crossover"]["efficiency"]
        efficiency = "unknown" if found_efficiency is None else f"{found_efficiency:.2f}"
        print(
            f"crossover of {what}: {found['speedup']:.2f} times as fast, "
            f"{found['exchange_share']:.0%} of a step is exchange; bound / T {efficiency}; the "
            f"host costs {host}"
        )  # fmt: skip
    for row in result["far"]:
        times = f"{row['exchange_s']:6.1f} s of {row['s']:6.1f} s"
        size = f"{row['received_bytes'] / 1e6:7.0f} MB a layer"
        print(f"model, 64 ranks, b s / h {row['bs_over_h']:5.1f}: {row['mesh']:14} {size}, {times}")


def draw(result: dict[str, Any], path: str) -> None:
    """Draws measured and modelled steps, and the bytes per layer on 64 ranks for each b s / h."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from jaxcross import tensor

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rows = [(ranks, row) for ranks, part in result["scaling"].items() for row in part["rows"]]
    at = range(len(rows))
    exchange = [row["model_exchange_s"] for _, row in rows]
    compute = [row["model_s"] - row["model_exchange_s"] for _, row in rows]
    left.bar(at, compute, 0.6, color="#8da0cb", label="model: computation")
    left.bar(at, exchange, 0.6, bottom=compute, color="#fc8d62", label="model: exchange")
    middle = [row["s"]["median"] for _, row in rows]
    low = [m - row["s"]["p25"] for m, (_, row) in zip(middle, rows, strict=True)]
    high = [row["s"]["p75"] - m for m, (_, row) in zip(middle, rows, strict=True)]
    left.errorbar(
        at,
        middle,
        yerr=[low, high],
        fmt="k_",
        markersize=22,
        capsize=3,
        label="measured, quartiles",
    )
    left.set_xticks(
        at, [f"{row['mesh']}\n{ranks} ranks\nb = {row['batch']}" for ranks, row in rows]
    )
    left.set_ylabel("seconds a step")
    left.set_title(f"A small GPT over links of {result['rate']}")
    left.legend(frameon=False)
    h, s = 1024, 64
    batches = [16, 32, 64, 128, 256, 512, 1024]
    for name, sizes in FAR.items():
        mesh, values = tensor.Mesh(**sizes), []
        usable = [b for b in batches if b % mesh.size(mesh.batch) == 0]
        for b in usable:
            one, two = (
                tensor.step_cost(tensor.Transformer(64 * h, h, n, 64, s, mesh), b, s)
                for n in (1, 2)
            )
            values.append((two.received_bytes - one.received_bytes) / 1e6)
        right.loglog([b * s / h for b in usable], values, marker="o", markersize=3, label=name)
    right.axvline(3, color="grey", linewidth=1, linestyle=":")
    right.text(3.15, right.get_ylim()[0] * 1.2, "b s = 3 h", color="grey")
    right.set_xlabel("b s / h")
    right.set_ylabel("MB a rank receives, a layer")
    right.set_title("64 ranks, h = 1024: the formulas")
    right.legend(frameon=False)
    figure.savefig(path, dpi=110)
