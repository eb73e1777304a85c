"""Both wires: which one a world has, and that a step's results don't belong to an arena."""

import pytest

from tests.support.optional import NEEDS_MPI4JAX

MPI4JAX = pytest.param("mpi4jax", marks=[pytest.mark.integration, NEEDS_MPI4JAX])


@pytest.mark.parametrize("wire", [MPI4JAX, "mpi4py"])
def test_what_steps_return_never_changes(mpirun, tmp_path, quick_compiler, wire):
    done = mpirun(
        2, "kept_results.py", str(tmp_path), env={**quick_compiler, "JAXCROSS_WIRE": wire}
    ).check()
    assert done.stdout.count(": kept") == 2, done.stdout


MIXED = """
import os, jaxcross
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
try:
    jaxcross.initialize(wire="mpi4py" if rank == 1 else "mpi4jax")
except jaxcross.ExchangeError as error:
    print(f"raised: {error}", flush=True)
"""


@NEEDS_MPI4JAX
def test_ranks_with_different_wires_raise(mpirun):
    done = mpirun(3, MIXED).check()
    text = (
        "raised: Ranks would exchange by different libraries: mpi4jax on ranks 0, 2; mpi4py on "
        "rank 1."
    )
    assert done.stdout.count(text) == 3, done.stdout + done.stderr


MISSING = """
import sys
sys.modules["mpi4jax"] = None  # as if it weren't installed
import jax, jaxcross, logging
logging.basicConfig(level=logging.INFO)
world = jaxcross.initialize()
step = jaxcross.crossover(lambda x: jax.lax.psum(x, "b"), axes="b")
assert world.over == "mpi4py" and float(step(world.rank + 1.0)) == 3.0
try:
    jaxcross.initialize(wire="mpi4jax")
except ValueError as error:
    print(f"raised: {error}", flush=True)
"""


def test_a_world_without_mpi4jax_exchanges_over_mpi4py(mpirun):
    done = mpirun(2, MISSING, env={"JAXCROSS_WIRE": ""}).check()
    assert done.stderr.count("Exchanges go over mpi4py: mpi4jax isn't installed.") == 1, done.stderr
    assert (
        done.stdout.count("raised: jaxcross is initialised already, with `wire='mpi4py'`") == 2
    ), done.stdout
