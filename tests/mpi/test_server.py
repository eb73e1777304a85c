"""Parameter servers over MPI: one `mpirun` a world size runs the whole table."""

import pytest

CASES = [
    "staleness_0_is_synchronous", "the_bound_holds", "asynchronous_training_converges",
    "a_slow_worker_holds_others_up_at_the_bound_only", "unlike_numbers_of_steps", "large_messages",
    "failure_of_a_worker", "failure_of_a_server", "unlike_rules", "two_jobs_in_crossover_equal_jobs_alone",
    "beside_an_ordinary_job", "failure_of_a_job_beside_another",
]  # fmt: skip

STUCK = """
import threading
import jax.numpy as jnp, optax, jaxcross
world = jaxcross.initialize(watchdog_s=2)
with jaxcross.ParameterServer(jnp.ones(4), optax.sgd(0.1), staleness=1) as server:
    if world.rank == 1:
        {late}
    for _ in range({steps}):
        server.push_pull(jnp.ones(4))
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_servers_over_mpi(mpirun, ranks):
    finished = mpirun(ranks, "server_table.py", timeout=240).check()
    assert [line for line in finished.stdout.splitlines() if line.startswith("passed")] == [
        f"passed {c}" for c in CASES
    ]


@pytest.mark.parametrize(("steps", "what"), [(9, "step 2, segment -1 (parameter server)"), (1, "(end of all workers)")])
def test_the_watchdog_names_the_worker_that_is_waited_for(mpirun, steps, what):
    done = mpirun(2, STUCK.format(late="threading.Event().wait()", steps=steps), timeout=60)
    assert done.returncode != 0
    assert "jaxcross: rank 0 has waited" in done.stderr and what in done.stderr
    assert "rank 1 has not arrived: its worker is at step 0; it is in no exchange." in done.stderr
    assert "jaxcross: stacks of rank 1:" in done.stdout + done.stderr


def test_an_exception_that_nobody_catches_ends_all_ranks(mpirun):
    done = mpirun(2, STUCK.format(late="raise ValueError('boom')", steps=9), timeout=60)
    assert done.returncode != 0
    assert "ValueError: boom" in done.stderr
