"""The runner over real exchanges. One `mpirun` per world size runs the whole table."""

import pytest

CASES = [
    "crossover_equals_alone",
    "jobs_from_one_state",
    "unlike_lengths_of_data",
    "evaluation_beside_training",
    "failure_of_one_job",
    "failure_of_a_job_that_saves_nothing",
    "the_cut_is_searched_for",
    "a_trial_that_fails_on_one_rank",
    "unlike_exchanges",
    "unlike_exchanges_alone",
    "unlike_shapes",
    "failure_to_compile_on_one_rank",
    "unlike_numbers_of_steps",
    "data_that_raises_on_one_rank",
    "stray_threads",
    "interrupt",
    "emulated_link",
    "compression_is_chosen_from_a_report",
    "a_branch_at_different_calls",
]


@pytest.mark.integration
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3))]
)
def test_jobs_over_mpi(mpirun, ranks):
    finished = mpirun(ranks, "runner_table.py", timeout=900).check()
    assert [line for line in finished.stdout.splitlines() if line.startswith("passed")] == [
        f"passed {c}" for c in CASES
    ]
