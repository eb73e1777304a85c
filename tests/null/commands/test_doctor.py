"""What the doctor makes of its findings."""

from dataclasses import replace

import pytest

from jaxcross.commands.doctor import Findings, exit_code, judge

HEALTHY = Findings(
    probe={
        "mpi": {"library": "MPICH 5", "standard": "5.0", "thread_level": "multiple"},
        "mpi4jax": {"version": "0.9", "built_for": "MPICH 5", "cuda": False},
        "jax": {"version": "0.10.2", "jaxlib": "0.10.2", "devices": ["cpu:cpu"]},
    },
    exchange={"ranks": 2, "pool": 4, "correct": True},
    mpirun=("/venv/bin/mpirun", "mpich"),
    cores=2,
    machine_cores=2,
    pool=2,
    no_namespaces=None,
)


def with_probe(name, value):
    return replace(HEALTHY, probe={**HEALTHY.probe, name: value})


def test_a_healthy_machine():
    checks = judge(HEALTHY)
    assert exit_code(checks) == 0
    assert [c.remedy for c in checks] == [""] * len(checks)
    names = "MPI, thread level, mpi4jax, JAX, mpirun, all-reduce of 2 ranks, XLA CPU pool, binding, network namespaces"
    assert [c.name for c in checks] == names.split(", ")


WRONG = [
    (with_probe("mpi", {"error": "cannot load"}), "MPI", True, "Install an MPI next to jaxcross"),
    (with_probe("mpi", {**HEALTHY.probe["mpi"], "thread_level": "single"}), "thread level", True, "jaxcross needs"),
    (with_probe("mpi4jax", {"error": "ABI"}), "mpi4jax", True, "Rebuild it for the MPI that is loaded"),
    (with_probe("mpi4jax", {**HEALTHY.probe["mpi4jax"], "warnings": ["too new"]}), "mpi4jax", False, "too new"),
    (with_probe("jax", {"error": "no driver"}), "JAX", True, "JAX cannot start"),
    (replace(HEALTHY, mpirun=None), "mpirun", True, "Install an MPI next to jaxcross"),
    (replace(HEALTHY, exchange={"error": "time"}), "all-reduce of 2 ranks", True, "`mpirun` and mpi4py's MPI must"),
    (replace(HEALTHY, exchange={"ranks": 1, "correct": True}), "all-reduce of 2 ranks", True, "`mpirun` and mpi4py's"),
    (replace(HEALTHY, pool=1), "XLA CPU pool", True, "Unset `NPROC` and `PJRT_NPROC`"),
    (replace(HEALTHY, cores=1, machine_cores=8), "binding", False, "This shell is bound to one core"),
    (
        replace(HEALTHY, no_namespaces="no lab: `tc` is missing"),
        "network namespaces",
        False,
        "`jaxcross demo` will emulate its link",
    ),
]


@pytest.mark.parametrize(
    ("findings", "name", "fatal", "remedy"), WRONG, ids=[f"{w[1]}-{i}" for i, w in enumerate(WRONG)]
)
def test_each_wrong_thing_has_a_remedy(findings, name, fatal, remedy):
    checks = judge(findings)
    wrong = {c.name: c for c in checks if c.remedy}
    assert name in wrong and wrong[name].remedy.startswith(remedy)
    assert exit_code(checks) == int(fatal)
