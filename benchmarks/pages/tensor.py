"""The tables of benchmarks/results/tensor.md."""

from __future__ import annotations

from collections.abc import Iterator

from pages import Read, Table


def tensor(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Measured and modelled steps of tensor-parallel meshes."""
    yield (
        "ranks",
        "mesh",
        "batch",
        "measured s",
        "model s",
        "model / measured",
        "MB received",
        "MB of weights",
        "MB at most",
    )
    for ranks, part in read("tensor")["scaling"].items():
        for row in part["rows"]:
            sizes = (
                f"{row[key] / 1e6:.1f}"
                for key in ("received_bytes", "weights_bytes", "peak_live_bytes")
            )
            yield (
                ranks,
                row["mesh"],
                str(row["batch"]),
                f"{row['s']['median']:.2f}",
                f"{row['model_s']:.2f}",
                f"{row['model_over_measured']:.2f}",
                *sizes,
            )


def tensor_crossover(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Two jobs, of which one or both are tensor-parallel."""
    yield (
        "jobs",
        "turns",
        "s a job-step",
        "times as fast",
        "exchange, share of a step",
        "dispatch and votes",
    )
    for part, what in (("crossover", "two 1-D"), ("unlike", "1-D and data-parallel")):
        found = read("tensor")[part]
        for way, row in found["s_per_job_step"].items():
            alone = way != "crossover"
            fast, share = (
                ("1", f"{found['exchange_share']:.0%}")
                if alone
                else (f"{found['speedup']:.2f}", "")
            )
            yield what, way, f"{row['median']:.3f}", fast, share, f"{found['overhead'][way]:.1%}"


def tensor_far(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """The model's prediction for 64 ranks.

    The bytes don't depend on measurements; the times use the constants of four ranks.
    """
    yield (
        "b, s, h",
        "b s / h",
        "mesh",
        "MB received",
        "MB of weights",
        "over [8,8,1]'s bytes",
        "over its time",
    )
    rows = read("tensor")["far"]
    flat = {row["bs_over_h"]: row for row in rows if row["mesh"] == "2-D [8,8,1]"}
    for row in rows:
        sizes = (f"{row[key] / 1e6:.0f}" for key in ("received_bytes", "weights_bytes"))
        shape = f"{row['sequences']}, {row['length']}, {row['features']}"
        over = (f"{row[key] / flat[row['bs_over_h']][key]:.2f}" for key in ("received_bytes", "s"))
        yield shape, f"{row['bs_over_h']:.1f}", row["mesh"], *sizes, *over


TABLES: dict[str, Table] = {
    "tensor": tensor,
    "tensor-crossover": tensor_crossover,
    "tensor-far": tensor_far,
}
