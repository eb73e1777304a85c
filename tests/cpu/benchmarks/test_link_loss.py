"""Loss against training time over a link: rows, the plot, and bytes of alternating fragments."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import link_loss_show
import strategies
from strategies import AXIS, one_axis

from jaxcross import exchange

ROW = {
    "task": "text",
    "strategy": "mean",
    "rate": "25mbit",
    "steps": 4,
    "s_per_step": 0.5,
    "final_test_loss": 1.5,
    "seconds": [[1.0, 2.0], [1.0, 4.0], [1.0, 3.0]],
    "test_loss": [[3.0, 1.0], [1.9, 2.1], [2.0, 1.4]],
}


def test_seconds_to_a_loss_are_the_median_of_the_seeds():
    assert link_loss_show.first_at(ROW, 2.0) == 1.0
    assert link_loss_show.first_at(ROW, 1.9) == 2.0
    assert link_loss_show.first_at(ROW, 1.4) is None, "one seed never got there"


@pytest.mark.integration
def test_a_row_is_a_line_and_the_picture_is_drawn(tmp_path):
    diverged = {
        **ROW,
        "strategy": "decoupled_momentum 1%",
        "final_test_loss": None,
        "test_loss": [[3.0, None]] * 3,
    }
    assert "test loss 1.500" in link_loss_show.line(
        ROW
    ) and "500.0 ms a step" in link_loss_show.line(ROW)
    assert "diverged" in link_loss_show.line(diverged)
    link_loss_show.draw({"rows": [ROW, diverged]}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_the_title_has_the_answer_of_each_task():
    rare = {**ROW, "strategy": "streaming_diloco, every 8, 4 bits"}
    slow = {**ROW, "seconds": [[120.0, 240.0]] * 3}
    images = {**rare, "task": "images"}  # without `mean`, there's no baseline
    question, *answers = link_loss_show.title(
        {"rows": [slow, rare, images]}, ["text", "images"]
    ).split("\n")
    assert question == "How soon does a model learn over a slow link?"
    assert answers == ["text, to a test loss of 2.5: mean 120 s, streaming DiLoCo 1.0 s"]


@pytest.mark.integration
@pytest.mark.parametrize(("delay", "sends"), [(0, {3, 7, 11}), (4, {4, 5, 6, 7, 8, 9, 10, 11})])
def test_bytes_of_a_step_follow_the_turns_of_fragments(delay, sends):
    """Exchanges two fragments alternately, one every 4 steps.

    With a delay of 0, a fragment is sent in a single step, so the steps in between send nothing.
    With a delay of 4, a fragment's exchange is spread over 4 steps, so that every step sends a part
    once the first exchange has begun.
    """
    tx = exchange.streaming_diloco(
        optax.sgd(0.1), optax.sgd(1.0), AXIS, every=8, fragments=2, delay=delay, bits=8
    )
    params = [jax.ShapeDtypeStruct((512,), jnp.float32)] * 4
    found = strategies.received_bytes(tx, params, one_axis(2), range(12))
    assert {step for step, nbytes in found.items() if nbytes} == sends
    a_fragment = 1024 + 4 * 1024 // 128 // 4 * 4  # integers, and one float32 scale per 128 of them
    assert sum(found.values()) == pytest.approx(len(sends) / (delay or 1) * a_fragment, rel=0.05)
