"""The link between two hosts loses packets, or goes down, in the middle of exchanges."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import faults

from jaxcross.commands.launch import find_mpirun, supervised
from jaxcross.lab import Lab, available
from jaxcross.report.event_files import read_event_files

ENDS = "jaxcross: rank 0 ends all ranks while in job 'a', step "
REASON = available()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

RANK = """
import sys
from pathlib import Path
import numpy as np
import jaxcross
world = jaxcross.initialize(heartbeat_timeout_s=float(sys.argv[1]))
from mpi4py import MPI
comm, over = MPI.COMM_WORLD.Dup(), False
sent, total = np.ones(250_000, np.float32), np.empty(250_000, np.float32)
step = 0
while not over:
    step += 1
    with world.monitor(job="a", step=step, segment=1, what="exchange"):
        comm.Allreduce(sent, total)
        over = comm.allreduce(Path(sys.argv[2]).exists(), MPI.MAX)
    assert (total == 2).all()
    if world.rank == 0:
        print("up", flush=True)
print("done", flush=True)
"""


def start(lab, heartbeat_timeout_s, tmp_path, wrapped=list, stderr=subprocess.PIPE):
    mpirun = find_mpirun()
    assert mpirun is not None
    rank = wrapped([sys.executable, "-c", RANK, str(heartbeat_timeout_s), str(tmp_path / "over")])
    process = subprocess.Popen(
        lab.wrap([mpirun.path, "-n", "2", *rank]),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**lab.environment(), "JAXCROSS_EVENTS": str(tmp_path / "events")},
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "up\n", process.stderr and process.stderr.read()
    return process


def test_both_sides_of_a_lost_link_name_the_other(tmp_path):
    log = tmp_path / "stderr"
    with Lab(hosts=2) as lab, log.open("w") as stderr:
        process = start(lab, 8.0, tmp_path, stderr=stderr)
        lab.set_link(1, up=False)
        # The ranks' final lines of output pass through `mpirun`, so they appear slightly later than
        # the event files. We can't wait for Open MPI's `mpirun` itself: it waits forever for the
        # processes behind the broken link, and only ends together with the lab.
        wait_until(
            lambda: (
                all(record.exit_kind for record in read_event_files(tmp_path / "events"))
                and ENDS in log.read_text()
            )
        )
    process.communicate(timeout=240)
    records = read_event_files(tmp_path / "events")
    assert [record.exit_kind for record in records] == ["reported"] * 2, log.read_text()
    for record, other in zip(records, (1, 0), strict=True):
        assert record.lost == (other,)
        assert record.text.startswith(f"rank {other} is silent for 8 s: its process "), record.text
        assert f"on host `h{other}`, that host, or the link to it does not answer." in record.text
        assert record.place.startswith("in job 'a', step ")
    assert ENDS in log.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("point", "place"),
    [
        ("exchange", "in job 'b', step 3, segment 1 (exchange)"),
        ("vote", "in vote, "),
        ("agreement", "in job 'b', step 3 (checkpoint: save)"),
    ],
)
def test_run_that_lost_its_link_resumes_when_restarted(tmp_path, point, place):
    """A run whose link goes down at a certain point resumes when it's restarted."""
    mpirun = find_mpirun()
    assert mpirun is not None
    line = [mpirun.path, "-n", "2", sys.executable]
    events = tmp_path / "events"
    environ = {"JAX_PLATFORMS": "cpu", "JAXCROSS_EVENTS": str(events)}
    with Lab(hosts=2) as lab:
        process = subprocess.Popen(
            lab.wrap([*line, *faults.program(tmp_path, "link", point)]),
            env={**lab.environment(), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        comes = wait_until(lambda: (tmp_path / "hurt").exists() or process.poll() is not None)
        lab.set_link(1, up=False)
        (tmp_path / "cut").touch()  # until now, the last rank waits at that point
        recorded = comes and wait_until(
            lambda: all(record.exit_kind for record in read_event_files(events))
        )
        process.kill()
    output = "\n".join(process.communicate(timeout=240))
    assert recorded, output
    for record, other in zip(read_event_files(events), (1, 0), strict=True):
        assert (record.exit_kind, record.lost) == ("reported", (other,)), output
    # The last rank may already have rank 0's part, and wait in the next exchange.
    assert read_event_files(events)[0].place.startswith(place), output
    with Lab(hosts=2) as lab:
        environ = {**lab.environment(), **environ}
        line = lab.wrap([*line, *faults.program(tmp_path, "none", point)])
        again = subprocess.run(
            line,
            check=False,
            capture_output=True,
            text=True,
            timeout=faults.DEADLINE_S,
            env=environ,
        )
    case = faults.Case(fault="link", point=point, ranks=2)
    assert list(faults.check_restart(case, again.returncode, again.stdout, {})) == [], again.stderr


def wait_until(condition, patience_s=faults.DEADLINE_S):
    """Polls, because nothing here is notified when another process writes."""
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.exhaustive
def test_a_rank_that_dies_on_another_host_is_named(tmp_path):
    """MPICH reports nothing to the other side, so its exchange waits, and a message to the dead
    rank never returns.
    """
    with Lab(hosts=2) as lab:
        process = start(lab, 8.0, tmp_path, supervised)
        (victim,) = (record for record in read_event_files(tmp_path / "events") if record.rank == 1)
        # The process number is the one inside the lab, so the signal is sent from there.
        subprocess.run(lab.wrap(["kill", "-KILL", str(victim.pid)]), check=True)
        _, stderr = process.communicate(timeout=240)
    assert process.returncode != 0
    first, second = read_event_files(tmp_path / "events")
    assert (first.exit_kind, first.lost, second.exit_kind) == ("reported", (1,), ""), stderr
    assert ENDS in stderr


@pytest.mark.exhaustive
def test_lost_packets_only_delay_an_exchange(tmp_path):
    with Lab(hosts=2) as lab:
        process = start(lab, 30.0, tmp_path)
        before = lab.dropped_packets()
        lab.set_rate("300kbit")
        lost = threading.Event()
        while lab.dropped_packets() < before + 10:
            lost.wait(0.1)
        lab.set_rate("500mbit")
        (tmp_path / "over").touch()
        stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert stdout.count("done\n") == 2


def test_who_has_ended_waits_for_the_others(tmp_path):
    """A rank that ended early would make the other rank's heartbeat hang, because MPICH over TCP
    retries forever.
    """
    rank = (
        "import time, jaxcross\nworld = "
        "jaxcross.initialize(heartbeat_timeout_s=5)\nworld.control.allgather_text('')\n"
        "if world.rank == 0: time.sleep(12)\nprint('rank', world.rank, 'ends')"
    )
    mpirun = find_mpirun()
    assert mpirun is not None
    with Lab(hosts=2) as lab:
        line = lab.wrap([mpirun.path, "-n", "2", sys.executable, "-c", rank])
        ended = subprocess.run(
            line, check=False, capture_output=True, text=True, timeout=240, env=lab.environment()
        )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]
