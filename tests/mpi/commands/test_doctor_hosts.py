"""`doctor --hosts` between two hosts of a lab, and with a firewall between them."""

import os
import re
import subprocess
import sys

import pytest

from jaxcross.lab import Lab, available

REASON = available()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
DOCTOR = [sys.executable, "-m", "jaxcross.cli", "doctor", "--hosts"]
RATE_MBPS = 20


def doctor(lab, hosts):
    """Returns the exit code, the table as `what -> (mark, found)`, and the text below it."""
    environ = {**lab.environment(), "COLUMNS": "200"}
    done = subprocess.run(
        lab.wrap([*DOCTOR, hosts]),
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "└" in done.stdout, done.stdout + done.stderr
    table, below = done.stdout.split("└", 1)
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if line.startswith("│")
    ]
    return (
        done.returncode,
        {what: (mark, found) for mark, what, found in cells},
        below.split("┘\n", 1)[1],
    )


def test_hosts_that_can_train_together_pass():
    with Lab(hosts=2, rate=f"{RATE_MBPS}mbit") as lab:
        code, rows, below = doctor(lab, "h0,h1")
    assert code == 0 and {mark for mark, _ in rows.values()} == {"ok"}, (rows, below)
    assert rows["Python"][1] == f"{sys.executable} on `h0`, `h1`"
    assert rows["folder"][1] == f"{os.getcwd()} on `h0`, `h1`"
    for source, target, ends in (("h0", "h1", "1) to 10.77.0.2"), ("h1", "h0", "2) to 10.77.0.1")):
        found = re.fullmatch(
            rf"eth0 \(10.77.0.{re.escape(ends)}: round trip [\d.]+ [um]s, ([\d.]+) Mbit/s",
            rows[f"{source} to {target}"][1],
        )
        assert found is not None, rows
        # A busy machine may be slower than the link, but never faster, except for one burst of the
        # token bucket.
        assert 0 < float(found[1]) < RATE_MBPS + 8 * lab.burst_kb * 1024 / 1e6
    assert rows["MPI's interface"][1] == "eth0 (10.77.0.1) to eth0 (10.77.0.2)"
    assert below == "Start a run: jaxcross launch -n 2 --hosts h0,h1 train.py\n"


def test_hosts_that_cannot_connect_or_answer_are_named():
    with Lab(hosts=2) as lab:
        subprocess.run(
            lab.wrap_host(1, ["ip", "route", "add", "unreachable", "10.77.0.1/32"]), check=True
        )
        code, rows, below = doctor(lab, "h0,h1,h9")
    assert code == 1
    assert rows["ssh"][0] == "wrong" and rows["ssh"][1].startswith("`h9` did not answer")
    assert rows["h0 to h1"] == ("wrong", "no TCP transfer: h1: timed out; 10.77.0.2: timed out")
    assert rows["h1 to h0"][0] == "wrong" and "No route to host" in rows["h1 to h0"][1]
    assert rows["h1 to head"][0] == "ok"
    assert rows["all-reduce of 3 ranks"] == ("-", "cannot be checked before ssh")
    assert "h0 to h1: MPI connects to any TCP port" in below and "Start a run" not in below
