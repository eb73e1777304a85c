"""Profiles of jobs that have run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross.plan import Profile, predict
from jaxcross.report import Report

pytestmark = pytest.mark.usefixtures("compiled_quickly")
N = 64


@jaxcross.crossover(axes="batch", donate_argnums=0)
def step(w, x):
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * jax.lax.pmean(grad, "batch")


def train(job, steps=6):
    w = jnp.ones((N, N))
    for x in job.batches(np.ones((8, N), np.float32) for _ in range(steps)):
        w = step(w, x)
    return w


def test_a_run_alone_has_a_profile(tmp_path: Path) -> None:
    """The profile has the program's segments, and at least its state, gradients and batch.

    The twin runs equally many steps.
    """
    with jaxcross.Runner(jaxcross.initialize()) as runner:
        runner.add("a", train)
        report = runner.run()
    profile = Profile.of(Report.load(report.to_json(tmp_path / "report.json")), "a")
    assert profile == Profile.of(report, "a")
    program = step.trace(jnp.ones((N, N)), np.ones((8, N), np.float32)).cut()
    assert profile.graph.kinds == tuple(segment.kind for segment in program.segments)
    assert profile.graph.needs == program.order.needs
    assert profile.exchange_s > 0 and profile.compute_s > 0
    assert profile.memory is not None
    assert 2 * N * N * 4 <= profile.memory.boundary_bytes <= profile.memory.peak_bytes
    assert predict([profile], steps=6).rounds.jobs[0].facts.steps == 6


def test_jobs_in_turn_have_profiles() -> None:
    with jaxcross.Runner(jaxcross.initialize(), policy=jaxcross.Sequential()) as runner:
        for name in "ab":
            runner.add(name, train)
        report = runner.run()
    assert {Profile.of(report, name).graph.kinds for name in "ab"} == {
        ("compute", "collective", "compute")
    }


def test_a_job_without_steps_has_none() -> None:
    with jaxcross.Runner(jaxcross.initialize()) as runner:
        runner.add("a", lambda job: None)
        report = runner.run()
    with pytest.raises(ValueError, match="no program"):
        Profile.of(report, "a")
