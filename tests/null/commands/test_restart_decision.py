"""Tests whether and where a run that has ended is restarted, and what is counted against it."""

import pytest

from jaxcross.commands.restart_decision import (
    CheckpointProgress,
    RunEnd,
    complete_checkpoints,
    decide,
    judge_end,
)
from jaxcross.report.event_files import RankRecord, SavedPart

LOST = RunEnd(kind="lost", reason="rank 1 ended first")
NAME = "{:012d}-00000000000000aa"


def part(step, *, any_ranks=True):
    return SavedPart(name=NAME.format(step), any_ranks=any_ranks)


def record(rank, exit_kind="", text="", lost=(), script_raised=False, **saved):
    made = RankRecord(
        rank=rank,
        size=2,
        host="h",
        pid=rank + 1,
        run="r",
        last_s=0.0,
        exit_kind=exit_kind,
        text=text,
        lost=lost,
        script_raised=script_raised,
    )
    made.saved.update({job: part(step) for job, step in saved.items()})
    return made


def ranks(*kinds):
    return [
        record(rank, *(each if isinstance(each, tuple) else (each,)))
        for rank, each in enumerate(kinds)
    ]


GONE = ("reported", "rank 1 is gone: its process 2 on host `h` ended without a word", (1,))
SILENT_HOST = ("reported", "rank 1 is silent for 30 s", (1,))
RAISED = ("failed", "rank 0 failed with ValueError: no such file", (), True)
NOTIFIED = ("aborted", "rank 0 failed with ValueError: no such file, in job 'a', step 3", (), True)
BY_MPI = ("failed", "rank 0 failed with Exception: MPI_ERR_OTHER: known error not in list")

ENDS = {
    "killed rank": (137, ranks(GONE, ""), "lost"),
    "killed rank, by MPICH's code": (9, ranks("", ""), "lost"),
    "lost link": (1, ranks(SILENT_HOST, SILENT_HOST), "lost"),
    "MPI lost the other": (1, ranks(BY_MPI, ""), "lost"),
    "killed before the run": (9, [], "lost"),
    "exception": (1, ranks(RAISED, NOTIFIED), "own"),
    "exception, file of one rank only": (1, [record(1, *NOTIFIED)], "own"),
    "exception while another is ended": (1, ranks(RAISED, ""), "own"),
    "import that fails": (1, [], "own"),
    "sys.exit(3)": (3, ranks("left", "left"), "own"),
    "script that ends early": (
        1,
        ranks("left", ("reported", "rank 0 has not arrived", (0,))),
        "own",
    ),
    "Ctrl-C": (130, ranks("interrupted", "interrupted"), "stopped"),
    "SIGTERM of a batch system": (143, ranks("terminated", "aborted"), "stopped"),
    "end": (0, [], "done"),
}


@pytest.mark.parametrize(("code", "records", "kind"), ENDS.values(), ids=ENDS)
def test_each_way_to_end_has_its_kind(code, records, kind):
    assert judge_end(code, stopped=False, records=records).kind == kind


def test_signal_to_the_launcher_is_never_a_loss():
    assert judge_end(137, stopped=True, records=ranks(GONE, "")).kind == "stopped"


def test_launch_on_a_host_that_is_down_is_a_loss():
    end = judge_end(255, stopped=False, records=[], missing=["b"])
    assert (end.kind, end.reason) == ("lost", "no answer from host `b`")


def test_signal_after_a_loss_does_not_hide_it():
    """When one rank has died, `mpirun` may terminate the others with SIGTERM."""
    assert judge_end(137, stopped=False, records=ranks("terminated", "")).kind == "lost"


@pytest.mark.parametrize("kind", ["done", "stopped", "own"])
def test_only_a_loss_is_started_again(kind):
    decision = decide(
        RunEnd(kind=kind, reason="because"), CheckpointProgress(newest={}), max_restarts=100
    )
    assert (decision.action, decision.reason) == ("end", "not restarted: because")


def after(*runs):
    progress = CheckpointProgress(newest={})
    for records in runs:
        progress = progress.after(records)
    return progress


def test_run_with_a_new_checkpoint_costs_nothing():
    runs = [[record(0, a=step), record(1, a=step)] for step in (10, 20, 30)]
    progress = after(*runs)
    assert decide(LOST, progress, max_restarts=0).action == "restart"
    assert decide(LOST, progress.after(runs[-1]), max_restarts=1).action == "restart"
    ended = decide(LOST, progress.after(runs[-1]).after([]), max_restarts=1)
    assert ended.reason == "not restarted: 2 runs in a row ended without a new checkpoint"


def test_run_without_any_checkpoint_is_counted():
    assert decide(LOST, after([]), max_restarts=0).action == "end"
    decision = decide(LOST, after([]), max_restarts=3)
    assert decision.reason == (
        "continues from the start: there is no checkpoint yet (1 of 3 restarts without a new "
        "checkpoint)"
    )


def test_checkpoint_counts_once_all_ranks_have_it():
    """Otherwise a rank that always dies while it writes would be restarted forever."""
    assert complete_checkpoints([record(0, a=20), record(1, a=10)]) == {"a": part(10)}
    assert complete_checkpoints([record(0, a=20), record(1)]) == {}
    progress = after([record(0, a=10), record(1, a=10)], [record(0, a=20), record(1, a=10)])
    assert progress.idle_runs == 1


def test_reason_names_the_step_of_each_job():
    progress = after([record(0, a=10, b=7), record(1, a=10, b=8)])
    assert str(progress) == "from the checkpoints of job 'a' after step 10, job 'b' after step 7"


def chosen(newest, missing, *, last=("a", "b"), same_ranks=False):
    decision = decide(
        LOST, CheckpointProgress(newest=newest), max_restarts=3, hosts=("a", "b"), missing=missing,
        last=last, same_ranks=same_ranks,
    )  # fmt: skip
    return decision.action, tuple(decision.hosts), decision.reason


def test_remaining_hosts_continue():
    action, hosts, reason = chosen({"x": part(10)}, ["b"])
    assert (action, hosts) == ("restart", ("a",))
    assert "without host `b`: the data is divided among fewer ranks" in reason


@pytest.mark.parametrize(
    ("newest", "missing", "same_ranks", "why"),
    [
        (
            {"x": part(10), "y": part(10, any_ranks=False)},
            ["b"],
            False,
            "job 'y', which needs as many ranks",
        ),
        ({}, ["b"], False, "there is no checkpoint from which fewer ranks could continue"),
        ({"x": part(10)}, ["b"], True, "`--same-ranks` was given"),
        ({"x": part(10)}, ["a", "b"], False, "no host answers"),
    ],
)
def test_else_the_run_waits_for_the_host(newest, missing, same_ranks, why):
    action, hosts, reason = chosen(newest, missing, same_ranks=same_ranks)
    assert (action, hosts) == ("wait", ("a", "b"))
    assert reason.endswith(why) and reason.startswith("waits for host")


def test_host_that_came_back_is_used_again():
    assert chosen({"x": part(10)}, [], last=("a",))[:2] == ("restart", ("a", "b"))


@pytest.mark.parametrize("missing", [[], ["b"]])
def test_state_of_fewer_ranks_stays_with_them(missing):
    """A job with rank-local values resumes on as many ranks as wrote its checkpoint."""
    assert chosen({"x": part(10, any_ranks=False)}, missing, last=("a",))[:2] == ("restart", ("a",))
