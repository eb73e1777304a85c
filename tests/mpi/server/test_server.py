"""Parameter servers over MPI. One `mpirun` per world size runs the whole table."""

import pytest

CASES = [
    "staleness_0_is_synchronous",
    "the_bound_holds",
    "asynchronous_training_converges",
    "a_slow_worker_holds_others_up_at_the_bound_only",
    "without_a_bound_others_run_ahead",
    "unlike_numbers_of_steps",
    "large_messages",
    "what_is_not_finite_shows_on_every_rank",
    "failure_of_a_worker",
    "failure_of_a_server",
    "unlike_rules",
    "two_jobs_in_crossover_equal_jobs_alone",
    "beside_an_ordinary_job",
    "failure_of_a_job_beside_another",
]

STUCK = """
import threading
import jax.numpy as jnp, optax, jaxcross
from jaxcross import ParameterServer
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12)
with ParameterServer(jnp.ones(4), optax.sgd(0.1), staleness=1) as server:
    if world.rank == 1:
        {late}
    for _ in range({steps}):
        server.push_pull(jnp.ones(4))
"""


PLACED = """
import jax, jax.numpy as jnp, optax, jaxcross
from jax.sharding import NamedSharding, PartitionSpec
jaxcross.initialize()
both, second = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x")), jax.devices()[1]
params = {"w": jax.device_put(jnp.ones(4), both), "b": jax.device_put(jnp.ones(3), second)}
with jaxcross.ParameterServer(params, optax.adam(0.1), staleness=0) as server:
    for _ in range(2):
        new = server.push_pull(server.params)
for tree in (new, server.params):
    assert tree["w"].sharding == both and tree["b"].devices() == {second}
print(float(new["w"].sum()))
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3, 4, 5, 8))]
)
def test_servers_over_mpi(mpirun, ranks, quick_compiler):
    finished = mpirun(ranks, "server_table.py", timeout=900, env=quick_compiler).check()
    assert [line for line in finished.stdout.splitlines() if line.startswith("passed")] == [
        f"passed {c}" for c in CASES
    ]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("steps", "what"), [(9, "step 2 (parameter server)"), (1, "(end of all workers)")]
)
def test_watchdog_names_the_worker_others_wait_for(mpirun, steps, what):
    done = mpirun(2, STUCK.format(late="threading.Event().wait()", steps=steps))
    assert done.returncode != 0
    assert "jaxcross: rank 0 has waited" in done.stderr and what in done.stderr
    assert "rank 1 has not arrived: its worker is at step 0; it is in no exchange." in done.stderr
    assert "jaxcross: stacks of rank 1:" in done.stdout + done.stderr


@pytest.mark.integration
def test_parameters_stay_on_their_devices(mpirun):
    done = mpirun(2, PLACED, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}).check()
    assert [round(float(line), 1) for line in done.stdout.split()] == [3.2, 3.2]


@pytest.mark.integration
def test_uncaught_exception_ends_all_ranks(mpirun):
    done = mpirun(2, STUCK.format(late="raise ValueError('the worker failed')", steps=9))
    assert done.returncode != 0
    assert "ValueError: the worker failed" in done.stderr
