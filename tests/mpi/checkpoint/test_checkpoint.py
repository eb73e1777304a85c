"""Training that is killed at random and restarted until it's finished ends in the same bits."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm_python

pytestmark = pytest.mark.integration


BENCHMARK = Path(__file__).parents[3] / "benchmarks/kill_resume.py"


def killed(tmp_path, *options, timeout, env=()):
    out = tmp_path / "out.json"
    line = [*warm_python.COMMAND, str(BENCHMARK), "--json", str(out), *options]
    subprocess.run(line, check=True, timeout=timeout, env={**os.environ, **dict(env)})
    return json.loads(out.read_text())


def test_run_killed_at_four_moments_resumes(mpirun, tmp_path, quick_compiler):
    """The seed draws the first write, a step of the other rank, a later write, and a deletion."""
    result = killed(
        tmp_path,
        "--trials",
        "1",
        "--ranks",
        "2",
        "--seed",
        "266253",
        timeout=900,
        env=quick_compiler,
    )
    assert result["survived"] == 1
    (trial,) = result["rows"]
    assert [(kill["rank"], kill["at"]) for kill in trial["kills"]] == [
        (0, "write"),
        (1, "step"),
        (0, "write"),
        (0, "delete"),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_killed_runs_resume(mpirun, ranks, tmp_path):
    result = killed(
        tmp_path, "--trials", "34", "--seed", "100", "--ranks", str(ranks), timeout=9000
    )
    assert result["trials"] == result["survived"] == 34


MASKED = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np, jaxcross

world = jaxcross.initialize(stall_timeout_s=60)
folder, killed_after = sys.argv[1], int(sys.argv[2])


@jaxcross.crossover(axes="batch")
def step(state, x):
    w, mask = state["w"], state["mask"]
    return {"w": w - 0.1 * jax.lax.pmean(jnp.sum(mask) * x, "batch"), "mask": mask + 1}, {}


def batches():
    for n in range(9):
        if n == killed_after and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.ones(3, np.float32)


start = {"w": jnp.zeros(3) + world.rank, "mask": jnp.zeros(2) + 1000 * world.rank}
job = jaxcross.Job(
    "a", step, start, batches(), mode="broadcast", rank_local="mask", check_replicas=1
)
report = jaxcross.run([job], checkpoints=jaxcross.Checkpoints(folder, every=1))
print(f"rank {world.rank}: {job.state['mask'].tolist()}, {report.jobs[0].replicas}", flush=True)
"""


def test_a_ranks_own_mask_survives_two_kills(mpirun, tmp_path, quick_compiler):
    for n, killed_after in enumerate((4, 7)):
        killed = mpirun(2, MASKED, str(tmp_path), str(killed_after), env=quick_compiler)
        assert killed.returncode != 0 and ("resumes after step" in killed.stderr) == (n > 0), (
            killed.stderr
        )
    done = mpirun(2, MASKED, str(tmp_path), "-1", env=quick_compiler).check()
    assert "resumes after step" in done.stderr
    for rank, own in enumerate(("[9.0, 9.0]", "[1009.0, 1009.0]")):
        assert f"rank {rank}: {own}, equal in 1 of 2 leaves" in done.stdout, done.stdout


RESIDUALS = """
import sys
import jax.numpy as jnp, optax, jaxcross
from jaxcross import exchange

world = jaxcross.initialize(stall_timeout_s=60)


def train(job, tx):
    def step(state, x):
        w, opt = state
        updates, opt = tx.update(w - x, opt, w)
        return optax.apply_updates(w, jnp.float32(-0.1) * updates), opt

    w = jnp.arange(16.0).reshape(4, 4)
    state, step = job.restore((w, tx.init(w))), jaxcross.crossover(step, axes="batch")
    for x in job.batches([jnp.full((4, 4), 3.0 * n + 7 * world.rank) for n in range(3)]):
        state = step(state, x)
    return state


runner = jaxcross.Runner(world, checkpoints=jaxcross.Checkpoints(sys.argv[1]))
runner.add("top_k", train, {"tx": exchange.top_k(0.25, "batch")})
one_bit = exchange.one_bit_adam(1, "batch", ranks=world.size, block=8)
runner.add("one_bit_adam", train, {"tx": one_bit})
runner.add("gtop_k", train, {"tx": exchange.gtop_k(0.25, "batch")})
runner.add("power_sgd", train, {"tx": exchange.power_sgd(1, "batch")})
runner.add("asynchronous", train, {"tx": exchange.asynchronous(optax.sgd(0.1), "batch", delays=2)})
try:
    runner.run()
except jaxcross.JobError:
    pass
for job in runner.jobs:
    print(f"rank {world.rank}: {job.name} step {job.step} {job.error}", flush=True)
"""


def test_residuals_of_two_ranks_are_refused_on_three(mpirun, tmp_path, quick_compiler):
    """Residuals of real exchanges. In every job, each rank has a residual before its first step."""
    kept = {
        "top_k": "residual",
        "one_bit_adam": "worker_residual",
        "gtop_k": "residual",
        "power_sgd": "residual",
    }
    kept["asynchronous"] = "queue"
    done = mpirun(2, RESIDUALS, str(tmp_path), env=quick_compiler).check()
    assert done.stdout.count("step 3 None") == 2 * len(kept), done.stdout
    done = mpirun(3, RESIDUALS, str(tmp_path), env=quick_compiler).check()
    for rank in range(3):
        for name, residual in kept.items():
            (line,) = [
                x for x in done.stdout.splitlines() if x.startswith(f"rank {rank}: {name} step 0 ")
            ]
            assert (
                "cannot resume on 3 ranks from" in line
                and "which 2 ranks wrote" in line
                and residual in line
            ), line
