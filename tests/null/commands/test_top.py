"""Tests what `jaxcross top` shows for a folder of events, during a run and after its end."""

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxcross import cli
from jaxcross.commands.live_table import table_of
from jaxcross.commands.top import shown
from jaxcross.report import run_state
from jaxcross.report.progress import PROGRESS_FILE, JobProgress, RunProgress
from jaxcross.report.run_state import TAIL_BYTES, read_state

NOW_S = 2e9
JOBS = (
    JobProgress(name="a", step=3, steps=9, steps_per_s=2.0),
    JobProgress(name="b", doing="compiling", doing_s=4),
)


def progress(**fields):
    return RunProgress(
        **{"run": "h 1 1", "ranks": 2, "at_s": NOW_S, "run_s": 13.0, "jobs": JOBS, **fields}
    )


def write(folder, run, *ranks, host="elsewhere", pid=1, before=""):
    """Writes the event file of each rank.

    Each rank is described by a list of pairs. A pair is either an activity that the rank has begun
    and its job, or the kind and the text of the rank's final message.
    """
    folder.mkdir(exist_ok=True)
    for rank, events in enumerate(ranks):
        lines = [
            {
                "jaxcross": 1,
                "run": "h 1 1",
                "rank": rank,
                "size": len(ranks),
                "host": host,
                "pid": pid,
                "time": NOW_S,
                "at": 0,
            }
        ]
        for token, (what, about) in enumerate(events):
            if what in ("left", "failed", "interrupted"):
                lines.append({"exit": what, "text": about, "at": 1})
            else:
                lines.append(
                    {"begin": token, "at": 0, "what": what, "job": about, "step": 3, "segment": 1}
                )
        header, *rest = (json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank}.jsonl").write_text(header + before + "".join(rest))
    if run is not None:
        (folder / PROGRESS_FILE).write_text(run.to_json())


def seen(folder, later_s=0.0, width=100):
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(shown(read_state(folder, NOW_S + later_s), console))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_run_that_lasts(tmp_path):
    write(tmp_path, progress(), (), ())
    title, _, first, second = seen(tmp_path)
    assert title == "2 ranks, 13 s"
    assert first.split()[:2] == ["a", "3/9"] and second.endswith("compiling, 4 s")


@pytest.mark.parametrize(
    ("over", "words", "how"),
    [
        (True, ("left", "its script ended"), "the run ended after 13 s; the processes have ended"),
        (False, ("left", "its script ended"), "13 s; the processes have ended"),
        (
            False,
            ("failed", "ValueError: bad"),
            "13 s; the processes have ended; rank 1 failed: ValueError: bad",
        ),
        (
            False,
            ("failed", "rank 1 failed with ValueError"),
            "13 s; the processes have ended; rank 1 failed with ValueError",
        ),
        (
            False,
            ("interrupted", "Ctrl-C"),
            "13 s; the processes have ended; rank 1 was interrupted: Ctrl-C",
        ),
    ],
)
def test_a_run_that_ended(tmp_path, over, words, how):
    write(tmp_path, progress(over=over), [("left", "its script ended")], [words])
    assert seen(tmp_path)[0] == f"2 ranks, {how}"
    assert read_state(tmp_path, NOW_S).ended


def test_script_may_continue_after_its_run(tmp_path):
    write(tmp_path, progress(over=True), (), ())
    assert seen(tmp_path)[0] == "2 ranks, the run ended after 13 s; the script is still running"
    assert not read_state(tmp_path, NOW_S).ended


def test_a_killed_run_has_ended_without_a_word(tmp_path):
    # This process ID is above the kernel's largest.
    write(tmp_path, progress(), (), (), host=os.uname().nodename, pid=2**22 + 1)
    assert "ended" not in seen(tmp_path, 4.0)[0]
    assert seen(tmp_path, 6.0)[0].endswith("the processes have ended; rank 0 ended without a word")


def test_silent_run_on_another_host_is_reported(tmp_path):
    write(tmp_path, progress(), (), ())
    assert seen(tmp_path, 40.0)[0].endswith(
        "; no sign of life for 40 s: it was stopped, or its host is gone"
    )


def test_ranks_without_jobs_are_shown_where_they_are(tmp_path):
    write(tmp_path, None, [("exchange", "step")], ())
    assert seen(tmp_path) == [
        "2 ranks, no run of jobs so far",
        "rank 0: in job 'step', step 3, segment 1 (exchange)",
        "rank 1: outside of any step",
    ]


def test_progress_of_an_earlier_run_is_not_shown(tmp_path):
    write(tmp_path, progress(run="h 9 9"), (), ())
    assert seen(tmp_path)[0] == "2 ranks, no run of jobs so far"


@pytest.mark.parametrize(
    ("other", "now"),
    [
        ([("own batch 4 of data 1", "a")], "rank 1 waiting for data, 8 s"),
        ([("compile", "a")], "rank 1 compiling, 8 s"),
        ([("compute", "b")], "waiting for rank 1, 8 s"),
        ([("exchange", "a")], "exchanging, 8 s"),
        ([("failed", "bad")], "exchanging, 8 s"),
    ],
)
def test_the_late_rank_is_named(tmp_path, other, now):
    waits = JobProgress(name="a", step=3, doing="exchanging", doing_s=8)
    write(tmp_path, progress(jobs=(waits,)), [("exchange", "a")], other)
    assert seen(tmp_path)[2].endswith(now)


def test_event_files_are_read_only_where_a_job_waits(tmp_path, monkeypatch):
    """The launcher looks twice per second. As long as jobs make steps, it reads just one small
    file.
    """
    waits = JobProgress(name="a", step=3, doing="exchanging", doing_s=8)
    for job, doing in (
        (replace(waits, doing_s=1), "exchanging"),
        (waits, "rank 1 waiting for data"),
    ):
        write(
            tmp_path, progress(jobs=(job,)), [("exchange", "a")], [("own batch 4 of data 1", "a")]
        )
        run = run_state.read_run(tmp_path)
        assert run is not None and run.jobs[0].doing == doing
    monkeypatch.setattr(run_state, "read_event_files", None)
    write(tmp_path, progress(jobs=(replace(waits, status="ended"),)), (), ())
    assert run_state.read_run(tmp_path) == progress(jobs=(replace(waits, status="ended"),))


def test_a_rank_that_is_busy_itself_blames_no_other(tmp_path):
    busy = JobProgress(name="a", step=3, doing="waiting for data", doing_s=8)
    write(tmp_path, progress(jobs=(busy,)), [("own batch 4 of data 1", "a")], ())
    assert seen(tmp_path)[2].endswith("waiting for data, 8 s")


def test_only_the_ends_of_long_files_are_read(tmp_path):
    waits = JobProgress(name="a", step=3, doing="exchanging", doing_s=8)
    old = (
        json.dumps({"begin": 99, "at": 0, "what": "exchange", "job": "old"})
        + "\n"
        + '{"beat":1,"at":1}\n' * TAIL_BYTES
    )
    write(
        tmp_path,
        progress(jobs=(waits,)),
        [("exchange", "a")],
        [("own batch 4 of data 1", "a")],
        before=old,
    )
    assert seen(tmp_path)[2].endswith("rank 1 waiting for data, 8 s")
    assert [len(record.under_way) for record in read_state(tmp_path, NOW_S).records] == [1, 1]


def test_a_wrong_folder_is_a_clear_error(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for folder, message in (
        (tmp_path / "none", f"jaxcross top: there is no folder `{tmp_path / 'none'}`."),
        (file, f"jaxcross top: `{file}` is not a folder."),
        (tmp_path, f"jaxcross top: `{tmp_path}` holds no event files (`rank-0.jsonl`, ...)."),
    ):
        assert cli.main(["top", str(folder)]) == 1
        assert capsys.readouterr().err.startswith(message)


def test_a_run_that_failed_names_the_post_mortem(tmp_path, capsys):
    write(tmp_path, progress(at_s=time.time()), [("failed", "bad")], ())
    assert cli.main(["top", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "rank 0 failed: bad" in out
        and f"How it ended: jaxcross doctor --post-mortem {tmp_path}\n" in out
    )


def test_an_empty_event_file_is_skipped_with_a_line(tmp_path, capsys):
    write(tmp_path, progress(at_s=time.time()), ())
    (tmp_path / "rank-1.jsonl").touch()
    assert cli.main(["top", str(tmp_path)]) == 0
    assert (
        f"The events of rank 1 are skipped. `{tmp_path / 'rank-1.jsonl'}` is empty"
        in capsys.readouterr().out
    )


def test_a_long_title_is_not_wrapped_to_the_table():
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(
        table_of(progress(), console, state="; the processes have ended; rank 1 failed: x")
    )
    assert out.getvalue().splitlines()[0].rstrip().endswith("rank 1 failed: x")


def test_a_table_leaves_room_on_a_small_terminal():
    jobs = tuple(JobProgress(name=f"j{n}") for n in range(50))
    out = io.StringIO()
    console = Console(file=out, width=80, height=20)
    console.print(table_of(progress(jobs=jobs), console))
    assert len(out.getvalue().splitlines()) == 15


def test_the_folder_of_another_program_is_left_alone(tmp_path):
    write(tmp_path, progress(), (), ())
    (tmp_path / PROGRESS_FILE).unlink()
    Path(tmp_path / PROGRESS_FILE).symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        read_state(tmp_path, NOW_S)
