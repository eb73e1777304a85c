"""Real runs whose threads are delayed at random.

All comparisons of the tables are bit for bit and must still pass.
"""

import pytest

# Cases that delays must not reorder: jobs under every policy and cut, data that ends early, an
# interrupt.
DISORDERED = ["crossover_equals_alone", "data_that_raises_on_one_rank", "interrupt"]


def passed(finished):
    return [
        line.removeprefix("passed ")
        for line in finished.stdout.splitlines()
        if line.startswith("passed ")
    ]


@pytest.mark.integration
def test_jobs_whose_threads_are_late(mpirun, quick_compiler):
    finished = mpirun(
        2,
        "runner_table.py",
        *DISORDERED,
        timeout=900,
        env={"JAXCROSS_CHAOS": "1", **quick_compiler},
    ).check()
    assert passed(finished) == DISORDERED


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("table", ["runner_table.py", "membership_table.py"])
def test_whole_tables_whose_threads_are_late(mpirun, table, ranks, seed):
    finished = mpirun(ranks, table, timeout=900, env={"JAXCROSS_CHAOS": str(seed)}).check()
    assert len(passed(finished)) >= 8
