"""Tests the hosts of a launch: their names, which of them answer, and how long we wait for them."""

import threading

import pytest

from jaxcross import cli
from jaxcross.commands import hosts as hosts_module
from jaxcross.commands.hosts import (
    agent_of,
    is_here,
    missing_hosts,
    parse_hosts,
    signal_ranks,
    start_text,
    unreachable_hosts,
    wait_for_hosts,
)
from jaxcross.commands.launch import Mpirun, mpirun_command


def test_hosts_are_named_once_each():
    assert parse_hosts("a,node-2.site") == ("a", "node-2.site")
    for text in ("", "a,", "a b", "-oProxyCommand=x", "a:4"):
        with pytest.raises(ValueError, match="`--hosts` must be names of hosts"):
            parse_hosts(text)
    with pytest.raises(ValueError, match="names `a` twice"):
        parse_hosts("a,b,a")


def test_agent_is_that_of_mpirun():
    assert agent_of({})[0] == "ssh"
    for name in ("HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP_EXEC", "PRTE_MCA_plm_ssh_agent"):
        assert agent_of({name: "/lab/enter"}) == ("/lab/enter",)
    assert agent_of({"PRTE_MCA_plm_ssh_agent": "ssh -p 2222 : rsh"}) == ("ssh", "-p", "2222")


def test_hosts_that_do_not_answer_are_found(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" != b ] && [ "$2" = true ]\n')
    agent.chmod(0o755)
    assert missing_hosts(("a", "b", "c"), [str(agent)]) == ["b"]
    assert missing_hosts(("a",), [str(tmp_path / "none")]) == ["a"]


def test_hosts_must_answer_the_agent_unless_another_program_starts_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts_module, "_has_address", lambda host: host == "a")
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = alias ]\n')
    agent.chmod(0o755)
    environ = {"HYDRA_LAUNCHER_EXEC": str(agent)}
    assert unreachable_hosts(("localhost", "a", "alias", "wrong"), environ) == ["a", "wrong"]
    for name in ("SLURM_JOB_ID", "PE_HOSTFILE", "HYDRA_LAUNCHER_EXTRA_ARGS"):
        assert unreachable_hosts(("a", "alias", "wrong"), {**environ, name: "7"}) == ["wrong"]


def test_a_wrong_host_name_is_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hosts_module, "_has_address", lambda host: False)
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", "/bin/false")
    (tmp_path / "train.py").touch()
    assert (
        cli.main(["launch", "-n", "2", "--hosts", "wrong,worse", str(tmp_path / "train.py")]) == 1
    )
    assert capsys.readouterr().err == (
        "`--hosts`: `wrong`, `worse` cannot be reached, so no rank is started. Check the name and "
        "the network: `/bin/false wrong true` must work here.\n"
    )


def test_a_start_that_failed_names_the_host_that_does_not_answer():
    assert (
        start_text(["a", "b"], ["b"], ["ssh"], "Check it.")
        == "no rank has joined: `b` did not answer `ssh b true`"
    )
    assert start_text(["a", "b"], [], ["ssh"], "Check it.") == (
        "no rank on a, b has joined. If the lines above are MPI's: check it"
    )


def test_this_machine_is_known_by_its_address():
    assert is_here("127.0.0.1") and is_here("localhost")
    assert not is_here("192.0.2.1")  # reserved by RFC 5737, so no machine has it


class Clock:
    """A clock that only advances when somebody waits."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def wait(self, seconds):
        self.now_s += seconds


def test_host_that_comes_back_ends_the_wait():
    clock, shown = Clock(), []
    back = wait_for_hosts(
        lambda: ["b"] if clock.now_s < 130 else [],
        limit_s=600,
        show=shown.append,
        pause=clock.wait,
        clock=clock,
    )
    assert back and clock.now_s == 130
    assert shown == [f"b did not answer for {s} s; waits for 600 s at most" for s in (60, 120)]


def test_host_that_stays_away_ends_the_wait_too():
    clock = Clock()
    assert not wait_for_hosts(lambda: ["b"], limit_s=50, show=print, pause=clock.wait, clock=clock)
    assert clock.now_s == 50


def test_signal_goes_to_all_ranks_of_each_host(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/$1.new && mv {tmp_path}/$1.new {tmp_path}/$1\n'
    )
    agent.chmod(0o755)
    signal_ranks(15, {"a": [7, 8], "b": [9]}, [str(agent)])
    pause = threading.Event()
    while not all((tmp_path / host).exists() for host in "ab"):
        pause.wait(0.01)
    assert [(tmp_path / host).read_text() for host in "ab"] == [
        "a kill -15 7 8\n",
        "b kill -15 9\n",
    ]


@pytest.mark.parametrize(
    ("vendor", "options"),
    [
        ("mpich", ["-hosts", "a,b", "-ppn", "2"]),
        ("openmpi", ["--host", "a:2,b:2"]),
    ],
)
def test_mpirun_shares_ranks_equally(vendor, options):
    line, _ = mpirun_command(
        mpirun=Mpirun(path="mpirun", vendor=vendor), ranks=4, program=["x"], root=False, cores=2,
        environ={"JAXCROSS_EVENTS": "e", "JAXCROSS_TIME": "t"}, hosts=("a", "b"),
    )  # fmt: skip
    assert line[1 : 1 + len(options)] == options
    passed = {line[n + 1] for n, word in enumerate(line) if word == "-x"}
    needed = {"JAXCROSS_EVENTS", "JAXCROSS_TIME", "PJRT_NPROC", "GLIBC_TUNABLES"}
    assert passed == (needed if vendor == "openmpi" else set())
