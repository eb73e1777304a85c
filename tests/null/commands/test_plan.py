"""Tests `jaxcross plan`: its input file, the plan, and the files that start the plan."""

import argparse
import json
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxcross import cli
from jaxcross.commands.plan_launch import write_launch_files
from jaxcross.interleave.contention import Contention
from jaxcross.plan import Plan, PlannedGroup, PlannedJob, Profile, predict
from jaxcross.plan.jobs_file import MAX_FILE_BYTES, read_jobs
from jaxcross.plan.machine_contention import TWO_CORES, MachineContention
from jaxcross.report import JobSummary, Report
from tests.support.examples import scaled

SCHEMA = json.loads((Path(__file__).parents[1] / "deploy" / "crds.json").read_text())["schemas"][
    "MPIJob"
]
JOBS = """
script = "train.py"

[[job]]
name = "large"
profile = "large.json"

[[job]]
name = "small"
profile = ["small.json"]
"""


def _profile(name: str, compute_s: float, exchange_s: float) -> Profile:
    return Profile.whole(name, compute_s=compute_s, exchange_s=exchange_s, nbytes=10**7, ranks=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _profile("some run", 0.3, 0.05).to_json(tmp_path / "large.json")
    _profile("another", 0.04, 0.1).to_json(tmp_path / "small.json")
    (tmp_path / "jobs.toml").write_text(JOBS)
    return tmp_path


def _run(*words: object) -> int:
    return cli.main(["plan", *map(str, words)])


def test_the_plan_is_printed_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(folder / "jobs.toml", "--memory", "80GB", "--json", folder / "plan.json") == 0
    plan = Plan.load(folder / "plan.json")
    assert [[job.name for job in group.jobs] for group in plan.groups] == [["large", "small"]]
    out = capsys.readouterr().out
    assert "2 jobs in 1 group on 2 ranks, 80.0 GB of memory on each" in out
    assert "The memory of 2 jobs is not known" in out


@pytest.mark.integration
def test_the_link_s_rate_brings_contention(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report's profile doesn't state the link's rate. Without a rate, we assume no contention."""
    words = (folder / "jobs.toml", "--contention", "two-cores", "--json", folder / "plan.json")
    made = []
    for more in ((), ("--mbps", 500)):
        assert _run(*words, *more) == 0
        made.append(Plan.load(folder / "plan.json").progress)
        assert ("or by `--mbps`" in " ".join(capsys.readouterr().out.split())) is not bool(more)
    assert made[1] < made[0]
    assert _run(*words, "--mbps", 0) == 2
    assert "`--mbps` must be above 0" in capsys.readouterr().err


def test_profiles_lie_in_a_folder_of_their_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (folder / "jobs.toml").rename(tmp_path / "there" / "jobs.toml")
    jobs = read_jobs(tmp_path / "there" / "jobs.toml", profiles=folder)
    assert [(profile.name, profile.compute_s) for profile in jobs.profiles] == [
        ("large", 0.3),
        ("small", 0.04),
    ]
    assert (jobs.script, jobs.steps) == ("train.py", None)


def test_ranks_and_steps_are_the_jobs_own(folder: Path) -> None:
    text = JOBS.replace('"large.json"', '"large.json"\nranks = 8\nsteps = 10').replace(
        'on"]', 'on"]\nsteps = 2.5'
    )
    (folder / "jobs.toml").write_text(text)
    jobs = read_jobs(folder / "jobs.toml")
    assert [profile.ranks for profile in jobs.profiles] == [8, 2]
    assert jobs.steps == {"large": 10.0, "small": 2.5}


def test_a_group_too_high_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the plan turns out to have fewer groups than `--group` needs, nothing is written.

    Two jobs can form up to two groups, so `--group 1` can't be refused before the plan is known.
    Since the plan puts both jobs into one group, the command must then print only an error.
    """
    words = ("--json", folder / "plan.json", "--picture", folder / "group.png", "--group", "1")
    assert _run(folder / "jobs.toml", *words) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "jaxcross plan: `--group` must be 0 to 0, since the plan has 1 group, got 1.\n",
    )
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".toml"]


@pytest.mark.integration
def test_a_picture_of_a_group_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (
        _run(folder / "jobs.toml", "--picture", folder / "group.png", "--contention", "two-cores")
        == 0
    )
    assert (folder / "group.png").read_bytes().startswith(b"\x89PNG")


def test_contention_is_read_from_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "slow.json").write_text(json.dumps(TWO_CORES.to_json()))
    assert _run(folder / "jobs.toml", "--contention", folder / "slow.json") == 0
    # The profiles don't state a rate.
    assert "planned without contention" in " ".join(capsys.readouterr().out.split())
    lowest = MachineContention.from_json(TWO_CORES.to_json()).at(1)
    assert lowest == Contention(compute=1.03, exchange=1.0)


def test_a_profile_is_written_from_a_report(tmp_path: Path) -> None:
    made = _profile("a", 0.1, 0.05)
    program = {"graph": made.graph.as_data(), "steps": 8, "memory": {}}
    program["memory"] = {"peak_bytes": 7, "boundary_bytes": 3, "exchange_temporary_bytes": 1}
    report = Report(
        spans=predict([made], steps=8, vote_s=0.0).spans,
        jobs=(JobSummary(name="a", steps=8, program=program),),
        wall_ns={0: (0, 1)},
        policy="round-robin",
    )
    report.to_json(tmp_path / "report.json")
    assert _run("--profile-of", tmp_path / "report.json", "a", tmp_path / "a.json") == 0
    assert Profile.load(tmp_path / "a.json").compute_s == pytest.approx(0.1)
    assert _run("--profile-of", tmp_path / "report.json", "b", tmp_path / "b.json") == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "small"', 'name = "large"', "two jobs have the name `large`"),
        (
            'name = "small"',
            'names = "small"',
            "`name` of job 2 must be 1 to 200 printable characters",
        ),
        ('name = "small"', f'name = "{"x" * 201}"', "1 to 200 printable characters"),
        ('name = "small"', 'name = "a\\nb"', "1 to 200 printable characters"),
        (
            'name = "small"',
            'name = "small"\ncut = 4',
            "job `small` has the unknown key `cut`. The known keys are",
        ),
        ("script =", "scripts =", "unknown key `scripts`"),
        ('"train.py"', "3", "`script` must be the path"),
        ("large.json", "none.json", "none.json` of job `large` cannot be read: No such file"),
        ('"large.json"', "7", "`profile` of job `large` must be a file"),
        ('"large.json"', "[]", "`profile` of job `large` must be a file"),
        (
            '"large.json"',
            '["large.json", "large.json"]',
            "two profiles of `large` have the same cut (`cut=1`). ",
        ),
        (
            '"large.json"',
            '"large.json"\nranks = 0',
            "`ranks` of job `large` must be a whole number",
        ),
        (
            '"large.json"',
            '"large.json"\nranks = true',
            "`ranks` of job `large` must be a whole number",
        ),
        (
            '"large.json"',
            '"large.json"\nsteps = nan',
            "`steps` of job `large` must be a number above 0",
        ),
        ('"large.json"', '"large.json"\nsteps = 1', "job `small` has no `steps`, but other"),
        ('"large.json"', '"jobs.toml"', "is not a profile of jaxcross"),
        ("[[job]]", "[[jobs]]", "unknown key `jobs`"),
        ("[[job]]", "[job", "jobs.toml`: "),
    ],
)
def test_a_wrong_file_of_jobs_is_explained(
    folder: Path, capsys: Any, old: str, new: str, message: str
) -> None:
    (folder / "jobs.toml").write_text(JOBS.replace(old, new))
    assert _run(folder / "jobs.toml") == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxcross plan: ") and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "`memory` must be a number of bytes"),
        (["--memory", "1kB"], "job `large` needs 9000 bytes alone"),
        (["--most", "0"], "at least 1 job"),
        (["--floor", "2"], "`floor` must be in (0, 1]"),
        (
            ["--group", "5", "--picture", "x.png"],
            "`--group` must be below 2, the number of jobs, got 5",
        ),
        (
            ["--group", "1", "--picture", "x.png"],
            "`--group` must be 0 to 0, since the plan has 1 group, got 1",
        ),
        (
            ["--group", "-1", "--picture", "x.png"],
            "`--group` must be the number of a group for `--picture`, got -1",
        ),
        (["--group", "0"], "`--group 0` says which group `--picture` draws, but there is no"),
        (
            ["--picture", "none/x.png"],
            "`--picture none/x.png` cannot be written: there is no folder `none`",
        ),
        (
            ["--json", "none/x.json"],
            "`--json none/x.json` cannot be written: there is no folder `none`",
        ),
        (["--launch", "torque", "x"], "`--launch` writes files for slurm or mpijob, got `torque`"),
        (
            ["--launch", "mpijob", "x", "--queue", "My Queue"],
            "`--queue` must be the name of a queue",
        ),
        (
            ["--contention", "none.json"],
            "contention `none.json` cannot be read: No such file or directory. Measure it",
        ),
        (["--contention", "jobs.toml"], "`jobs.toml` is not the contention of a machine"),
    ],
)
def test_wrong_options_are_explained(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    profile = Profile.load("large.json").as_data()
    profile["memory"] = {"peak_bytes": 9000, "boundary_bytes": 0, "exchange_temporary_bytes": 0}
    Path("large.json").write_text(json.dumps(profile))
    assert _run("jobs.toml", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--launch", "torque", "x"],
        ["--launch", "slurm", "x", "--queue", "My Queue"],
        ["--group", "5", "--picture", "x.png"],
        ["--json", "none/x.json"],
        ["--contention", "none.json"],
    ],
)
def test_wrong_options_are_found_before_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("jaxcross.plan.make", lambda *_, **__: pytest.fail("it was planned"))
    assert _run("jobs.toml", *words) == 2


def test_a_script_is_asked_for_before_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxcross.plan.make", lambda *_, **__: pytest.fail("it was planned"))
    (folder / "jobs.toml").write_text(JOBS.replace('script = "train.py"', ""))
    assert _run(folder / "jobs.toml", "--launch", "slurm", folder) == 2


def test_other_ranks_than_the_profile_s_are_noted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "jobs.toml").write_text(JOBS.replace('"large.json"', '"large.json"\nranks = 8'))
    assert _run(folder / "jobs.toml") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "Planned for other numbers of ranks than measured" in shown
        and "`large` (8 instead of 2)." in shown
    )


def test_a_missing_report_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--profile-of", tmp_path / "none.json", "a", tmp_path / "a.json") == 2
    err = capsys.readouterr().err
    assert (
        "the report `" in err
        and "cannot be read: No such file or directory. Write it with `report" in err
    )
    assert "Errno" not in err


def test_no_file_of_jobs_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 2
    assert _run(tmp_path / "none.toml") == 2
    with (tmp_path / "jobs.toml").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert _run(tmp_path / "jobs.toml") == 2
    err = capsys.readouterr().err
    assert (
        "name the file of jobs" in err
        and "the file of jobs `" in err
        and "more than 10000000 bytes" in err
    )
    assert "Errno" not in err


@settings(max_examples=scaled(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([*JOBS.splitlines(), "x=1", "[a]"])).map("\n".join)
)
def test_random_files_are_read_or_refused(folder: Path, text: str) -> None:
    (folder / "random.toml").write_text(text, encoding="utf-8")
    with suppress(ValueError):
        read_jobs(folder / "random.toml")


def _plan(groups: int, ranks: int = 4) -> Plan:
    job = PlannedJob(
        name="job", pieces=1, share=1.0, alone_s=1.0, step_s=1.0, compute_s=1.0, exchange_s=1.0
    )
    made = [
        PlannedGroup(jobs=(replace(job, name=f"job {n}"),), ranks=ranks if n % 2 else 2, lost_s={})
        for n in range(groups)
    ]
    return Plan(groups=tuple(made))


def test_slurm_gets_an_array_for_each_number_of_ranks(tmp_path: Path) -> None:
    files = write_launch_files(_plan(5), "slurm", tmp_path, script="my train.py")
    assert [path.name for path in files] == ["plan.json", "ranks-2.sbatch", "ranks-4.sbatch"]
    text = files[1].read_text()
    assert f"sbatch {files[1]}\n" in text and f"#SBATCH --chdir={Path.cwd()}\n" in text
    assert "#SBATCH --array=0-2\n#SBATCH --ntasks=2\n" in text and "groups=(0 2 4)" in text
    assert f"python -m mpi4py 'my train.py' {files[0]} \"$group\"" in text
    for path in files[1:]:
        subprocess.run(["bash", "-n", str(path)], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(path)], check=True)


def test_slurm_gives_jobs_that_were_measured_on_cpus_no_accelerators(tmp_path: Path) -> None:
    for accelerators in (True, False):
        files = write_launch_files(
            _plan(1), "slurm", tmp_path, script="t.py", accelerators=accelerators
        )
        assert ("#SBATCH --gpus-per-task=1\n" in files[1].read_text()) == accelerators


def test_slurm_s_arrays_are_not_longer_than_it_allows(tmp_path: Path) -> None:
    files = write_launch_files(_plan(1500, ranks=2), "slurm", tmp_path, script="t.py")
    assert [path.name for path in files[1:]] == ["ranks-2-0.sbatch", "ranks-2-1.sbatch"]
    assert "--array=0-999\n" in files[1].read_text() and "--array=0-499\n" in files[2].read_text()


def test_kubernetes_gets_a_job_for_each_group(tmp_path: Path) -> None:
    files = write_launch_files(_plan(2), "mpijob", tmp_path, script="t.py", queue="team")
    assert [path.name for path in files] == ["plan.json", "group-0.yaml", "group-1.yaml"]
    documents = [yaml.safe_load(path.read_text()) for path in files[1:]]
    for document in documents:
        assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)) == []
        assert document["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert documents[1]["metadata"]["name"] == "jaxcross-group-1"
    replicas = documents[1]["spec"]["mpiReplicaSpecs"]
    assert replicas["Worker"]["replicas"] == 4
    (command,) = replicas["Launcher"]["template"]["spec"]["containers"][0]["args"]
    assert "jaxcross launch -n 4 " in command and command.endswith(f"t.py {files[0]} 1")


def test_launch_files_need_a_script(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the script"):
        write_launch_files(_plan(1), "slurm", tmp_path, script="")


def test_the_command_line_takes_all_options() -> None:
    """Every option in the documentation exists."""
    from jaxcross.commands import plan

    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    words = [
        "--profiles",
        "--memory",
        "--most",
        "--floor",
        "--contention",
        "--mbps",
        "--json",
        "--picture",
        "--launch",
        "--queue",
    ]
    text = parser.format_help() + str(parser.parse_args(["plan", "j.toml"]))
    assert all(word.strip("-").replace("-", "_") in text for word in words)
