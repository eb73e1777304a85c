"""Replicas over real exchanges: diverged ranks are named, unless their strategy allows it."""

import pytest

pytestmark = pytest.mark.integration


CASES = [
    "plain_jit_is_warned_of_twice",
    "a_state_that_was_handed_over_and_donated_is_no_fault",
    "a_rate_of_each_rank_is_found_at_the_end",
    "a_rate_of_each_rank_is_raised_and_another_job_untouched",
    "what_is_not_due_any_more_is_raised_at_the_end",
    "exceptions_are_left_out",
    "strategies_raise_no_false_alarm",
    "statistics_of_a_rank_are_left_out_of_nnx_too",
    "parts_of_a_model_raise_no_false_alarm",
    "jobs_that_are_silent",
    "checkpoints_compare_and_a_restart_resumes",
    "comparisons_change_no_bit",
    "ranks_must_want_the_same_checks",
]
LONG = ["every_strategy_raises_no_false_alarm"]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, CASES, id="2"),
        *(
            pytest.param(n, [*CASES, *LONG], id=f"all on {n}", marks=pytest.mark.exhaustive)
            for n in (2, 3)
        ),
    ],
)
def test_replicas_over_mpi(mpirun, tmp_path, ranks, cases, quick_compiler):
    env = quick_compiler if ranks == 2 else {}
    finished = mpirun(
        ranks, "replicas_table.py", str(tmp_path), *cases, timeout=900, env=env
    ).check()
    passed = [line for line in finished.stdout.splitlines() if line.startswith("passed")]
    assert sorted(passed) == sorted(f"passed {case}" for case in cases)
