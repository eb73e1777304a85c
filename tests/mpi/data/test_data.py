"""Jobs in crossover on two ranks share one decode, and each gets the same batches as alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxcross.data import synthesise

CASE = """
import hashlib, sys
import jax, jax.numpy as jnp
import jaxcross
from jaxcross.data import SharedDecode, train_batches

world = jaxcross.initialize()
data = train_batches(
    sys.argv[1], batch_size=4, image_size=8, rank=world.rank, size=world.size, steps=12
)

@jaxcross.crossover(axes="batch")
def step(state, batch):
    mean = jax.lax.pmean(batch["image"].mean(), "batch")
    return state * 0.5 + mean, {"loss": mean}

def train(readers, policy):
    jobs = [
        jaxcross.Job(f"job{n}", step, jnp.zeros(()), reader) for n, reader in enumerate(readers)
    ]
    jaxcross.run(jobs, policy=policy, world=world)
    return [float(job.state) for job in jobs]

shared = SharedDecode(data)
together = train([shared.reader(), shared.reader()], jaxcross.RoundRobin())
assert (shared.decoded, shared.redecoded, shared.served) == (12, 0, 24), vars(shared)
alone = train([data.at(0), data.at(0)], jaxcross.Sequential())
assert together == alone, (together, alone)
assert together[0] == together[1] != 0
values = world.control.allgather_text(str(together[0]))
assert len(values) == 2 and len(set(values)) == 1, values
if world.rank == 0:
    print("both ranks agree", flush=True)
"""


@pytest.mark.integration
def test_one_decode_in_crossover(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    synthesise(tmp_path, images=16, classes=2, width=24, height=24)
    done = mpirun(2, CASE, str(tmp_path)).check()
    assert "both ranks agree" in done.stdout
