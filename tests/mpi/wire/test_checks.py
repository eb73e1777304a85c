"""What the table of collectives doesn't cover: order, splitting, bytes, 16-bit floats, loops, and
mpi4jax's own calls.
"""

import json

import pytest

from tests.support.optional import HAS_MPI4JAX

NAMES = [
    "a_shard_map_body_runs_on_each_rank",
    "an_exchange_that_is_no_part_of_a_loop_is_refused",
    "bytes_follow_the_formula",
    "compiled_many_times_and_called_again",
    "eight_bit_floats",
    "extremes_of_a_type_without_a_sign",
    "extremes_of_nan_and_signed_zero",
    "groups_of_ranks",
    "large_arrays_are_not_copied",
    "long_messages_are_split_without_being_made",
    "loops_run_their_exchanges",
    "mean_halves_the_bytes",
    "mpi4jax_equations_are_exchanges_too",
    "nothing_to_return",
    "order_is_the_equations_order",
    "ordered_callbacks_in_a_loop_keep_their_order",
    "sixteen_bit_sums_travel_together",
    "sixteen_bits_round_once",
    "small_sums_travel_together",
    "sums_travel_together_whatever_is_computed_between_them",
]


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4))]
)
def test_wire(mpirun, ranks, quick_compiler):
    done = mpirun(ranks, "wire_checks.py", timeout=900, env=quick_compiler).check()
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if not HAS_MPI4JAX:
        assert "No module named 'mpi4jax'" in found["mpi4jax_equations_are_exchanges_too"]
        found["mpi4jax_equations_are_exchanges_too"] = "ok"
    assert {name: outcome for name, outcome in found.items() if outcome != "ok"} == {}
    assert sorted(found) == NAMES
