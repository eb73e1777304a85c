"""Tests the decisions at start-up, without MPI: launcher variables, thread pool, device, watchdog
report.
"""

import re

import pytest

from jaxcross.errors import ExchangeError
from jaxcross.health.activity import Activity, RankStatus, late_ranks, stall_report
from jaxcross.world import start, xla_pool
from jaxcross.world.launch_env import LaunchedRanks, check_launch, read_launch, vendor_of
from jaxcross.world.start import device_of, initialize


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PMI_SIZE": "2"}, LaunchedRanks(size=2, variable="PMI_SIZE")),
        (
            {"OMPI_COMM_WORLD_SIZE": "8", "PMI_SIZE": "1"},
            LaunchedRanks(size=8, variable="OMPI_COMM_WORLD_SIZE"),
        ),
        ({"SLURM_STEP_NUM_TASKS": "4"}, LaunchedRanks(size=4, variable="SLURM_STEP_NUM_TASKS")),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "1"},
            LaunchedRanks(size=1, variable="PMI_SIZE"),
        ),
        ({"SLURM_NTASKS": "4"}, None),
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_launcher_variables(environ, expected):
    assert read_launch(environ) == expected


def test_singletons_are_refused_with_the_remedy():
    check_launch(None, world_size=1, vendor="mpich")
    check_launch(LaunchedRanks(size=2, variable="PMI_SIZE"), world_size=2, vendor="mpich")
    with pytest.raises(
        ExchangeError, match=r"^The launcher started 2 ranks \(`PMI_SIZE=2`\), but MPI sees"
    ):
        check_launch(LaunchedRanks(size=2, variable="PMI_SIZE"), world_size=1, vendor="openmpi")
    with pytest.raises(ExchangeError, match="srun --mpi=pmix"):
        check_launch(
            LaunchedRanks(size=2, variable="SLURM_STEP_NUM_TASKS"), world_size=1, vendor="mpich"
        )


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("MPICH Version:      5.0.2\n", "mpich"),
        ("Open MPI v5.0.8, package: Open MPI", "openmpi"),
        ("Intel(R) MPI Library 2021.9", "intel"),
        ("", "unknown"),
    ],
)
def test_vendors(text, vendor):
    assert vendor_of(text) == vendor


def test_pool_is_never_starved():
    for cores in range(1, 65):
        assert xla_pool.needed(cores) >= max(cores, 2)


def plan(environ=None, *, started=False, cores=2):
    return xla_pool.plan_pool(4, started=started, core_count=cores, environ=environ or {})


def test_pool_settings():
    assert plan() == {"PJRT_NPROC": "4"}
    assert plan({"NPROC": "6"}) == {}
    assert plan({"NPROC": "1"}) == {"NPROC": "2"}, (
        "a launcher's or a user's number is raised, never lowered"
    )
    assert plan(started=True) == {}
    assert plan({"PJRT_NPROC": "2"}, started=True, cores=1) == {}
    assert xla_pool.effective({"PJRT_NPROC": "7"}, 2) == 7
    assert xla_pool.effective({}, 2) == 2


@pytest.mark.parametrize(("environ", "cores"), [({}, 1), ({"NPROC": "1"}, 8)])
def test_pool_that_cannot_be_made_large_enough(environ, cores):
    with pytest.raises(
        ExchangeError, match=r"^JAX started before `jaxcross.initialize\(\)`, with a CPU pool of 1"
    ):
        plan(environ, started=True, cores=cores)


FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("settings", "local_rank", "accelerators", "expected"),
    [
        ([{}] * 2, 1, 4, 1),
        ([{}] * 4, 3, 2, 1),
        ([{}], 0, 8, None),
        ([{}] * 2, 1, 1, None),
        ([{}] * 2, 1, 0, None),
        ([{"CUDA_VISIBLE_DEVICES": "0,1,"}] * 4, 2, 8, 0),
        ([FOUR] * 4, 2, 8, 2),  # like SLURM without --gpus-per-task
        ([FOUR], 0, 8, None),
        ([{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}], 1, 8, None),
        ([{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}], 1, 8, None),
        ([FOUR | {"JAX_CUDA_VISIBLE_DEVICES": "0"}] * 4, 2, 8, None),
        ([{"ROCR_VISIBLE_DEVICES": "0,1"}] * 2, 1, 2, None),
    ],
)
def test_a_rank_takes_the_device_of_its_local_rank(settings, local_rank, accelerators, expected):
    assert device_of(settings, local_rank=local_rank, accelerators=accelerators) == expected


@pytest.mark.parametrize(
    ("accelerators", "said"), [(0, ""), (1, "1 accelerator."), (2, "2 accelerators."), (4, "")]
)
def test_ranks_sharing_an_accelerator_are_warned_once(caplog, monkeypatch, accelerators, said):
    # So that this process keeps its devices.
    monkeypatch.setattr(start.compat, "backends_started", lambda: True)
    for local_rank in range(4):
        start._take_device([{}] * 4, local_rank=local_rank, accelerators=accelerators)
    warning = (
        f"4 ranks of this node share {said} Start one rank per accelerator, unless this is "
        "intended."
    )
    assert [record.getMessage() for record in caplog.records] == ([warning] if said else [])


WAIT = Activity(job="a", step=3, segment=1, what="psum", number=7, since_s=0.0)
OTHER = Activity(job="b", step=1, segment=0, what="vote", number=6, since_s=0.0)


def test_the_report_names_late_and_silent_ranks():
    answers = {
        1: RankStatus(entered=7, waits=(WAIT,)),
        2: RankStatus(entered=6, waits=(OTHER,)),
        3: RankStatus(entered=5, waits=()),
        4: None,
    }
    assert late_ranks(WAIT, answers) == [2, 3]
    text = stall_report(0, WAIT, 300.0, answers)
    assert text.startswith(
        "jaxcross: rank 0 has waited 300 s in job 'a', step 3, segment 1 (psum)."
    )
    assert (
        "rank 2 has not arrived: it is in job 'b', step 1, segment 0 (vote), after 6 of 7 "
        "exchanges." in text
    )
    assert "rank 3 has not arrived: it is in no exchange, after 5 of 7 exchanges." in text
    assert "rank 4 does not answer: it has ended, or its interpreter is blocked." in text
    assert "rank 1" not in text


def test_the_report_when_everybody_is_there():
    text = stall_report(0, WAIT, 1.0, {1: RankStatus(entered=7, waits=(WAIT,))})
    assert "All ranks have arrived: MPI or the network is stuck" in text


def test_the_report_of_a_wait_that_says_for_whom_it_is():
    pull = Activity(job="a", step=3, segment=-1, what="parameter server", number=0, since_s=0.0)
    answers = {1: RankStatus(entered=7, waits=(pull,)), 2: RankStatus(entered=9, waits=()), 3: None}
    awaited = {2: "its worker is at step 1", 3: "its worker is at step 0"}
    assert late_ranks(pull, answers, awaited) == [2]
    text = stall_report(0, pull, 300.0, answers, awaited)
    assert "rank 2 has not arrived: its worker is at step 1; it is in no exchange." in text
    assert "rank 3 does not answer: it has ended, or its interpreter is blocked." in text
    assert "rank 1" not in text and "different things" not in text


def test_report_if_ranks_wait_for_different_things():
    agreement = Activity(job="a", step=3, segment=-1, what="agreement", number=7, since_s=0.0)
    answers = {
        1: RankStatus(entered=7, waits=(agreement,)),
        2: RankStatus(entered=7, waits=(WAIT,)),
    }
    text = stall_report(0, WAIT, 300.0, answers)
    assert text.startswith(
        "jaxcross: rank 0 has waited 300 s in job 'a', step 3, segment 1 (psum).\n"
        "  rank 1 waits in job 'a', step 3 (agreement).\n"
        "  The ranks wait for different things. Did shapes or types of a step's arguments change "
        "on some ranks only"
    )
    assert "All ranks have arrived" not in text
    text = stall_report(
        1,
        agreement,
        300.0,
        {0: RankStatus(entered=7, waits=(WAIT,)), 2: RankStatus(entered=7, waits=(WAIT,))},
    )
    assert (
        "  rank 0 waits in job 'a', step 3, segment 1 (psum).\n  rank 2 waits in job 'a', step 3, "
        "seg" in text
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stall_timeout_s": "60"},
            "`stall_timeout_s` must be a number of seconds, more than 0, got '60'.",
        ),
        (
            {"stall_timeout_s": 0},
            "`stall_timeout_s` must be a number of seconds, more than 0, got 0.",
        ),
        (
            {"stall_timeout_s": float("nan")},
            "`stall_timeout_s` must be a number of seconds, more than 0, got nan.",
        ),
        (
            {"heartbeat_timeout_s": -1},
            "`heartbeat_timeout_s` must be a number of seconds, 0 or more, 0 for never, got -1.",
        ),
        (
            {"heartbeat_timeout_s": None},
            "`heartbeat_timeout_s` must be a number of seconds, 0 or more, 0 for never, got None.",
        ),
    ],
)
def test_arguments_are_checked_before_mpi_starts(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        initialize(**options)
