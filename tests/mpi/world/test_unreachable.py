"""If all packets between two hosts are lost, as with a firewall, the start says what to check."""

import subprocess
import sys

import pytest

from jaxcross.commands.launch import find_mpirun
from jaxcross.lab import Lab, available

REASON = available()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


def test_ranks_that_cannot_reach_each_other_end_in_time(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import jaxcross\njaxcross.initialize(stall_timeout_s=5)\nprint('joined')\n")
    with Lab(hosts=2) as lab:
        for host in range(2):  # no host has this address, so frames vanish without an error
            line = (
                f"ip neigh replace 10.77.0.{2 - host} lladdr 02:00:00:00:00:99 dev eth0 nud "
                "permanent"
            )
            subprocess.run(lab.wrap_host(host, line.split()), check=True)
        launch = [
            sys.executable,
            "-m",
            "jaxcross.cli",
            "launch",
            "-n",
            "2",
            "--hosts",
            "h0,h1",
            str(script),
        ]
        done = lab.run(launch, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0 and "joined" not in done.stdout
    where = "of 2 has waited 5 s in the start of MPI; all ranks end."
    if (
        find_mpirun().vendor == "openmpi"
    ):  # it connects two ranks only when they first send each other a message
        where = "has waited 5 s for all ranks to call `jaxcross.initialize()`; all 2 ranks end."
    assert where in done.stderr
    assert "that no firewall is between the hosts" in done.stderr
