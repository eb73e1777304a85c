"""Single-process benchmarks at toy size; their output has the question, command and versions."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import exchanges
import installations
import strategies
from convergence_show import NAMED

from jaxcross.exchange import mean


@pytest.mark.exhaustive
def test_overhead(smoke):
    result = smoke("overhead.py")
    assert result["question"].startswith("What does the cut cost")
    assert set(result["versions"]) >= {"python", "jax", "mpi4jax"}
    for case in ("mlp", "resnet50"):
        assert (
            len(result[case]["jit"]["raw"])
            == len(result[case]["jaxcross"]["raw"])
            == len(result[case]["by_hand"]["raw"])
            == 3
        )
    assert result["host_time_mlp"]["segments"] == 3
    # Memory is computed from XLA's figures rather than measured, so it doesn't vary and the bound
    # can be tight. If a step is cut whole, hardly more arrays are alive than in the fused step.
    assert 1 <= result["memory_transformer"]["cut_whole_over_fused"] < 1.05


@pytest.mark.integration
def test_hand_overs(smoke):
    rows = smoke("hand_overs.py")["models"]["mlp"]
    assert rows["mean"]["apart"] == rows["mean"]["cut"]
    for name in ("adasum of gradients", "adasum of gradients, hierarchical", "mean, tree"):
        assert rows[name]["apart"]["trips"] > 0 == rows[name]["cut"]["trips"], name
        assert rows[name]["cut"]["bytes"] < rows[name]["apart"]["bytes"], name
    assert all(row["cut"]["trips"] <= row["apart"]["trips"] for row in rows.values())
    assert rows["power_sgd, rank 2"]["cut"]["trips"] == 1, "products are the accelerator's"


@pytest.mark.integration
def test_wire_call(smoke):
    rows = smoke("wire_call.py")["raw_us"]
    assert all(len(times) == 3 for row in rows.values() for times in row.values())
    assert all(set(row) == {"mpi4jax", "mpi4py", "jit"} for row in rows.values())


@pytest.mark.integration
def test_installations(smoke):
    (row,) = smoke("installations.py")["rows"]
    assert "failed" not in row and row["versions"]["jax"] == jax.__version__
    assert installations.documented_lines()[-1].startswith("CUDA_PATH=/dev/null pip install")


@pytest.mark.integration
def test_scale(smoke):
    result = smoke("scale.py")
    for part in ("decision_by_jobs", "decision_by_segments", "run_by_jobs", "run_by_segments"):
        assert len(result[part]["rows"]) == 2
        assert "slope_of_total" in result[part]


@pytest.mark.exhaustive
def test_leaves(smoke):
    result = smoke("leaves.py")
    assert [row["leaves"] for row in result["rows"]] == [4, 8]
    assert all(
        len(row[how]["first_s"]["raw"]) == 1
        for row in result["rows"]
        for how in ("jit", "jaxcross")
    )


@pytest.mark.integration
def test_model_check(smoke):
    rows = smoke("model_check.py")["rows"]
    assert len(rows) == 6
    assert all(row["explored"] and row["joint_states"] > row["states"] / 2 for row in rows)
    assert {tuple(row["ends"]) for row in rows} == {("ended",), ("ended", "stopped"), ("failed",)}


@pytest.mark.integration
def test_selection(smoke):
    result = smoke("selection.py")
    kinds = [(4, "normal"), (41, "normal"), (410, "normal"), (41, "layers"), (41, "misleading")]
    assert [(row["k"], row["data"]) for row in result["rows"]] == kinds
    for row in result["rows"]:
        for found in row["ways"].values():
            assert found["count_error"] == 0
            assert found["recovered"] == pytest.approx(1, abs=1e-6)
    largest = result["largest"]
    assert largest["count_error"] == 0
    ways = result["rows"][1]["ways"]
    assert (
        largest["over_exact"]
        == ways[result["rows"][1]["chosen"]]["s"]["median"] / ways["exact"]["s"]["median"]
    )


def test_strategies_named_in_the_picture_are_declared():
    names = [
        s.name
        for s in (
            *strategies.STRATEGIES,
            *strategies.ROUTES,
            *strategies.GENTLER,
            *strategies.CONTROLS,
        )
    ]
    assert (
        set(names) > NAMED.keys() and len(NAMED) == len({color for color, _ in NAMED.values()}) <= 6
    )


@pytest.mark.exhaustive
def test_convergence(smoke, tmp_path):
    picture = tmp_path / "curves.png"
    result = smoke("convergence.py", "--png", str(picture))
    assert picture.stat().st_size > 10_000
    rows = {row["strategy"]: row for row in result["rows"] if row["task"] == "images"}
    received = {name: row["received_bytes"] for name, row in rows.items()}
    elements = 10 * 16 + 145 * 32 + 129 * 64 + 65 * 10
    assert received["mean"] == [
        2 * 4 * elements,
        4 * 4 * elements,
    ]  # on 2 ranks, after 2 and 4 steps
    assert received["local_sgd, every 8"] == [0, 0]
    first, last = received["one_bit_adam"]
    assert first > 4 * elements  # one Adam step, then signs: a sixteenth, plus scales
    assert last - first < 2 * 4 * elements / 16
    assert received["top_k 1%, exact"][-1] < 0.1 * received["mean"][-1]
    for row in result["rows"]:
        assert [len(curve) for curve in row["accuracy"]] == [2]
    growth = result["growth"]
    assert [(row["way"], row["ranks"]) for row in growth["rows"]] == [
        (way, ranks) for way in ("mean", "mean, rate times ranks", "adasum") for ranks in (1, 2)
    ]
    # With a single rank, all variants reduce to plain SGD.
    assert len({tuple(row["loss"][0]) for row in growth["rows"] if row["ranks"] == 1}) == 1
    assert [row["strategy"] for row in result["longer"]["rows"]] == ["mean", "top_k 1%, exact"]
    again = smoke("convergence.py", "--resume")
    assert again["rows"] == result["rows"]


@pytest.mark.exhaustive
def test_backend(smoke):
    result = smoke("backend.py")
    ways = {
        "as raced",
        "1x1 kernels as convolutions",
        "other convolutions in NCHW",
        "pages as the kernel gives them",
    }
    assert ways <= set(result["rows"])
    flags = {way for way in (*result["rows"], *result["unknown"]) if way.startswith("xla_")}
    assert len(flags) == 6 and flags & set(result["rows"])
    assert all(row["s"]["median"] > 0 for row in result["rows"].values())


def test_a_target_is_judged_by_every_repeat():
    """Strategies are compared with `mean` of the same repeat: a slow machine slows both."""

    def judged(own, of_mean):
        raw = {"mean": of_mean, "adasum of gradients": own}
        rows = {
            name: {key: {"raw": values} for key in ("total", "wire")}
            for name, values in raw.items()
        }
        (found,) = exchanges.judge("model", {"strategies": rows})
        return found

    assert judged([1.2, 2.5], [1.0, 2.0])["verdict"] == "met"
    assert judged([1.4, 3.0], [1.0, 2.0])["verdict"] == "missed"
    assert judged([1.2, 3.0], [1.0, 2.0]) == {
        "model": "model",
        "what": "Adasum",
        "of": "adasum of gradients",
        "over": "mean",
        "ratio": 1.35,
        "ratios": [1.2, 1.5],
        "target": 1.3,
        "verdict": "undecided",
    }


def test_bytes_are_those_of_a_step_as_it_is_cut():
    """Layers too small to be sent as float16 on four ranks share a buffer that's large enough."""
    layers = [jax.ShapeDtypeStruct((4096,), jnp.float32)] * 8
    wide, half = (
        strategies.received_bytes(mean("batch", wire_dtype=wire), layers, {"batch": 4})[0]
        for wire in (None, jnp.float16)
    )
    assert wide == 6 * 4096 * 8 == 2 * half
