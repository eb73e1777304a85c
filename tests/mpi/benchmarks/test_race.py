"""The race at toy size, with every byte on a real link.

A team that fails reports why, and leaves nothing behind.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcross.lab import Lab

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from rivals.teams import Stage, TeamError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ENDS = ("", ", memory as it comes")
pytestmark = pytest.mark.usefixtures("lab")


@pytest.mark.exhaustive
def test_race(smoke, tmp_path):
    result = smoke("race.py", "--png", str(tmp_path), "--patience", "600")
    assert result["question"].startswith("Who is fastest")
    left_out = {} if importlib.util.find_spec("torch") else {"two/ddp": "PyTorch is not installed"}
    assert result["left_out"] == left_out
    rows = {row["rival"]: row for row in result["rows"]}
    assert {
        "fused",
        "fused-k",
        "gloo",
        "gloo-k",
        "sequential",
        "crossover",
        "crossover-bf16",
    } <= set(rows)
    for row in rows.values():
        assert row["case"] == "two" and row["rate"] == "balanced"
        assert 0 < row["bound_s"] <= row["bound_with_tax_s"]
        assert row["cpu_s"] > 0 and row["peak_rss_bytes"] > 1e8
        assert 0 <= row["hidden_share"] <= 1
        assert len(row["raw"]) == 1
    # The link counts 79,832 float32 gradients from each of two ranks, and half as many bytes for
    # bfloat16.
    assert 2 * 4 * 79832 <= rows["crossover"]["wire_bytes"] < 1.5 * 2 * 4 * 79832
    assert 2 * 2 * 79832 <= rows["crossover-bf16"]["wire_bytes"] < 2 * 4 * 79832
    # Two processes at once hold more memory than the larger of two that run in turn.
    assert rows["fused-k"]["peak_rss_bytes"] > 1.5 * rows["fused"]["peak_rss_bytes"]
    assert (tmp_path / "race-two.png").stat().st_size > 10_000
    again = smoke("race.py", "--resume")
    assert again["rows"] == result["rows"]


@pytest.mark.exhaustive
def test_race_of_one_job(smoke):
    result = smoke(
        "race.py", "--cases", "one", "--rivals", "fused,uncut,wait-free", "--patience", "600"
    )
    rows = {row["rival"]: row for row in result["rows"]}
    assert set(rows) == {"fused", "uncut", "wait-free"}
    (link,) = result["links"]
    facts = link["wait_free"]
    assert facts["pieces"] >= 1 and facts["c_s"] == rows["wait-free"]["c_s"][0]
    assert facts["first_bucket_s"] > 0 and 0 < facts["last_bucket_s"] < facts["m_s"]
    assert facts["best_s"] == max(
        facts["first_bucket_s"] + facts["m_s"], facts["c_s"] + facts["last_bucket_s"]
    )
    (calibration,) = link["calibration"]
    assert len(calibration["first"]) == 2, "of each rank"


@pytest.mark.exhaustive
def test_race_of_unlike_jobs(smoke):
    names = ["crossover", "crossover-cut", "crossover-shares", "crossover-shares-bf16"]
    arguments = ("--cases", "mixed", "--rivals", ",".join(names), "--patience", "600")
    result = smoke("race.py", *arguments)
    assert [row["rival"] for row in result["rows"]] == names
    for row in result["rows"]:
        (raw,) = row["raw"]
        jobs = raw["account"]["jobs"]
        assert [job["steps"] for job in jobs] == [4, 4]
        large, small = (
            job["bytes_per_step"] for job in jobs
        )  # all gradients and the loss, however they are split
        width = 2 if row["rival"].endswith("bf16") else 4
        assert (large, small) == (width * 79832 + 4, width * 84160 + 4)


@pytest.mark.exhaustive
def test_memory(smoke):
    rows = smoke("memory.py")["rows"]
    by = {(row["jobs"], row["way"]): row for row in rows}
    assert by[2, "one process"]["peak_rss_bytes"] < by[2, "k processes"]["peak_rss_bytes"]
    assert set(by) == {
        (k, way) for k in (1, 2) for way in ("one process", *(f"k processes{end}" for end in ENDS))
    }
    # In one process, jobs of the same kind are compiled only once.
    assert by[2, "one process"]["compilations"] == by[1, "one process"]["compilations"]
    assert by[2, "k processes"]["compilations"] == 2 * by[1, "k processes"]["compilations"]


def test_a_team_that_cannot_start_is_quoted(tmp_path):
    with Lab() as lab, Stage(lab, tmp_path, patience_s=60) as stage:
        with pytest.raises(
            TeamError, match="team `nobody/0`: a process ended before its rank said hello"
        ) as caught:
            stage.start("nobody", "two", job=0, smoke=True)
        assert "can't open file" in str(caught.value)
        processes = stage.teams["nobody/0"].processes
    assert all(process.poll() is not None for process in processes)


@pytest.mark.mostly_integration("options2-lab: one host has no link to measure")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rate", "200mbit"), "Mbit/s over the real link 200mbit"),
        (("--rate", "2mbit"), "Mbit/s over the real link 2mbit"),
        (("--hosts", "1"), "lab: one host has no link to measure"),
    ],
)
def test_the_lab_command_says_how_fast_the_link_is(options, said):
    line = [sys.executable, str(BENCHMARKS / "lab.py"), *options, "--", "sh", "-c", "exit 3"]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    assert said in done.stderr
    assert "lab: 0.0 MB crossed the link" in done.stderr
