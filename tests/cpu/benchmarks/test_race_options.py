"""Options of the race and other benchmarks: bad arguments, output files, no lab, resuming."""

import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import exchange_cost
import hosts
import memory
import race
import race_file
import workloads
from rivals import cases
from rivals.teams import Stage, lab_or_exit

from jaxcross.commands import launch


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--cases", "five"], "there is no `five`"),
        (["--rivals", "mine"], "there is no `mine`"),
        (["--steps", "3"], "`--steps 3`: fewer than 4"),
        (["--apart", "gloo,crossed"], "there is no `crossed`"),
        (
            ["--rates", "balnced"],
            "`--rates` takes network, balanced, compute, or a rate of the link: `balnced` is no",
        ),
        (["--json", "nowhere/x.json"], "argument --json: `nowhere/x.json` cannot be written"),
        (["--json", "."], "argument --json: `.` cannot be written"),
        (["--png", "/dev/null/x"], "argument --png: `/dev/null/x` takes no files"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, line, message):
    monkeypatch.setattr(sys, "argv", ["race.py", *line])
    with pytest.raises(SystemExit):
        race.options()
    assert message in capsys.readouterr().err


def test_a_rate_of_ones_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["race.py", "--rates", "compute,500mbit"])
    assert race.options().rates == ["compute", "500mbit"]


@pytest.mark.parametrize(
    ("parse", "line", "message"),
    [
        (
            lambda: workloads.parser("").parse_args(),
            ["--json", "nowhere/x.json"],
            "argument --json: `nowhere/x.json`",
        ),
        (
            memory.main,
            ["--jobs", "1,5"],
            "argument --jobs: there is no case of `5` jobs; there are 1, 2, 3, 4.",
        ),
        (
            lambda: exchange_cost.options().parse_args(),
            ["--limits", "none,64K"],
            "argument --limits: `64K` is neither",
        ),
    ],
)
def test_wrong_arguments_of_others(monkeypatch, capsys, parse, line, message):
    monkeypatch.setattr(sys, "argv", ["it.py", *line])
    monkeypatch.setattr(memory, "measure", lambda *_, **__: pytest.fail("measured before"))
    with pytest.raises(SystemExit):
        parse()
    assert message in capsys.readouterr().err


def test_limits_in_bytes():
    parse = exchange_cost.options().parse_args
    assert parse(["--limits", "none,64k,4m"]).limits == {"none": 0, "64k": 65536, "4m": 4 << 20}
    assert parse([]).limits == parse(["--limits="]).limits == {}


def test_a_rank_does_not_look_where_results_go(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    assert race_file.out_file("nowhere/x.json") == Path("nowhere/x.json")


@pytest.mark.parametrize(
    "write", [race_file.write, lambda path, result: workloads.write_json(path, "why?", result)]
)
def test_only_the_named_file_is_written(tmp_path, write):
    link, kept, other = tmp_path / "link", tmp_path / "race.two", tmp_path / "race.new"
    kept.write_text("old")
    other.write_text("of somebody else")
    link.symlink_to("race.two")
    write(race_file.out_file(str(link)), {"rows": [1]})
    assert link.is_symlink() and json.loads(kept.read_text())["rows"] == [1]
    assert other.read_text() == "of somebody else" and set(tmp_path.iterdir()) == {
        link,
        kept,
        other,
    }
    there, here = os.pipe()
    write(race_file.out_file(f"/dev/fd/{here}"), {"rows": [2]})
    os.close(here)
    with os.fdopen(there) as stream:
        assert json.load(stream)["rows"] == [2]


@pytest.mark.parametrize(
    "start",
    [
        race.main,
        lambda: hosts.on_hosts("x.py", "500Mbit"),
        lambda: memory.measure(1, "one process", rate="500Mbit", smoke=True, image_size=None),
    ],
)
def test_no_lab_ends_with_its_reason(monkeypatch, start):
    monkeypatch.setattr(sys, "argv", ["race.py", "--smoke"])
    monkeypatch.setattr(launch, "find_mpirun", lambda: "mpirun")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no lab on this machine: .*`ip`|`500Mbit` is not a rate"):
        start()


def test_an_error_inside_a_lab_stays_one(monkeypatch):
    monkeypatch.setattr("rivals.teams.Lab", lambda **_: contextlib.nullcontext())
    with pytest.raises(OSError, match="of the work"), lab_or_exit():
        raise OSError("of the work")


def test_a_stage_stands_whatever_the_folder_is_called(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    stage = Stage(SimpleNamespace(), folder)  # type: ignore[arg-type]
    with stage, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(str(stage._path))
    assert not stage._path.parent.exists() and not list(folder.iterdir())


def test_a_race_resumes(monkeypatch, tmp_path):
    out = tmp_path / "race.json"
    monkeypatch.setattr(sys, "argv", ["race.py", "--resume", "--json", str(out)])
    new = race.earlier(race.options())
    (run,) = new["runs"]
    assert new["rows"] == [] and "jax" in run["versions"]
    new["rows"] += [
        {"run": 0, "case": "one", "rate": "balanced", "rival": r.name}
        for r in cases.rivals_of("one")[1:]
    ]
    race.write(out, new)
    assert not list(tmp_path.glob("*.new"))
    assert race.earlier(race.options()) == {**new, "runs": [run, run]}
    lacking = race.lacking("one", race.options(), new)
    assert [([r.name for r in rivals], rates) for rivals, rates in lacking.items()] == [
        ([r.name for r in cases.rivals_of("one")], ["network", "compute"]),
        (["fused", "wait-free"], ["balanced"]),  # together with the rival it is compared with
    ]  # fmt: skip
    race.write(
        out, {**new, "runs": [{**run, "steps": 4, "versions": {**run["versions"], "jax": "0"}}]}
    )
    with pytest.raises(SystemExit, match="cannot be resumed: other jax, steps"):
        race.earlier(race.options())
    monkeypatch.setattr(
        sys, "argv", ["race.py", "--cases", "three", "--resume", "--json", str(out)]
    )
    assert (
        len(race.earlier(race.options())["runs"]) == 2
    )  # another case isn't compared with those rows
