"""Tests what the doctor concludes from its findings."""

from dataclasses import replace

import pytest

from jaxcross.commands.doctor import MachineFacts, exit_code, judge, libraries_of, reason_in

HEALTHY = MachineFacts(
    probe={
        "mpi": {"library": "MPICH 5", "standard": "5.0", "thread_level": "multiple"},
        "mpi4jax": {"version": "0.9", "built_for": "MPICH 5", "cuda": False},
        "jax": {"version": "0.10.2", "jaxlib": "0.10.2", "devices": ["cpu:cpu"]},
    },
    exchange={"ranks": 2, "pool": 4, "over": "mpi4jax", "correct": True},
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "mpi4jax": "0.9"},
    mpirun=("/venv/bin/mpirun", "mpich"),
    libraries="/venv/lib",
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
    names = (
        "MPI, thread level, mpi4jax, JAX, mpirun, all-reduce of 2 ranks, XLA CPU pool, binding, "
        "network namespaces"
    )
    assert [c.name for c in checks] == names.split(", ")


WRONG = [
    (
        replace(with_probe("mpi", {"error": "cannot load"}), libraries=None),
        "MPI",
        True,
        "Install an MPI alongside jaxcross",
    ),
    (
        with_probe("mpi", {**HEALTHY.probe["mpi"], "thread_level": "single"}),
        "thread level",
        True,
        "jaxcross needs",
    ),
    (
        replace(with_probe("mpi4jax", {"error": "ABI"}), exchange={"error": "ABI"}),
        "mpi4jax",
        True,
        "Build it for the MPI",
    ),
    (
        with_probe("mpi4jax", {"error": "exchanges go over mpi4py"}),
        "mpi4jax",
        False,
        "Build it for the MPI",
    ),
    (
        with_probe("mpi4jax", {**HEALTHY.probe["mpi4jax"], "warnings": ["too new"]}),
        "mpi4jax",
        False,
        "too new",
    ),
    (
        with_probe("jax", {"error": "no driver"}),
        "JAX",
        True,
        "JAX cannot start: check the accelerator's driver",
    ),
    (
        with_probe(
            "jax",
            {
                "error": (
                    "RuntimeError: jaxlib version 0.10.2 is newer than and incompatible with jax"
                )
            },
        ),
        "JAX",
        True,
        "Install jax and jaxlib of one version: `pip install jax==0.10.2 jaxlib==0.10.2`.",
    ),
    (
        replace(
            with_probe("jax", {"error": "no attribute"}),
            versions={"jax": "0.9.2", "jaxlib": "0.9.2"},
        ),
        "JAX",
        True,
        "jaxcross needs jax 0.10 to 0.12; this is 0.9.2.",
    ),
    (replace(HEALTHY, mpirun=None), "mpirun", True, "Install an MPI alongside jaxcross"),
    (
        replace(HEALTHY, exchange={"error": "time"}),
        "all-reduce of 2 ranks",
        True,
        "`mpirun` and mpi4py's MPI must",
    ),
    (
        replace(HEALTHY, exchange={"ranks": 1, "correct": True}),
        "all-reduce of 2 ranks",
        True,
        "`mpirun` and mpi4py's",
    ),
    (replace(HEALTHY, pool=1), "XLA CPU pool", True, "Unset `NPROC` and `PJRT_NPROC`"),
    (
        replace(HEALTHY, cores=1, machine_cores=8),
        "binding",
        False,
        "This shell is bound to one core",
    ),
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


def test_warning_of_a_jax_that_is_tested_is_left_out():
    text = (
        "The latest supported JAX version with this release of mpi4jax is 0.11.2, but you have "
        "0.12.0.1."
    )
    checks = judge(with_probe("mpi4jax", {**HEALTHY.probe["mpi4jax"], "warnings": [text]}))
    assert [c.remedy for c in checks] == [""] * len(checks)


def test_reason_of_an_end_is_its_exception():
    """MPI prints its own lines after the exception."""
    raised = "Traceback (most recent call last):\njaxcross.errors.ExchangeError: no wire\n"
    assert reason_in(raised + "Abort(1) on node 1") == "jaxcross.errors.ExchangeError: no wire"
    assert reason_in("libmpi.so: cannot open\n") == "libmpi.so: cannot open"
    assert reason_in("") == "no output"


def test_mpi4jax_is_optional():
    missing = replace(
        with_probe("mpi4jax", {"error": "No module named 'mpi4jax'"}), versions={"jax": "0.10.2"}
    )
    checks = judge(missing)
    assert [c.remedy for c in checks] == [""] * len(checks)
    (found,) = [c.found for c in checks if c.name == "mpi4jax"]
    assert found.startswith("not installed, which is fine")


NOTHING_LOADS = {
    "error": "RuntimeError: cannot load MPI library\nlibmpi.so: cannot open shared object file"
}
HALF_AN_MPI = replace(
    HEALTHY,
    probe={"mpi": NOTHING_LOADS, "mpi4jax": NOTHING_LOADS, "jax": HEALTHY.probe["jax"]},
    exchange={"error": "exit code 1: libmpi.so: cannot open shared object file"},
    mpirun=("/opt/mpich/bin/mpirun", "unknown"),
    libraries="/opt/mpich/lib",
)


def test_bin_without_lib_is_one_remedy():
    """If an MPI's `bin` folder is on the path but its `lib` folder isn't, several checks fail.

    All of these failures have the same cause, so the doctor suggests a single remedy.
    """
    checks = judge(HALF_AN_MPI)
    (remedy,) = [check.remedy for check in checks if check.remedy]
    assert remedy.endswith(
        "`export LD_LIBRARY_PATH=/opt/mpich/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}`."
    )
    mpi, *others = [check for check in checks if check.cause or check.fatal]
    assert mpi.found == (
        "RuntimeError: cannot load MPI library; `/opt/mpich/bin/mpirun` is on the path, its "
        "library in `/opt/mpich/lib` is not"
    )
    assert [(check.name, check.cause) for check in others] == [
        (name, "MPI") for name in ("thread level", "mpi4jax", "all-reduce of 2 ranks")
    ]
    assert exit_code(checks) == 1


CONSEQUENCES = [
    (replace(HEALTHY, mpirun=None, exchange={"error": "no `mpirun`"}), "mpirun"),
    (replace(with_probe("mpi4jax", {"error": "ABI"}), exchange={"error": "ABI"}), "mpi4jax"),
    (replace(with_probe("jax", {"error": "no driver"}), exchange={"error": "no driver"}), "JAX"),
    (replace(HEALTHY, pool=1, exchange={"error": "pool"}), "XLA CPU pool"),
]


@pytest.mark.parametrize(("findings", "cause"), CONSEQUENCES, ids=[c for _, c in CONSEQUENCES])
def test_failed_exchange_points_at_its_cause(findings, cause):
    (exchange,) = [check for check in judge(findings) if check.name.startswith("all-reduce")]
    assert (exchange.cause, exchange.remedy) == (cause, "")
    assert [check.name for check in judge(findings) if check.remedy] == [cause]


def test_exchange_that_works_needs_no_cause():
    """Even if something else is wrong, a working exchange isn't described as its consequence."""
    checks = judge(replace(HEALTHY, pool=1))
    assert [check.cause for check in checks] == [""] * len(checks)


def test_library_alongside_mpirun_is_found(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").touch()
    assert libraries_of(str(tmp_path / "bin" / "mpirun")) is None
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libmpi.so.12").touch()
    assert libraries_of(str(tmp_path / "bin" / "mpirun")) == str(tmp_path / "lib64")
