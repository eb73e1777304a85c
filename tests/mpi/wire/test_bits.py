"""Sums over both wires, bit for bit."""

import json

import pytest

from tests.support.optional import NEEDS_MPI4JAX


@NEEDS_MPI4JAX
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.integration) for n in (3, 4, 8))]
)
def test_both_wires_give_the_same_bits(mpirun, ranks, quick_compiler):
    """Sums in place have the same bits, too.

    Open MPI's non-blocking sums have different bits, e.g. for 20,000 elements on 3 ranks.
    """
    done = mpirun(ranks, "wire_bits.py", timeout=900, env=quick_compiler).check()
    differ = json.loads(done.stdout.strip().splitlines()[-1])
    vendor, others = differ.pop("vendor"), differ.pop("without blocking")
    assert differ == {"mpi4jax": [], "mpi4py": [], "in place": []}
    assert vendor == "openmpi" or others == []
