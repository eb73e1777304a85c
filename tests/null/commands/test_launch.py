"""Tests the launch command for each vendor, without running it."""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxcross import cli
from jaxcross.commands import launch
from jaxcross.commands.launch import (
    Mpirun,
    mpirun_command,
    printed,
    python_program,
    supervised,
    vendor_of_mpirun,
)
from jaxcross.commands.restart_decision import is_explained, stop_text
from jaxcross.world import malloc
from jaxcross.world.launch_env import MPI_SETTINGS

MPICH = Mpirun(path="/venv/bin/mpirun", vendor="mpich")
OPENMPI = Mpirun(path="mpirun", vendor="openmpi")
PAGES = malloc.settings({})


def command(mpirun, *, ranks=2, root=False, cores=4, environ=None):
    return mpirun_command(
        mpirun=mpirun,
        ranks=ranks,
        program=["python", "a.py", "--x"],
        root=root,
        cores=cores,
        environ=environ or {},
    )


def test_a_rank_keeps_its_memory():
    (setting,) = PAGES.values()
    asked = dict(part.rsplit("=", 1) for part in setting.split(":"))
    assert asked["glibc.malloc.hugetlb"] == asked["glibc.malloc.arena_max"] == "1"
    assert asked["glibc.malloc.mmap_max"] == "0"
    assert int(asked["glibc.malloc.trim_threshold"]) >= 2**36


def test_mpich():
    line, extra = command(MPICH)
    assert line == ["/venv/bin/mpirun", "-n", "2", "python", "a.py", "--x"]
    assert extra == {"PJRT_NPROC": "4", **PAGES}


def test_openmpi_is_unbound_and_may_oversubscribe():
    """Running as root is allowed, too."""
    line, extra = command(OPENMPI, ranks=8, root=True)
    assert line == ["mpirun", "-n", "8", "--bind-to", "none", "python", "a.py", "--x"]
    assert extra["OMPI_ALLOW_RUN_AS_ROOT"] == extra["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert extra["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    _, extra = command(OPENMPI)
    assert extra == {"PJRT_NPROC": "4", **MPI_SETTINGS, **PAGES}


def test_the_users_settings_stay():
    _, extra = command(MPICH, environ={"NPROC": "3"})
    assert extra == PAGES
    own = {"PJRT_NPROC": "3", "OMPI_ALLOW_RUN_AS_ROOT": "0", "OMPI_MCA_btl_tcp_flags": "put"}
    _, extra = command(OPENMPI, root=True, environ=own)
    assert extra == {
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **PAGES,
    }
    _, extra = command(MPICH, environ={"NPROC": "3", "GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert extra == {}


def test_advice_for_cpus_without_malloc_settings():
    """We advise CPU users to set the `malloc` variables that retain memory."""
    notice = malloc.advice({}, libc="glibc", accelerators=0)
    assert (
        notice is not None
        and f"GLIBC_TUNABLES={PAGES['GLIBC_TUNABLES']}" in notice
        and "jaxcross launch" in notice
    )
    assert malloc.advice(PAGES, libc="glibc", accelerators=0) is None
    assert malloc.advice({}, libc="", accelerators=0) is None, "musl has no such settings"
    assert malloc.advice({}, libc="glibc", accelerators=1) is None


def test_a_pool_of_one_core_still_has_two_threads():
    _, extra = command(MPICH, cores=1)
    assert extra == {"PJRT_NPROC": "2", **PAGES}


def test_ranks_run_through_mpi4py():
    assert python_program(["a.py", "1"]) == [
        sys.executable,
        "-m",
        "jaxcross.commands.rank",
        "a.py",
        "1",
    ]


def test_the_line_can_be_pasted():
    assert printed(["mpirun", "-n", "2", "a b.py"], {"X": "1 2"}) == "X='1 2' mpirun -n 2 'a b.py'"


def test_vendors():
    assert vendor_of_mpirun("mpirun (Open MPI) 5.0.8") == "openmpi"
    assert vendor_of_mpirun("HYDRA build details:\n Version: 5.0.2") == "mpich"
    assert vendor_of_mpirun("Intel(R) MPI Library for Linux") == "intel"
    assert vendor_of_mpirun("?") == "unknown"


def parse(*argv):
    parser = argparse.ArgumentParser()
    launch.add_parser(parser.add_subparsers())
    return parser.parse_args(["launch", *argv])


def test_the_command_line():
    args = parse("-n", "3", "script.py", "--lr", "0.1")
    assert (args.ranks, args.program, args.run) == (3, ["script.py", "--lr", "0.1"], launch.run)


def test_a_module_and_its_arguments(capsys, monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    assert launch.run(parse("-n", "2", "--dry-run", "-m", "package.module", "-n", "7")) == 0
    assert capsys.readouterr().out.endswith(
        f"{sys.executable} -m jaxcross.commands.rank -m package.module -n 7\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "2"), "Name the script to start: `jaxcross launch -n 2 train.py`."),
        (("-n", "0", "train.py"), "`-n` must be at least 1 rank, got 0."),
        (("-n", "2", "none.py"), "There is no script `none.py` in `"),
        (("tests",), "`tests` is a folder. Name the script in it, as `tests/train.py`, or give it"),
        (("-m", "nowhere", "-n", "7"), "There is no module `nowhere`, neither in `"),
        (("-m", "nowhere.train"), "There is no module `nowhere.train`, neither in `"),
        (("-m", "json.nowhere"), "There is no module `json.nowhere`, neither in `"),
        (("-m", "json.tool.main"), "There is no module `json.tool.main`, neither in `"),
        (
            ("-m", "json"),
            "`json` is a package without a `__main__.py`. Name a module in it, as `-m json.train`.",
        ),
    ],
)
def test_nothing_to_run(capsys, monkeypatch, words, message):
    monkeypatch.chdir(Path(__file__).parents[3])
    assert launch.run(parse(*words)) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    "words", [("-m", "json.tool"), ("-m", "unittest"), ("-m", "package.train"), ("package",)]
)
def test_modules_and_folders_that_python_runs(monkeypatch, tmp_path, words):
    """Covers modules of this folder, installed modules, packages, and folders with a `__main__.py`.
    None of them is imported.
    """
    (tmp_path / "package").mkdir()
    for name in ("__init__.py", "__main__.py", "train.py"):
        (tmp_path / "package" / name).write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    assert callable(launch.prepared(parse(*words)))


def test_more_ranks_than_cores_are_reported():
    assert launch.crowded(2, 2) == ""
    assert launch.crowded(99, 2).startswith("99 ranks share 2 cores, so they can't all compute")
    assert "share 1 core," in launch.crowded(3, 1)


def test_more_ranks_than_cores_are_reported_before_the_start(capsys, monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    monkeypatch.setattr(launch, "_run", lambda *_, **__: (0, False))
    monkeypatch.setattr(launch, "unreachable_hosts", lambda *_: [])
    assert launch.run(parse("-n", "9999", __file__)) == 0
    assert capsys.readouterr().err.startswith("jaxcross launch: 9999 ranks share ")
    assert launch.run(parse("-n", "9998", "--hosts", "a,b", __file__)) == 0
    assert not capsys.readouterr().err, "how many cores they have is not known here"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-restarts", "-1"], "`--max-restarts` must be at least 0, got -1."),
        (
            ["--hosts", "a,b", "-n", "3"],
            "`-n 3` must be a multiple of the 2 hosts, which share the ranks equally.",
        ),
        (["--hosts", "a,,b"], "`--hosts` must be names of hosts"),
    ],
)
def test_wrong_arguments_start_nothing(capsys, monkeypatch, options, message):
    monkeypatch.setattr(launch, "find_mpirun", lambda: pytest.fail("too late"))
    assert launch.run(parse(*options, "script.py")) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("option", ["--log-dir", "--events"])
def test_a_folder_without_a_name_is_refused(capsys, option):
    with pytest.raises(SystemExit):
        parse(option, "", "script.py")
    assert f"argument {option}: the name of the folder is empty. Name" in capsys.readouterr().err


def test_no_mpirun(capsys, monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: None)
    assert launch.run(parse(__file__)) == 1
    assert capsys.readouterr().err.startswith("No `mpirun` was found. Remedy: `pip install mpich`")


def test_dry_run_prints_the_real_line(capsys, monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    assert launch.run(parse("-n", "2", "--dry-run", "script.py")) == 0
    rank = " ".join(supervised([sys.executable, "-m", "jaxcross.commands.rank", "script.py"]))
    assert f"/venv/bin/mpirun -n 2 {rank}" in capsys.readouterr().out


def test_an_empty_folder_of_events_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    monkeypatch.setattr(launch, "_run", lambda *_, **__: (0, False))
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("JAXCROSS_EVENTS", "")
    assert launch.run(parse(__file__)) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "words", "explained"),
    [
        (0, ["left", "left"], True),
        (1, ["failed", "aborted"], True),
        (1, ["failed", "failed"], True),
        (143, ["terminated", "aborted"], True),
        (3, ["left", "left"], True),
        (1, ["", "reported"], False),
        (1, ["failed", ""], False),
        (139, ["left", "left"], False),
        (143, [""], False),
        (1, [], False),
        (0, [], True),
    ],
)
def test_what_ranks_already_reported_is_not_repeated(code, words, explained):
    records = [SimpleNamespace(exit_kind=each) for each in words]
    assert is_explained(code, records) == explained


@pytest.mark.parametrize(
    ("code", "stops", "ranks", "text"),
    [
        (130, 1, 0, "stopped before the start"),
        (143, 1, 0, "stopped before the start"),
        (130, 1, 2, ""),
        (130, 2, 2, "stopped at once by a second signal"),
        (1, 1, 0, ""),
        (0, 1, 2, ""),
    ],
)
def test_the_launcher_says_what_ranks_cannot(code, stops, ranks, text):
    assert stop_text(code, stops, [SimpleNamespace(exit_kind="")] * ranks) == text


@pytest.mark.parametrize("vendor", ["mpich", "openmpi"])
@pytest.mark.parametrize(("own", "code"), [(15, 143), (143, 143), (0, 0)])
def test_a_stopped_run_has_the_code_of_its_signal(vendor, own, code):
    """MPICH's `mpirun` exits with 15 if SIGTERM arrives before the ranks have a handler."""
    mpirun = f"""
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit({own}))
os.kill(os.getppid(), signal.SIGTERM)
while True: signal.pause()
"""
    assert launch._run([sys.executable, "-c", mpirun], dict(os.environ), vendor) == (code, True)


def test_a_second_signal_leaves_the_code_of_the_first():
    """On the second Ctrl-C, MPICH's `mpirun` kills the ranks and exits with 255."""
    mpirun = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
for _ in range(2):
    os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait([signal.SIGTERM])
sys.exit(255)
"""
    assert launch._run([sys.executable, "-c", mpirun], dict(os.environ), "mpich") == (143, 2)


def test_quitting_the_launcher_stops_the_ranks():
    """Otherwise the launcher would exit alone, and no terminal could reach the remaining ranks."""
    mpirun = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getppid(), signal.SIGQUIT)
signal.sigwait([signal.SIGTERM])
sys.exit(15)
"""
    assert launch._run([sys.executable, "-c", mpirun], dict(os.environ), "mpich") == (143, 1)


def test_a_code_that_no_signal_explains_stays():
    assert launch._run(
        [sys.executable, "-c", "raise SystemExit(15)"], dict(os.environ), "mpich"
    ) == (15, False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_before_the_start_leaves_no_folder(tmp_path, monkeypatch, number, code):
    made = []

    def stopped(*args, **_):
        made.extend(tmp_path.glob("jaxcross-events-*"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    monkeypatch.setattr(launch, "_run_once", stopped)
    (tmp_path / "train.py").touch()
    ended = 0
    try:
        ended = cli.main(["launch", str(tmp_path / "train.py")])
    except SystemExit as end:
        ended = end.code
    assert ended == code and made and list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_output_options_reach_the_supervisor(capsys, monkeypatch, tmp_path):
    """A dry run makes no folder."""
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    (tmp_path / "attempt-9").mkdir()
    (tmp_path / "attempt-x").mkdir()
    options = ["--tag", "--log-dir", str(tmp_path)]
    assert launch.run(parse(*options, "--dry-run", "train.py")) == 0
    assert f"rank_supervisor.py --tag --log={tmp_path}/attempt-10 40 " in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 2


def test_the_time_is_the_same_in_all_folders_of_a_run(capsys, monkeypatch):
    """It's that of this launch, whatever the launcher has inherited."""
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    monkeypatch.setattr(launch, "start_time", lambda: "T1")
    monkeypatch.setenv("JAXCROSS_TIME", "T0")
    options = ["--log-dir", "runs/{time}", "--events", "runs/{time}/events"]
    assert launch.run(parse(*options, "--dry-run", "train.py")) == 0
    printed_line = capsys.readouterr().out
    assert f"--log={Path.cwd()}/runs/T1/attempt-1 " in printed_line
    assert " JAXCROSS_TIME=T1 " in printed_line
    assert "JAXCROSS_EVENTS=runs/T1/events " in printed_line


@pytest.mark.parametrize("option", ["--log-dir", "--events"])
def test_an_unknown_placeholder_starts_nothing(capsys, monkeypatch, option):
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    monkeypatch.setattr(launch, "_run", lambda *_, **__: pytest.fail("too late"))
    assert launch.run(parse(option, "runs/{date}", __file__)) == 2
    assert capsys.readouterr().err.startswith("`runs/{date}` contains `{date}`, which can't be")


def test_a_log_folder_that_cannot_be_made_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(launch, "find_mpirun", lambda: MPICH)
    monkeypatch.setattr(launch, "_run", lambda *_, **__: pytest.fail("too late"))
    assert launch.run(parse("--log-dir", __file__, __file__)) == 1
    assert capsys.readouterr().err.startswith(f"`--log-dir`: the folder `{__file__}/attempt-1` can")
