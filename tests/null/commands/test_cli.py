"""Tests the command line: its commands, its exit codes, and what it must not import."""

import argparse
import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from jaxcross import __version__, cli
from jaxcross.commands import demo, estimate
from jaxcross.commands.estimate import request_of, unconverted_note
from jaxcross.commands.plan import read_contention
from jaxcross.interleave.instrument import Span
from jaxcross.report import Comparison, JobSummary, Report


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jaxcross {__version__}\n"


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err


def test_a_misspelt_option_shows_the_commands_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["launch", "--evnts", "x", "train.py"])
    shown = capsys.readouterr().err
    assert shown.startswith("usage: jaxcross launch ")
    assert shown.endswith("jaxcross launch: error: unrecognized arguments: --evnts\n")


def test_an_estimate_of_an_unconverted_script_says_so_at_its_start(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import jax\n")
    note = unconverted_note(None, ["--", str(script), "--lr", "0.1"])
    assert note.startswith(f"jaxcross estimate: `{script}` names no `crossover`.")
    script.write_text("from jaxcross import crossover\n")
    assert unconverted_note(None, [str(script)]) == ""
    assert (
        unconverted_note(["train"], []) == unconverted_note(None, [str(tmp_path / "none.py")]) == ""
    )


def test_an_estimate_passes_the_measured_contention_to_its_ranks(tmp_path):
    file = tmp_path / "c.json"
    points = [{"mbps": 100.0, "compute": 1.1, "exchange": 1.05}]
    file.write_text(json.dumps(points))
    parser = argparse.ArgumentParser()
    estimate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["estimate", "--contention", str(file), "train.py"])
    text = request_of(args, tmp_path / "out.json", read_contention(args.contention))
    assert json.loads(text)["contention"] == points


def test_a_contention_that_cannot_be_read_starts_nothing(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("crossover")
    missing = tmp_path / "none.json"
    assert cli.main(["estimate", "--contention", str(missing), str(script)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"jaxcross estimate: the contention `{missing}` cannot be read: ")
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert cli.main(["estimate", "--contention", str(wrong), str(script)]) == 2
    assert "is not the contention of a machine" in capsys.readouterr().err


def test_an_estimate_offers_no_restarts(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["estimate", "--help"])
    shown = capsys.readouterr().out
    assert "--hosts" in shown and not any(
        word in shown for word in ("--max-restarts", "--same-ranks", "--host-timeout")
    )


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "jaxcross demo: interrupted\n"


def test_the_command_line_loads_neither_jax_nor_mpi():
    code = (
        "import sys; from jaxcross import cli; cli.parser(); print({'jax', 'mpi4py', 'matplotlib'} "
        "& set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_counts_are_above_zero(text):
    with pytest.raises(ArgumentTypeError, match=f"`{text}` is not a whole number above 0"):
        demo._positive(text)


def test_zero_jobs_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--jobs", "0"])
    assert "argument --jobs: `0` is not a whole number above 0" in capsys.readouterr().err


def test_unknown_model_error_lists_known_models(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--model", "resnet51"])
    error = capsys.readouterr().err
    assert "invalid choice: 'resnet51'" in error
    assert "resnet50" in error


def test_the_models_are_those_of_the_example():
    text = (demo.find_example().parent / "resnet.py").read_text()
    assert all(f'"{name}": partial(' in text for name in demo.MODELS)


S = 1_000_000_000


def report(policy, loss=0.5, compute=1.0, exchange=1.0, gap=0.0, steps=6):
    """Returns the report of two equal jobs, run in turn or with each computing during the other's
    exchange.
    """
    crossed = max(2 * compute, 2 * exchange, compute + exchange)
    spans, length = [], compute + exchange + gap if policy == "sequential" else crossed
    for j, job in enumerate("ab"):
        for n in range(steps):
            start = n * length + j * (steps * length if policy == "sequential" else length / 2)
            ends = ((0, start, start + compute), (1, start + compute, start + compute + exchange))
            spans += [
                Span(
                    rank=0,
                    job=job,
                    step=n + 1,
                    segment=segment,
                    kind="collective" if segment else "compute",
                    lane=0,
                    start_ns=round(begin * S),
                    end_ns=round(end * S),
                    ready_ns=round(begin * S),
                )
                for segment, begin, end in ends
            ]
    jobs = [
        JobSummary(name=job, steps=steps, examples_per_step=8, final_loss=loss, unit="images")
        for job in "ab"
    ]
    end_ns = max(span.end_ns for span in spans)
    return Report.build(spans, jobs=jobs, start_ns=0, end_ns=end_ns, policy=policy)


def test_the_numbers_of_json():
    compared = Comparison.of(
        [report("sequential")] * 2, [report("crossover", loss=float("nan"))] * 2
    )
    result = demo.numbers(compared, link="none", trace=Path("t"), gantt=Path("g"))
    job = {"images_per_second": 4.0, "steps": 12, "final_loss": None}
    assert result == {
        "link": "none",
        "sequential_s_per_step": 2.0,
        "crossover_s_per_step": 1.0,
        "speedup": 2.0,
        "ratio": 2.0,
        "reason": "",
        "bound_s_per_step": 1.0,
        "efficiency": 1.0,
        "efficiency_alone": 1.0,
        "compute_s_per_step": {"alone": 1.0, "crossover": 1.0},
        "exchange_s_per_step": {"alone": 1.0, "crossover": 1.0},
        "hidden_share": 1.0,
        "jobs": [{"name": "a", **job}, {"name": "b", **job}],
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


def test_both_ways_in_one_table():
    text = str(Comparison.of([report("sequential")], [report("crossover")]))
    totals = [line.split() for line in text.splitlines() if "all 2" in line]
    assert [line[-2] for line in totals] == ["1.00x", "2.00x"]
    assert "images/s" in text
    assert text.splitlines()[-1] == "2.00x: 2.00 s per job-step (sequential), 1.00 s (crossover)"


def test_busy_machine_in_one_run_gives_no_speed_up():
    """Two equal jobs gain at most a factor of 2, but everything took 1.3 times as long in the first
    run.
    """
    compared = Comparison.of(
        [report("sequential", compute=1.3, exchange=1.3)], [report("crossover")]
    )
    assert (compared.ratio, compared.speedup) == (pytest.approx(2.6), None)
    assert compared.reason.startswith(
        "a round's compute took 2.60 s (sequential) and 2.00 s (crossover)"
    )
    text = str(compared)
    assert "2.60x" not in text and "No speed-up stated: a round's compute took" in text


@pytest.mark.parametrize(
    ("alone", "crossed", "reason"),
    [
        ({}, {}, ""),
        ({}, {"compute": 1.19}, ""),
        ({}, {"compute": 1.25}, "compute took"),
        ({"exchange": 1.25}, {}, "exchange took"),
        ({"exchange": 0.01}, {"exchange": 0.02}, ""),  # twice a negligible time
        ({"gap": 0.05}, {}, ""),
        ({"gap": 0.2}, {}, "2.20 times as fast is more than the 2.00 times"),
        ({}, {"steps": 2}, "crossover: the jobs were never in steady state together"),
    ],
)
def test_why_there_is_no_speed_up(alone, crossed, reason):
    compared = Comparison.of([report("sequential", **alone)], [report("crossover", **crossed)])
    assert reason in compared.reason
    assert (compared.speedup is None) == bool(reason)
    beyond = bool(compared.speedup and alone.get("gap"))
    assert ("Overlap alone can gain 2.00x here" in str(compared)) == beyond


def test_slow_crossover_shows_compute_time_alone():
    """The crossover is no faster than running in turn, but as fast as its own slow compute time
    allows.
    """
    slow = report("crossover", compute=2.1, exchange=2.1)
    compared = Comparison.of([report("sequential")], [slow])
    assert slow.rounds.efficiency == compared.second.efficiency == 1.0
    assert compared.efficiency_alone == pytest.approx(2 / 4.2)
    text = str(compared)
    assert "A round's compute takes 2.00 s alone, 4.20 s alongside exchange" in text
    assert (
        "100% of the bound of compute and exchange as they were in it, 48% of their bound alone"
        in text
    )


def test_rounds_of_other_steps_are_not_compared():
    """In turn, a round is one step per job. Crossed over, it's five small steps per large one."""

    def run(policy, begins):
        spans = [
            Span(
                rank=0,
                job=job,
                step=step,
                segment=0,
                kind="compute",
                lane=0,
                start_ns=round(begin * S),
                end_ns=round((begin + length) * S),
                ready_ns=round(begin * S),
            )
            for job, step, begin, length in begins
        ]
        jobs = [
            JobSummary(name=name, steps=sum(job == name for job, *_ in begins))
            for name in ("large", "small")
        ]
        return Report.build(
            spans, jobs=jobs, start_ns=0, end_ns=max(s.end_ns for s in spans), policy=policy
        )

    alone = [
        *(("large", n + 1, n, 1.0) for n in range(10)),
        *(("small", n + 1, 10 + n / 10, 0.1) for n in range(10)),
    ]
    crossed = [("large", n + 1, 1.5 * n, 1.0) for n in range(8)]
    crossed += [
        ("small", 5 * n + i + 1, 1.5 * n + 1 + i / 10, 0.1) for n in range(8) for i in range(5)
    ]
    compared = Comparison.of([run("sequential", alone)], [run("crossover", crossed)])
    assert compared.reason == (
        "a round is one step of every job (sequential) and 0.33 steps of large, 1.67 steps of "
        "small (crossover), which is not the same work"
    )
    assert (compared.speedup, compared.efficiency_alone) == (None, None)
    text = str(compared)
    assert "busy" not in text and "alone" not in text and "220%" not in text


def test_the_turns_of_a_way_are_pooled():
    turns = [report("sequential"), report("sequential", compute=1.1)]
    compared = Comparison.of(turns, [report("crossover")] * 2)
    assert compared.first.period_s == pytest.approx(4.1)
    assert [job.facts.steps for job in compared.first.jobs] == [12, 12]
    with pytest.raises(ValueError, match="of the same jobs"):
        Comparison.of(turns, [Report.build([], jobs=[], start_ns=0, end_ns=1)])


def test_an_emulated_link_says_so_everywhere():
    from jaxcross.commands.launch import Mpirun

    args = cli.parser().parse_args(["demo", "--link", "100mbit"])
    mpirun = Mpirun(path="mpirun", vendor="mpich")
    launch = demo._launch(args, Path("example.py"), mpirun, Path("data"), None, slow=True)
    assert launch.link == "emulated link 100mbit"
    assert list(launch.line[-2:]) == ["--emulate-link", "100mbit"]
    assert launch.shown.endswith("--emulate-link 100mbit")


def test_without_a_link_nothing_is_emulated():
    from jaxcross.commands.launch import Mpirun

    args = cli.parser().parse_args(["demo", "--link", "none", "--jobs", "3"])
    mpirun = Mpirun(path="mpirun", vendor="mpich")
    launch = demo._launch(args, Path("example.py"), mpirun, Path("data"), None, slow=False)
    assert launch.link == "none"
    assert "--emulate-link" not in launch.line
    assert launch.line.count("--job") == 3
