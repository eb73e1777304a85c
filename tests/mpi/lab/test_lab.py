"""Several hosts on one machine: MPI really crosses the link, and a lab leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from jaxcross.commands.launch import find_mpirun
from jaxcross.lab import Lab, available

REASON = available()
needs_lab = pytest.mark.skipif(REASON is not None, reason=REASON or "")

RANK = """
import os, json, socket
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
total = np.empty(1_000_000, np.float32)
world.Allreduce(np.full(1_000_000, world.rank + 1, np.float32), total)
facts = world.gather([socket.gethostname(), sorted(os.sched_getaffinity(0)), float(total[0])])
if world.rank == 0:
    print(json.dumps(facts))
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": 0}, "`hosts` of a lab must be from 1 to 200, got `0`"),
        ({"rate": "fast"}, "`fast` is not a rate"),
        ({"rate": "0.0mbit"}, "a link needs a rate above 0, not `0.0mbit`"),
        ({"latency": "5"}, "`5` is not a latency"),
    ],
)
def test_wishes_that_cannot_be_meant(options, message):
    with pytest.raises(ValueError, match=message):
        Lab(**options)


def test_a_closed_lab_runs_nothing():
    with pytest.raises(ValueError, match="the lab is closed"):
        Lab().wrap(["true"])


def test_a_tool_that_is_not_on_the_path_is_found(monkeypatch, tmp_path):
    """Users other than root often lack `sbin` in their path, so the remedy isn't a package."""
    (tmp_path / "ip").touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("jaxcross.lab.network.SBIN", str(tmp_path))
    with (
        pytest.raises(OSError, match=f"`ip` is in `{tmp_path}`, which is not on the path. Add it"),
        Lab(),
    ):
        pass


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("jaxcross.lab.network.SBIN", "")
    with pytest.raises(OSError, match="no lab on this machine: the command `ip` is missing"), Lab():
        pass


@needs_lab
def test_a_kernel_that_refuses_a_step_is_quoted():
    # This passes for a rate, but tc can't represent it.
    with (
        pytest.raises(OSError, match="no lab on this machine: `tc qdisc add dev to-h0"),
        Lab(rate="0.1bit"),
    ):
        pass


@needs_lab
def test_ranks_meet_over_the_link():
    mpirun = find_mpirun()
    assert mpirun is not None
    with Lab(hosts=2, rate="500mbit") as lab:
        assert lab.environment()["JAXCROSS_LINK"] == lab.description
        before = lab.bytes_crossed()
        done = lab.run(
            [mpirun.path, "-n", "2", sys.executable, "-c", RANK],
            capture_output=True,
            text=True,
            timeout=240,
        )
        crossed = lab.bytes_crossed() - before
    assert done.returncode == 0, done.stderr
    (host0, cores0, total0), (host1, cores1, total1) = json.loads(done.stdout.splitlines()[-1])
    assert (host0, host1) == ("h0", "h1")
    assert total0 == total1 == 3.0
    if len(os.sched_getaffinity(0)) > 1:
        assert cores0 and cores1 and not set(cores0) & set(cores1)
    # Each rank must at least send half of its 4 MB, and receive the other half of the sum.
    assert 8_000_000 <= crossed <= 20_000_000


@needs_lab
def test_a_host_is_entered_and_pinned():
    with Lab(hosts=2) as lab:
        line = lab.wrap_host(
            1,
            [
                sys.executable,
                "-c",
                "import socket, sys; print(socket.gethostname(), sys.argv)",
                "a b",
            ],
        )
        said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=240).stdout
        with pytest.raises(ValueError, match="there is no host `2`"):
            lab.wrap_host(2, ["true"])
    assert said.strip() == "h1 ['-c', 'a b']"


def most(bits_per_s, lab, seconds):
    """Returns the highest average rate that a token bucket allows over `seconds`.

    This limit holds even if the machine is slow: while the sender waits for a core, the bucket
    refills, but it can only hold the tokens for a single burst.
    """
    return bits_per_s + 8 * lab.burst_kb * 1024 / seconds


@needs_lab
def test_live_lab_rate_changes_in_both_directions():
    with Lab(hosts=2, rate="800mbit") as lab:
        lab.set_rate("40mbit")
        rates = lab.measure_rate(0.5)
        with pytest.raises(OSError, match="the rate `0.1bit` was refused for host `h0`"):
            lab.set_rate("0.1bit")
        assert lab.rate == "40mbit" and "40mbit" in lab.description
    assert all(0 < rate <= most(40e6, lab, 0.5) for rate in rates), rates


@pytest.mark.mostly_integration("4mbit-4000000.0")
@needs_lab
@pytest.mark.parametrize(("rate", "bits_per_s"), [("500kbit", 5e5), ("4mbit", 4e6)])
def test_slow_link_is_measured_and_idle_afterwards(rate, bits_per_s):
    with Lab(hosts=2, rate=rate, burst_kb=64) as lab:
        rates = lab.measure_rate(2.0)
        before = lab.bytes_crossed()
        subprocess.run(lab.wrap_host(1, ["sleep", "0.2"]), check=True)
        later = lab.bytes_crossed() - before
    assert all(0 < rate <= most(bits_per_s, lab, 2.0) for rate in rates), rates
    assert later < 5000, "of what was sent to measure"


@needs_lab
def test_an_unshaped_link_stays_so():
    with (
        Lab(hosts=2, rate=None) as lab,
        pytest.raises(ValueError, match="the links of this lab are unshaped"),
    ):
        lab.set_rate("1gbit")


def test_one_host_has_nobody_to_measure_with():
    with pytest.raises(OSError, match="a rate is measured between two hosts"):
        Lab(hosts=1).measure_rate()


@needs_lab
def test_hosts_see_each_other_and_labs_are_isolated():
    """Hosts of a lab reach each other by name, but another lab's hosts can't."""
    with Lab(hosts=3, rate=None) as lab, Lab(hosts=2) as other:
        names = lab.run(["getent", "hosts", "h2"], capture_output=True, text=True).stdout
        strangers = other.run(["getent", "hosts", "h2"], capture_output=True, text=True)
        where = lab.run(["pwd"], capture_output=True, text=True).stdout.strip()
    assert names.split() == ["10.77.0.3", "h2"]
    assert strangers.returncode != 0
    assert where == str(Path.cwd())


@pytest.mark.integration
@needs_lab
def test_two_labs_run_side_by_side_and_count_own_bytes():
    mpirun = find_mpirun()
    assert mpirun is not None
    command = [mpirun.path, "-n", "2", sys.executable, "-c"]
    with Lab(hosts=2, rate="200mbit") as one, Lab(hosts=2, rate="200mbit") as other:
        before = one.bytes_crossed(), other.bytes_crossed()
        running = [
            subprocess.Popen(
                lab.wrap([*command, RANK * times]),
                stdout=subprocess.PIPE,
                text=True,
                env=lab.environment(),
            )
            for lab, times in ((one, 1), (other, 4))
        ]
        outputs = [process.communicate(timeout=240)[0] for process in running]
        crossed = one.bytes_crossed() - before[0], other.bytes_crossed() - before[1]
    assert [process.returncode for process in running] == [0, 0]
    assert [len(text.splitlines()) for text in outputs] == [1, 4]
    # 4 MB in each direction per all-reduce. Neither lab counts the other's bytes.
    assert 8_000_000 <= crossed[0] <= 12_000_000 and 32_000_000 <= crossed[1] <= 48_000_000, crossed


@needs_lab
def test_commands_die_with_the_lab():
    with Lab(hosts=2) as lab:
        process = subprocess.Popen(
            lab.wrap(["sh", "-c", "echo up; exec sleep 1000"]), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    assert process.wait(timeout=60) != 0
    assert process.stdout.read() == ""
    process.stdout.close()


@needs_lab
def test_killing_the_driver_kills_everything_inside():
    line = [sys.executable, "-m", "jaxcross.lab", "--", "sh", "-c", "echo up; exec sleep 1000"]
    driver = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    # The pipe ends only when the command in the lab, its last holder, is dead.
    assert driver.stdout.read() == ""
    driver.stdout.close()


@pytest.fixture
def driven():
    """Starts a driver in its own process group, whose command prints `up`. Kills it at the end."""
    drivers: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "jaxcross.lab", "--hosts", "1", "--", "sh", "-c", script]
        before = signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        )  # under nohup, children would inherit that SIGHUP is ignored
        drivers.append(
            subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        signal.signal(signal.SIGHUP, before)
        assert drivers[0].stdout is not None
        assert drivers[0].stdout.readline() == "up\n"
        return drivers[0]

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


@pytest.mark.mostly_integration("to the driver-INT", "to its group-HUP")
@needs_lab
@pytest.mark.parametrize("name", ["TERM", "HUP", "INT"])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the driver", "to its group"])
def test_command_receives_each_signal_of_the_driver_once(driven, name, send):
    trap = f"trap 'echo signalled; n=$((n + 1))' {name}"
    driver = driven(
        f"{trap}; echo up; until [ $n ]; do sleep 0.1; done; sleep 0.3; echo saved; exit $n"
    )
    send(driver.pid, signal.Signals[f"SIG{name}"])
    said, _ = driver.communicate(timeout=240)
    assert said == "signalled\nsaved\n"
    assert driver.returncode == 1


@needs_lab
def test_benchmark_process_in_a_lab_has_time_to_end(tmp_path, monkeypatch):
    """A process that a benchmark runs in a lab can save before it ends."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    ended, said = import_module("ended"), tmp_path / "said"
    script = (
        f"trap 'sleep 0.5; echo saved > {said}; exit' TERM; echo up; while :; do sleep 0.1; done"
    )
    with (
        Lab(hosts=1) as lab,
        ended.started(lab.wrap(["sh", "-c", script]), stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout.readline() == "up\n"
    assert said.read_text() == "saved\n"


@needs_lab
def test_terminal_interrupt_reaches_the_whole_command(driven):
    inner = 'trap "exit 4" INT; echo up; while :; do sleep 0.1; done'
    driver = driven(f"trap 'echo signalled' INT; sh -c '{inner}'; exit $?")
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.communicate(timeout=240)[0] == "signalled\n"
    assert driver.returncode == 4


@needs_lab
def test_second_sigterm_ends_a_disobedient_command(driven):
    driver = driven("trap 'echo signalled' TERM; echo up; while :; do sleep 0.1; done")
    driver.terminate()
    assert driver.stdout.readline() == "signalled\n"
    driver.terminate()
    assert driver.communicate(timeout=240)[0] == ""
    assert driver.returncode == 128 + signal.SIGTERM


@needs_lab
def test_driver_returns_status_and_reports_traffic():
    """The driver returns the command's status and reports how many bytes crossed the link."""
    line = [sys.executable, "-m", "jaxcross.lab", "--rate", "1gbit", "--", "sh", "-c", "exit 3"]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 3
    assert "MB crossed the real link 1gbit (2 hosts in network namespaces)" in done.stderr
