"""The demo as a user calls it, at its smallest size."""

import json
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from jaxcross.report import Report

pytestmark = pytest.mark.integration


TOY = ["--model", "resnet8", "--image-size", "32", "--batch-size", "2", "--steps", "6"]


def demo(*options):
    return [sys.executable, "-m", "jaxcross.cli", "demo", *TOY, *options]


def end(process, patience_s=30):
    """Terminates what a failed test has left of the demo's process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(patience_s)


def test_it_leaves_numbers_trace_picture_and_table(tmp_path, quick_compiler):
    """One test, because otherwise each of pytest's workers might have to run the demo."""
    line = demo(
        "--link",
        "none",
        "--output",
        str(tmp_path / "out"),
        "--json",
        str(tmp_path / "new" / "result.json"),
    )
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **quick_compiler},
    )
    try:
        stdout, stderr = process.communicate(timeout=900)
    finally:
        end(process)
    assert process.returncode == 0, stdout + stderr
    check_numbers(tmp_path)
    check_turns(tmp_path)
    check_trace_and_picture(tmp_path)
    check_table(stdout)


def check_numbers(folder):
    result = json.loads((folder / "new" / "result.json").read_text())
    assert set(result) == {
        "link",
        "sequential_s_per_step",
        "crossover_s_per_step",
        "speedup",
        "ratio",
        "reason",
        "bound_s_per_step",
        "efficiency",
        "efficiency_alone",
        "compute_s_per_step",
        "exchange_s_per_step",
        "hidden_share",
        "jobs",
        "trace",
        "gantt",
    }
    assert result["link"] == "none"
    assert [set(job) for job in result["jobs"]] == [
        {"name", "images_per_second", "steps", "final_loss"}
    ] * 2
    # Each job makes only three steps. If the machine is busy, it can happen that the two jobs don't
    # share a whole round in one of the two turns, and the demo then leaves out that turn.
    turns = [
        Report.load(folder / "out" / f"{run}.json").rounds for run in ("crossover", "crossover-2")
    ]
    most = max(len(rounds.crossed) for rounds in turns)
    turns = [rounds for rounds in turns if len(rounds.crossed) == most]
    assert [job["steps"] for job in result["jobs"]] == [3 * len(turns)] * 2
    if most < 2:
        assert "never in steady state together" in result["reason"]
        return
    assert result["ratio"] == result["sequential_s_per_step"] / result["crossover_s_per_step"]
    assert result["speedup"] == (None if result["reason"] else result["ratio"])
    assert 0 <= result["hidden_share"] <= 1
    assert 0 < result["efficiency"] <= 1


def check_turns(folder):
    """Sequential, crossover, then both again.

    On every rank, each run starts after the previous one has ended.
    """
    runs = ("sequential", "crossover", "sequential-2", "crossover-2")
    reports = [Report.load(folder / "out" / f"{run}.json") for run in runs]
    for before, after in pairwise(reports):
        assert all(before.wall_ns[rank][1] <= after.wall_ns[rank][0] for rank in (0, 1))
    assert [[job.steps for job in report.jobs] for report in reports] == [[3, 3]] * 4


def check_trace_and_picture(folder):
    events = json.loads((folder / "out" / "crossover-2.trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert (folder / "out" / "gantt.png").read_bytes().startswith(b"\x89PNG")


def check_table(stdout):
    (line,) = [text for text in stdout.splitlines() if "mpirun -n 2" in text]
    assert "--policy compare" in line
    assert "all final states are equal, bit for bit" in stdout
    assert stdout.index("both runs") < stdout.rindex("speed-up") < stdout.index("Chrome trace")
    assert stdout.count("s per job-step (sequential)") + stdout.count("No speed-up stated") == 2


def test_ctrl_c_leaves_nothing_behind(tmp_path, quick_compiler):
    process = subprocess.Popen(
        demo("--link", "none", "--output", str(tmp_path / "out")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **quick_compiler},
    )
    assert process.stdout is not None
    # A demo that never starts to train must not hang the test.
    guard = threading.Timer(600, end, [process])
    guard.start()
    try:
        for text in process.stdout:
            if text.startswith("resnet8"):
                os.killpg(process.pid, signal.SIGINT)
                break
        # The pipe only ends when the last rank has ended.
        rest = process.stdout.read()
        assert process.wait(60) == 130
        assert "jaxcross demo: interrupted" in rest
        assert not (tmp_path / "out").exists()
    finally:
        guard.cancel()
        process.stdout.close()
        end(process)


def test_a_bad_link_is_refused(tmp_path):
    done = subprocess.run(
        demo("--link", "fast", "--output", str(tmp_path / "out")),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "jaxcross demo: --link: `fast` is not a link rate" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--output", "--json"])
def test_unwritable_output_is_reported_before_training(tmp_path, option):
    file = tmp_path / "file"
    file.touch()
    folders = {"--output": str(tmp_path / "out"), option: str(file / "result")}
    arguments = [word for pair in folders.items() for word in pair]
    done = subprocess.run(
        demo("--link", "none", *arguments), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1
    assert done.stderr.startswith("jaxcross demo: nothing can be written into")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
