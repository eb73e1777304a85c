"""The memory that jobs reserve alongside each other, and the text that rejects a job.

`tests/mpi/cases/memory_table.py` tests the rest.
"""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross.errors import JobError
from jaxcross.jobs.admission import MemoryAdmission, Need, needed_by
from jaxcross.jobs.memory import PROCESS_BYTES, JobMemory
from jaxcross.jobs.runner import Runner
from tests.support.fakes import FakeControl

WIDTH, RANK = 1024, 2
BASE_BYTES = 4 * WIDTH * WIDTH
ADAPTER_BYTES = 2 * 4 * RANK * WIDTH


@jaxcross.crossover(axes="batch", donate_argnums=0)
def step(adapter: Any, base: Any, batch: Any) -> Any:
    def loss(adapter: Any) -> Any:
        return jnp.mean((batch @ base["w"] + (batch @ adapter["down"]) @ adapter["up"]) ** 2)

    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(adapter), "batch")
    return jax.tree.map(lambda w, g: w - 0.1 * g, adapter, grads), value


def train(job: Any, base: Any) -> Any:
    adapter = job.restore({"down": jnp.ones((WIDTH, RANK)), "up": jnp.zeros((RANK, WIDTH))})
    for batch in job.batches(np.ones((2, 1, WIDTH), np.float32)):
        adapter, _ = step(adapter, base, batch)
    return adapter


def make_base() -> dict[str, jax.Array]:
    return {"w": jnp.ones((WIDTH, WIDTH))}


def booked(bases: list[Any]) -> int:
    """Returns the bytes that adapters of these base models reserve together."""
    runner = Runner(jaxcross.initialize(), memory="1TB")
    for n, base in enumerate(bases):
        runner.add(f"job{n}", train, {"base": base})
    runner.run()
    return runner.booked_bytes - PROCESS_BYTES


def test_a_base_model_that_jobs_share_is_booked_once() -> None:
    base = make_base()
    for jobs in (1, 2, 4, 8):
        # Different objects with the same buffer.
        others = [{"w": jax.device_put(base["w"], jax.local_devices()[0])} for _ in range(jobs - 1)]
        assert all(other["w"] is not base["w"] for other in others)
        assert BASE_BYTES < booked([base, *others]) <= 1.1 * (BASE_BYTES + jobs * ADAPTER_BYTES)
    assert booked([make_base(), make_base()]) > 2 * BASE_BYTES


def test_a_limit_refuses_only_jobs_that_bring_a_base_of_their_own() -> None:
    """Jobs that join later count like those present at the start."""
    base, late = make_base(), []
    runner = Runner(jaxcross.initialize(), memory=PROCESS_BYTES + int(1.9 * BASE_BYTES))

    def parent(job: Any) -> Any:
        # The job reserves its memory at its first step, so it trains before it adds the others.
        state = train(job, base)
        late.append(runner.add("shares", train, {"base": base}))
        late.append(runner.add("brings its own", train, {"base": make_base()}))
        while not all(each.done.is_set() for each in late):
            job.run_on_all_ranks("waits", lambda _: None)
        return state

    runner.add("first", parent)
    with pytest.raises(
        JobError, match="`brings its own` failed .* does not fit into the memory of rank 0"
    ):
        runner.run()
    assert [job.status for job in late] == ["ended", "failed"]


def test_arrays_that_jobs_replace_are_booked_for_each_of_them() -> None:
    """Jobs that don't donate may start from the same array, but each has its own after a step.

    The same goes for batches.
    """

    @jaxcross.crossover(axes="batch")
    def without_donation(weights: Any, batch: Any) -> Any:
        return weights - 0.1 * jax.lax.pmean(jnp.mean(batch) * weights, "batch")

    def loop(job: Any, weights: Any, batches: Any) -> Any:
        for batch in job.batches(batches):
            weights = without_donation(weights, batch)
        return weights

    def booked_with(weights: list[Any], batches: list[Any]) -> int:
        runner = Runner(jaxcross.initialize(), memory="1TB")
        for n, (own, data) in enumerate(zip(weights, batches, strict=True)):
            runner.add(f"job{n}", loop, {"weights": own, "batches": data})
        runner.run()
        return runner.booked_bytes

    weights, batches = (
        [jnp.ones(1000), jnp.ones(1000)],
        [[jnp.ones((4, 500)), jnp.ones((4, 500))] for _ in "ab"],
    )
    assert booked_with([weights[0]] * 2, [batches[0]] * 2) == booked_with(weights, batches)


def test_a_buffer_that_a_step_gets_twice_is_booked_once() -> None:
    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def tied(scale: Any, encoder: Any, decoder: Any) -> Any:
        return scale - jax.lax.pmean(jnp.sum(encoder * decoder), "batch")

    def booked_with(encoder: Any, decoder: Any) -> int:
        runner = Runner(jaxcross.initialize(), memory="1TB")
        runner.add("job", lambda job: tied(job.restore(jnp.float32(1.0)), encoder, decoder))
        runner.run()
        return runner.booked_bytes

    one, other = jnp.ones(1000), jnp.ones(1000)
    assert booked_with(one, other) - booked_with(one, one) == one.nbytes


def test_array_of_one_program_counts_with_the_other_programs_of_its_job() -> None:
    array = jnp.ones(25)  # 100 bytes
    reads = Need.of(JobMemory(peak_bytes=130, boundary_bytes=120), [(array, 100)])
    other = Need.of(JobMemory(peak_bytes=80, boundary_bytes=70), [])
    assert needed_by([[reads, other]]) == 130
    # The array, what each of the two jobs keeps for itself, and what the largest segment adds.
    assert needed_by([[reads, other], [reads]]) == 100 + 70 + 20 + 10


def test_an_address_is_not_compared_once_its_array_is_gone() -> None:
    memory = JobMemory(peak_bytes=100, boundary_bytes=100)
    array = jnp.ones(25)
    bookings = [[Need.of(memory, [(array, 100)])] for _ in range(2)]
    assert needed_by(bookings) == 100
    del array
    gc.collect()
    assert needed_by(bookings) == 200


def test_admission_gives_back_an_array_with_the_last_job_that_reads_it() -> None:
    (control,) = FakeControl.group(1)
    array, admission = jnp.ones(25), MemoryAdmission(150)
    need = Need.of(JobMemory(peak_bytes=110, boundary_bytes=110), [(array, 100)])
    own = Need.of(JobMemory(peak_bytes=60, boundary_bytes=60), [])
    for job in ("a", "b", "c"):
        admission.admit(control, job, need)
    assert admission.most_booked_bytes == 130
    admission.give_back("a", lambda: None)
    admission.give_back("b", lambda: array)
    with pytest.raises(JobError, match="20 B are missing"):
        admission.admit(control, "d", own)
    admission.give_back("c", lambda: None)
    with pytest.raises(JobError, match="10 B are missing.* have ended hold 100 B"):
        admission.admit(control, "d", own)
    admission.give_back("b", lambda: None)
    admission.admit(control, "d", own)


def test_need_of_a_job_alone_is_stated_once() -> None:
    booking = [Need.of(JobMemory(peak_bytes=300), [])]
    text = MemoryAdmission(100)._refusal("a", booking, 0, "make the batch smaller, or ")
    assert text == (
        "it does not fit into the memory of rank 0: 200 B are missing. It needs 300 B, and the "
        "limit is 100 B. To make it fit, make the batch smaller, or give `Runner(memory=...)` if a "
        "rank may use more."
    )
