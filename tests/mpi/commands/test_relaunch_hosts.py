"""A run on two hosts, one of which goes down.

The run waits for the host or continues without it, depending on its state.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxcross.lab import Lab, available

CASE = Path(__file__).parents[1] / "cases" / "relaunch.py"
REASON = available()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
LIMIT_S = 400
STEPS = 40  # of the case

AGENT = """#!/bin/sh
# Called like ssh, and like ssh it fails where the host is not to be reached: [options] host
# command...
for word; do case "$word" in -*) ;; *) break ;; esac; done
case "$(ip -o link show dev "to-$word")" in *"state UP"*) exec {enter} "$@" ;; esac
exit 255
"""


class Run:
    """A launch in a lab, and its output so far."""

    def __init__(self, lab, folder, *options, strategy):
        folder.mkdir()
        agent = folder / "agent"
        agent.write_text(AGENT.format(enter=lab.environment()["HYDRA_LAUNCHER_EXEC"]))
        agent.chmod(0o755)
        (folder / "hold-12").touch()
        self.folder, self.log = folder, folder / "log"
        launch = [sys.executable, "-m", "jaxcross.cli", "launch", "-n", "2", "--hosts", "h0,h1"]
        options = ["--max-restarts", "3", "--events", str(folder / "events"), *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                lab.wrap([*launch, *options, str(CASE), str(folder), strategy]),
                env={
                    **lab.environment(),
                    "HYDRA_LAUNCHER_EXEC": str(agent),
                    "PRTE_MCA_plm_ssh_agent": str(agent),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def until(self, condition):
        """Polls, because nothing here is notified when another process writes."""
        deadline, pause = time.monotonic() + LIMIT_S, threading.Event()
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            pause.wait(0.1)

    def reports(self):
        lines = (
            self.log.read_text().replace("\0", "").splitlines()
        )  # Open MPI ends its boxes with a zero byte
        return [text for text in lines if text.startswith("jaxcross launch: ")]

    def launchers(self, lab):
        """The process of `jaxcross launch`, with its number inside the lab."""
        listed = subprocess.run(
            lab.wrap(["ps", "-ewwo", "pid=,args="]), check=True, capture_output=True, text=True
        )
        lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
        mine = f"{sys.executable} -m jaxcross.cli launch"
        return [
            int(pid) for pid, args in lines if args.startswith(mine) and str(self.folder) in args
        ]

    def lose_host(self, lab):
        """Cuts host 1's link when all ranks wait before step 12. Returns the launcher's report."""
        self.until((self.folder / "holds").exists)
        lab.set_link(1, up=False)
        self.until(self.reports)
        return self.reports()[0]

    def finish(self):
        (self.folder / "hold-12").unlink()
        assert self.process.wait(LIMIT_S) == 0, self.log.read_text()
        return [
            (self.folder / f"final-{n}").read_text()
            for n in range(2)
            if (self.folder / f"final-{n}").exists()
        ]


def test_host_that_comes_back_ends_in_the_same_bits(tmp_path):
    """A job whose checkpoint has residuals can't resume on fewer ranks, so the run waits for the
    host.

    It ends in the same state as a run that never lost a host, bit for bit.
    """
    alone = tmp_path / "alone"
    alone.mkdir()
    launch = [
        sys.executable,
        "-m",
        "jaxcross.cli",
        "launch",
        "-n",
        "2",
        str(CASE),
        str(alone),
        "top_k",
    ]
    subprocess.run(
        launch,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
        env={**os.environ, "PJRT_NPROC": "2"},
    )
    with Lab(hosts=2) as lab:
        run = Run(lab, tmp_path / "run", strategy="top_k")
        report = run.lose_host(lab)
        assert (
            "waits for host `h1`: each rank has its own values in the checkpoint of job 'a'"
            in report
        )
        lab.set_link(1, up=True)
        finals = run.finish()
    assert "restart 1 on h0, h1." in run.reports()[-1]
    assert finals == [(alone / f"final-{rank}").read_text() for rank in range(2)]


def test_remaining_hosts_continue_without_the_lost_one(tmp_path):
    with Lab(hosts=2) as lab:
        run = Run(lab, tmp_path / "run", strategy="mean")
        report = run.lose_host(lab)
        finals = run.finish()
    assert (
        "continues from the checkpoints of job 'a' after step 10, without host `h1`: the data is "
        "divided among fewer ranks" in report
    )
    assert "restart 1 on h0." in run.reports()[-1]
    (final,) = finals
    assert final.startswith("40 ")


def test_host_that_stays_away_ends_the_run(tmp_path):
    with Lab(hosts=2) as lab:
        run = Run(lab, tmp_path / "run", "--same-ranks", "--host-timeout", "1", strategy="mean")
        report = run.lose_host(lab)
        assert run.process.wait(LIMIT_S) != 0
    assert report.endswith("waits for host `h1`: `--same-ranks` was given.")
    assert run.reports()[-1] == "jaxcross launch: not restarted: h1 did not answer for 1 s."


def test_sigterm_reaches_ranks_on_other_hosts(tmp_path):
    """SIGTERM stops all jobs after the same step and saves them. Nothing is restarted."""
    with Lab(hosts=2) as lab:
        run = Run(lab, tmp_path / "run", strategy="top_k")
        run.until((run.folder / "holds").exists)
        (launcher,) = run.launchers(lab)
        subprocess.run(lab.wrap(["kill", "-TERM", str(launcher)]), check=True)
        (run.folder / "hold-12").unlink()
        code = run.process.wait(LIMIT_S)
    assert code == 143, run.log.read_text()
    assert run.reports() == ["jaxcross launch: not restarted: a signal stopped it."], (
        run.log.read_text()
    )
    newest = max(
        path.name for path in (run.folder / "checkpoints" / "a").glob("0*") if path.is_dir()
    )
    assert int(newest[:12]) in range(12, STEPS), "saved after the signal, before the end"
