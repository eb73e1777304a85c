"""`jaxcross.fuse` on one rank: what it rejects, and what it leaves to the jobs."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support import warm_python
from tests.support.script_text import RAISED

SCRIPT = (
    RAISED
    + """
import warnings
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax import lax
import jaxcross

warnings.simplefilter("ignore")
world = jaxcross.initialize()


def plain(state, batch):
    return state - lax.pmean(state * batch, "batch"), {}


def count(n):
    yield from map(float, range(1, n + 1))


def jobs(step, n=2, **options):
    return [jaxcross.Job(f"j{i}", step, jnp.ones(2), count(3), **options) for i in range(n)]


def reason(step, when="faster", **options):
    fusion = jaxcross.fuse(jobs(step, **options), when=when)
    assert len(fusion) == 2 and all(isinstance(job, jaxcross.Job) for job in fusion)
    return str(fusion)


cross = jaxcross.crossover(plain, axes="batch")
assert "is not a `crossover` step" in reason(plain)
assert "`plain` has `cut=2`" in reason(jaxcross.crossover(plain, axes="batch", cut=2))
assert '`j0` has `nonfinite="skip"`' in reason(cross, nonfinite="skip")
assert "exchanges nothing" in reason(jaxcross.crossover(lambda s, b: (s, {}), axes="batch"))
assert "cannot be traced" in reason(jaxcross.crossover(lambda s, b: (s.nowhere, {}), axes="batch"))
static = jaxcross.crossover(lambda s, b: (s, {}), axes="batch", static_argnums=1)
assert "has static arguments" in reason(static)
# Those of different steps, or that begin differently, are not fused with each other.
other = jaxcross.crossover(plain, axes="batch")
unlike = jaxcross.Job("z", other, jnp.ones(2), count(1))
assert len(jaxcross.fuse([*jobs(cross, 1), unlike], when="always")) == 2
local = jaxcross.Job("z", cross, jnp.ones(2), count(1), mode="local")
assert len(jaxcross.fuse([*jobs(cross, 1), local], when="always")) == 2



# What is wrong is said before anything runs.
def says(start, jobs, **options):
    text = raised(lambda: jaxcross.fuse(jobs, **options))
    assert text.startswith(start), text


def broken():
    raise OSError("no such shard")
    yield


shared = count(3)
says("ValueError: Some jobs cannot be fused: the step of `j0` is not", jobs(plain), when="always")
says("ValueError: `when` must be one of 'faster', 'always'", jobs(cross), when="often")
says("ValueError: Several jobs are named `j0`", [*jobs(cross, 1), *jobs(cross, 1)])
says("TypeError: `jobs` must be a list of `jaxcross.Job`s, got [1]", [1])
of_one = [jaxcross.Job(n, cross, jnp.ones(2), shared) for n in "ab"]
says("ValueError: `batches` of jobs `a` and `b` are the same iterator", of_one)
bad = jaxcross.Job("bad", cross, jnp.ones(2), broken())
says("JobError: Reading the first batch of job `bad` failed on rank 0: OSError", [bad])

# The first batch was looked at, and is not lost. A job without batches takes no part.
found = [*jobs(cross, 3), jaxcross.Job("none", cross, jnp.ones(2), [])]
fusion = jaxcross.fuse(found)
assert "`none` has no batch" in str(fusion), fusion
jaxcross.run(fusion)
assert [job.step for job in found] == [3, 3, 3, 0]
fused = jaxcross.fuse(jobs(cross, 3), when="always")
assert [job.name for job in fused] == ["j0+j1+j2"] and "fused, as asked" in str(fused)
assert repr(fused) == "<Fusion: 1 to run, 1 of them fused; print() says which, and why>"
report = jaxcross.run(fused)
assert report.jobs[0].steps == 3 and report.fusion == fused.reasons
assert "fused, as asked" in str(report)
report.to_json("report.json")
assert type(report).load("report.json").fusion == report.fusion

# A batch that the step overwrites is measured on copies.
def overwrites(state, batch):
    return state + lax.pmean(batch, "batch"), {"own": batch + 1}


donating = jaxcross.crossover(overwrites, axes="batch", donate_argnums=(0, 1))
found = [
    jaxcross.Job(f"d{i}", donating, jnp.ones(2), (jnp.full(2, k) for k in (1.0, 2.0)))
    for i in range(2)
]
fusion = jaxcross.fuse(found)
assert "alone takes" in str(fusion), fusion
jaxcross.run(fusion)
assert [(job.step, job.state.tolist()) for job in found] == [(2, [4.0, 4.0])] * 2
print("passed")
"""
)


@pytest.mark.integration
def test_fuse_on_one_rank(tmp_path):
    done = subprocess.run(
        [*warm_python.COMMAND, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr
