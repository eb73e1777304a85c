"""The command line: what it offers, how it ends, what it must not import."""

import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from jaxcross import __version__, cli
from jaxcross.commands import demo
from jaxcross.report import JobFacts, Report
from jaxcross.runtime.events import Span


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("doctor", "demo", "launch", "data"))


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxcross {__version__}\n"


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "jaxcross demo: interrupted\n"


def test_the_command_line_loads_neither_jax_nor_mpi():
    code = (
        "import sys; from jaxcross import cli; cli.parser(); print({'jax', 'mpi4py', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_counts_are_above_zero(text):
    with pytest.raises(ArgumentTypeError, match=f"`{text}` is not a number above 0"):
        demo._positive(text)


def test_zero_jobs_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--jobs", "0"])
    assert "argument --jobs: `0` is not a number above 0" in capsys.readouterr().err


def test_unknown_models_are_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--model", "resnet51"])
    error = capsys.readouterr().err
    assert "invalid choice: 'resnet51'" in error
    assert "resnet50" in error


def test_the_models_are_those_of_the_example():
    text = (demo.find_example().parent / "resnet.py").read_text()
    assert all(f'"{name}": partial(' in text for name in demo.MODELS)


def report(period, policy, loss=0.5):
    spans = [
        Span(
            rank=0, job="a", step=n, segment=0, kind="compute", lane=0, start_ns=n * period, end_ns=(n + 1) * period,
            ready_ns=n * period,
        )
        for n in range(3)
    ]  # fmt: skip
    jobs = [JobFacts(name="a", steps=3, examples_per_step=8, final_loss=loss)]
    return Report.build(spans, jobs=jobs, start_ns=0, end_ns=3 * period, policy=policy)


def test_the_numbers_of_json():
    slow, fast = report(4_000_000_000, "sequential"), report(2_000_000_000, "crossover", loss=float("nan"))
    result = demo.numbers(slow, fast, link="none", trace=Path("t"), gantt=Path("g"))
    assert result == {
        "link": "none",
        "sequential_s_per_step": 4.0,
        "crossover_s_per_step": 2.0,
        "speedup": 2.0,
        "bound_s_per_step": 2.0,
        "efficiency": 1.0,
        "hidden_share": 0.0,
        "jobs": [{"name": "a", "images_per_second": 4.0, "steps": 3, "final_loss": None}],
        "trace": "t",
        "gantt": "g",
    }


def test_a_failed_demo_removes_the_folder_that_it_made(tmp_path, monkeypatch, capsys):
    def fails(args):
        args.output.mkdir()
        raise demo.DemoError("no luck")

    monkeypatch.setattr(demo, "_demo", fails)
    assert cli.main(["demo", "--output", str(tmp_path / "new")]) == 1
    assert capsys.readouterr().err == "jaxcross demo: no luck\n"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_demo_keeps_a_folder_that_was_there(tmp_path, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    (tmp_path / "mine").touch()
    monkeypatch.setattr(demo, "_demo", interrupted)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 130
    assert (tmp_path / "mine").exists()


def test_both_runs_in_one_table():
    from jaxcross.report.table import comparison

    text = comparison(report(4_000_000_000, "sequential"), report(2_000_000_000, "crossover"))
    totals = [line.split() for line in text.splitlines() if "all 1" in line]
    assert [line[-2] for line in totals] == ["1.00x", "2.00x"]


def test_an_emulated_link_says_so_everywhere():
    from jaxcross.commands.launch import Mpirun

    args = cli.parser().parse_args(["demo", "--link", "100mbit"])
    mpirun = Mpirun(path="mpirun", vendor="mpich")
    launch = demo._launch(args, Path("example.py"), mpirun, Path("data"), None, slow=True)
    assert launch.link == "emulated link 100mbit"
    assert list(launch.line[-2:]) == ["--link", "emulate:100mbit"]
    assert launch.shown.endswith("--link emulate:100mbit")


def test_without_a_link_nothing_is_emulated():
    from jaxcross.commands.launch import Mpirun

    args = cli.parser().parse_args(["demo", "--link", "none", "--jobs", "3"])
    mpirun = Mpirun(path="mpirun", vendor="mpich")
    launch = demo._launch(args, Path("example.py"), mpirun, Path("data"), None, slow=False)
    assert launch.link == "none"
    assert "--link" not in launch.line
    assert launch.line.count("--job") == 3
