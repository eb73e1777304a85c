"""Tests what `doctor --hosts` concludes from its findings."""

import subprocess
from dataclasses import replace

import pytest

from jaxcross import cli
from jaxcross.commands.doctor import exit_code
from jaxcross.commands.doctor_hosts import HostFacts, Survey, _ask_host, judge, pairs, settings_for
from jaxcross.lab.transfer import Transfer

VERSIONS = {
    "jaxcross": "0.1",
    "jax": "0.12",
    "jaxlib": "0.12",
    "mpi4py": "4.1",
    "mpi4jax": "0.9",
    "MPI": "MPICH 5",
}
HOST = HostFacts(python=True, folder=True, versions=VERSIONS)
THERE = Transfer(
    bits_per_s=9.4e8, round_trip_us=120, source="10.0.0.1", target="10.0.0.2", interface="eth0"
)
BACK = Transfer(
    bits_per_s=2.54e6, round_trip_us=1300, source="10.0.0.2", target="10.0.0.1", interface="eth1"
)
CORRECT = {"ranks": 2, "over": "mpi4py", "correct": True, "connections": [["10.0.0.1", "10.0.0.2"]]}
HEALTHY = Survey(
    hosts=("a", "b"),
    agent=("ssh", "-p", "22"),
    python="/env/bin/python",
    folder="/home/me",
    missing=(),
    facts={"a": HOST, "b": HOST},
    links={("a", "b"): THERE, ("b", "a"): BACK, ("b", "here"): BACK},
    vendor="mpich",
    exchange=CORRECT,
)


def with_b(**changes):
    return replace(HEALTHY, facts={"a": HOST, "b": replace(HOST, **changes)}, exchange=None)


def with_versions(**changes):
    return with_b(versions={**VERSIONS, **changes})


def with_link(error):
    return replace(HEALTHY, links={**HEALTHY.links, ("a", "b"): error}, exchange=None)


def test_healthy_hosts():
    checks = judge(HEALTHY)
    assert {check.name: check.found for check in checks} == {
        "ssh": "`a`, `b` answer",
        "Python": "/env/bin/python on `a`, `b`",
        "folder": "/home/me on `a`, `b`",
        **VERSIONS,
        "a to b": "eth0 (10.0.0.1) to 10.0.0.2: round trip 120 us, 940 Mbit/s",
        "b to a": "eth1 (10.0.0.2) to 10.0.0.1: round trip 1.3 ms, 2.5 Mbit/s",
        "b to here": "eth1 (10.0.0.2) to 10.0.0.1: round trip 1.3 ms",
        "all-reduce of 2 ranks": "correct, over mpi4py",
        "MPI's interface": "eth0 (10.0.0.1) to eth1 (10.0.0.2)",
    }
    assert exit_code(checks) == 0 and not any(check.remedy or check.cause for check in checks)


ELSEWHERE = {**CORRECT, "connections": [["172.17.0.1", "10.0.0.2"]]}
WRONG = {
    "ssh": (
        replace(HEALTHY, missing=["b"], facts={"a": HOST}, links={}, exchange=None),
        "ssh",
        "`b` did not answer `ssh -p 22 b true`",
        "That command must work here, and without a password",
    ),
    "python": (
        with_b(python=False),
        "Python",
        "no `/env/bin/python` on `b`",
        "Install the same environment",
    ),
    "folder": (with_b(folder=False), "folder", "no `/home/me` on `b`", "Make it on `b`"),
    "silent": (
        with_b(versions={}, error="exit code 1: no module"),
        "versions",
        "`b`: exit code 1: no module",
        "`/env/bin/python` must run on `b`",
    ),
    "version": (
        with_versions(jax="0.11"),
        "jax",
        "0.12 on `a`; 0.11 on `b`",
        "Install the same version of jax",
    ),
    "one lacks": (
        with_versions(mpi4jax=None),
        "mpi4jax",
        "0.9 on `a`; none on `b`",
        "Install the same version of",
    ),
    "no MPI": (
        with_versions(MPI=None, error="OSError: libmpi.so"),
        "MPI",
        "MPICH 5 on `a`; none on `b`; OSError: libmpi.so (`b`)",
        "All ranks need one MPI",
    ),
    "firewall": (
        with_link("b: timed out"),
        "a to b",
        "no TCP transfer: b: timed out",
        "MPI connects to any TCP port",
    ),
    "rejects": (
        with_link("b: No route to host"),
        "a to b",
        "no TCP transfer: b: No",
        "MPI connects to any TCP port",
    ),
    "unknown": (
        with_link("b: Name or service not known"),
        "a to b",
        "no TCP transfer: b: Name",
        "`b` must mean the",
    ),
    "refused": (
        with_link("b: Connection refused"),
        "a to b",
        "no TCP transfer: b: Connection",
        "`b` must mean the",
    ),
    "MTU": (
        with_link("only 0 bytes came in 61 s."),
        "a to b",
        "no TCP transfer: only 0",
        "They connect, but",
    ),
    "no mpirun": (
        replace(HEALTHY, vendor=None, exchange=None),
        "mpirun",
        "none",
        "Run `jaxcross doctor` without",
    ),
    "exchange": (
        replace(HEALTHY, exchange={"error": "no answer within 90 s"}),
        "all-reduce of 2 ranks",
        "no answer",
        "Run `jaxcross launch -n 2 --hosts a,b -m jaxcross.world.probe exchange`",
    ),
    "one rank": (
        replace(HEALTHY, exchange={**CORRECT, "ranks": 1}),
        "all-reduce of 2 ranks",
        "wrong: ",
        "Run `jaxcross launch",
    ),
    "interface": (
        replace(HEALTHY, exchange=ELSEWHERE),
        "MPI's interface",
        "? (172.17.0.1) to eth1 (10.0.0.2)",
        "The names of the hosts mean other addresses",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_wrong_thing_has_a_remedy(case):
    survey, name, found, remedy = WRONG[case]
    checks = {check.name: check for check in judge(survey)}
    assert [each for each in checks if checks[each].remedy] == [name]
    assert checks[name].found.startswith(found) and checks[name].remedy.startswith(remedy)
    assert exit_code(list(checks.values())) == int(case != "interface")
    if survey.exchange is None:
        assert checks["all-reduce of 2 ranks"].cause == name


def test_what_cannot_be_asked_names_its_cause():
    nobody = replace(HEALTHY, missing=["a", "b"], facts={}, links={}, exchange=None)
    assert {check.name: check.cause for check in judge(nobody)} == {
        name: "" if name == "ssh" else "ssh"
        for name in ("ssh", "Python", "folder", "versions", "all-reduce of 2 ranks")
    }
    without = replace(HOST, python=False)
    bare = replace(HEALTHY, facts={"a": without, "b": without}, links={}, exchange=None)
    assert {check.name: check.cause for check in judge(bare)}["versions"] == "Python"


def test_mpi4jax_is_compared_only_where_it_is():
    facts = replace(HOST, versions={**VERSIONS, "mpi4jax": None})
    checks = judge(replace(HEALTHY, facts={"a": facts, "b": facts}))
    assert exit_code(checks) == 0 and "mpi4jax" not in [check.name for check in checks]


def test_open_mpi_of_one_version_may_be_built_on_other_machines():
    facts = {
        name: replace(HOST, versions={**VERSIONS, "MPI": f"Open MPI v5, package: {name}"})
        for name in "ab"
    }
    assert exit_code(judge(replace(HEALTHY, facts=facts))) == 0


def test_hosts_send_to_their_neighbours_and_to_the_launcher():
    ring = [("a", "b"), ("b", "a")]
    assert pairs("ab", "here", []) == [*ring, ("a", "here"), ("b", "here")]
    assert pairs("ab", "a", ["a"]) == ring
    assert pairs("abc", "b", ["b"]) == [*ring, ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")]
    assert pairs("abcd", "b", ["b"])[-1] == ("d", "b")
    assert pairs("a", "here", []) == [("a", "here")]


@pytest.mark.parametrize(
    ("vendor", "interfaces", "settings"),
    [
        ("openmpi", ["eth0"], "`export OMPI_MCA_btl_tcp_if_include=eth0`"),
        ("openmpi", ["eth0", "eth1"], "`export OMPI_MCA_btl_tcp_if_include=NETWORK/BITS`"),
        ("mpich", ["eth0"], "`export UCX_NET_DEVICES=eth0 FI_TCP_IFACE=eth0`"),
        ("mpich", ["eth0", "eth1"], "`export UCX_NET_DEVICES=eth0,eth1`"),
        ("mpich", [], ""),
    ],
)
def test_interface_is_named_as_each_mpi_reads_it(vendor, interfaces, settings):
    assert settings_for(vendor, interfaces) == settings


def test_host_that_runs_nothing_is_quoted():
    facts = _ask_host(lambda command: ["sh", "-c", "echo welcome; echo no shell >&2; exit 3"])
    assert facts == HostFacts(
        python=False, folder=False, versions={}, error="exit code 3: no shell"
    )


def test_host_that_takes_too_long_is_known_as_far_as_it_came(monkeypatch):
    def run(line, *, timeout, **options):
        raise subprocess.TimeoutExpired(line, timeout, output=b"folder\n")

    monkeypatch.setattr(subprocess, "run", run)
    error = "no answer within 60 s: no output"
    assert _ask_host(list) == HostFacts(python=False, folder=True, versions={}, error=error)


def test_wrong_host_names_are_a_usage_error(capsys):
    assert cli.main(["doctor", "--hosts", "a,a"]) == 2
    assert capsys.readouterr().err == "`--hosts` names `a` twice. Name each host once.\n"
