"""Which state a job ends up with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.jobs import job_state
from jaxcross.jobs.job_state import JobState, holds_state, own_copy, select_state
from tests.support.interleavings import interrupted


def state(value):
    return {"w": jnp.full(2, value), "b": jnp.float32(value)}


def has_arrays_of(latest, tree):
    """Returns whether the latest state is like `tree` and has the same array objects."""
    mine, own = jax.tree.flatten(latest.state), jax.tree.flatten(tree)
    return mine[1] == own[1] and all(a is b for a, b in zip(mine[0], own[0], strict=True))


def delete(tree):
    for leaf in tree.values():
        leaf.delete()


def test_selects_the_result_with_the_state_structure():
    one, loss = state(1.0), {"loss": jnp.float32(0)}
    assert select_state(state(0.0), (one, loss)) is one
    assert select_state(state(0.0), (loss, one)) is one
    assert select_state(state(0.0), one) is one
    pair = (one, loss)
    assert select_state((state(0.0), loss), pair) is pair


def test_part_must_match_state_shapes_and_types():
    """A loss is a leaf, and so is a state that consists of a single array."""
    loss, w = jnp.float32(0), jnp.ones(4)
    assert select_state(jnp.zeros(4), (loss, w)) is w
    assert select_state(jnp.zeros(4), (jnp.zeros(4, int), w)) is w
    assert select_state({"n": 3}, (loss, {"n": jnp.int32(4)})) == {"n": 4}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (jnp.zeros(4), (jnp.ones(4), jnp.ones(4))),
        (jnp.zeros(4), (jnp.ones(5), jnp.float32(0))),
        ("text", (jnp.ones(4), jnp.float32(0))),
    ],
)
def test_ambiguous_or_missing_part_selects_all_results(given, parts):
    """All results are selected if several parts match the state, or none does."""
    assert select_state(given, parts) is parts


@pytest.mark.parametrize("given", [None, [1, 2, 3]])
def test_all_results_if_no_part_has_the_structure(given):
    results = (state(1.0), None)
    assert select_state(given, results) is results


def test_results_later_than_the_state_take_its_place():
    latest, one = JobState(), state(1.0)
    latest.set(state(0.0), 0)
    latest.note_results((one, None), 1)
    latest.adopt_results()
    assert has_arrays_of(latest, one)


def test_a_state_given_after_the_last_step_stays():
    latest, mine = JobState(), state(5.0)
    latest.note_results((state(1.0), None), 1)
    latest.set(mine, 1)
    latest.adopt_results()
    assert latest.state is mine


def test_donated_state_is_replaced_initial_one_stays():
    """A donated state is replaced, and the initial one stays if there were no steps."""
    latest, one = JobState(), state(1.0)
    latest.adopt_results()
    assert latest.state is None
    first = state(0.0)
    latest.set(first, 1)
    latest.note_results((one, None), 1)
    delete(first)
    latest.adopt_results()
    assert has_arrays_of(latest, one)


def test_other_functions_count_only_if_given_the_state():
    """Results of other functions count only if the functions received the state."""
    latest, one, two = JobState(), state(1.0), state(2.0)
    latest.set(state(0.0), 0)
    latest.note_results((one, None), 1)
    latest.note_results(state(7.0), 1)  # e.g. gradient statistics
    latest.adopt_results()
    assert has_arrays_of(latest, one)
    latest.note_results((one, None), 2)
    delete(one)
    latest.note_results((two, None), 2)
    latest.adopt_results()
    assert has_arrays_of(latest, two)


def test_lost_results_replace_nothing():
    latest, mine, one = JobState(), state(0.0), state(1.0)
    latest.set(mine, 0)
    latest.note_results(one, 1)
    delete(one)
    latest.adopt_results()
    assert latest.state is mine


def test_copy_shares_no_arrays_and_preserves_leaves():
    mine = {"w": jnp.ones(2), "n": 3, "weak": jnp.asarray(1.0), "host": np.ones(2)}
    copy = own_copy(mine)
    mine["w"].delete()
    mine["host"][:] = 2
    assert copy["w"].tolist() == copy["host"].tolist() == [1.0, 1.0]
    assert isinstance(copy["host"], np.ndarray)
    assert copy["n"] == 3
    assert copy["weak"].aval == mine["weak"].aval


@pytest.mark.parametrize("donates", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_results_changed_before_next_step_are_a_guess(changes, donates):
    latest, one, two = JobState(), state(1.0), state(2.0)
    latest.set(state(0.0), 0)
    latest.note_arguments([jnp.ones(3), *latest.state.values()])
    latest.note_results((one, jnp.float32(0)), 1)
    latest.note_arguments(
        [jnp.ones(3), *({"w": one["w"] + 1, "b": one["b"]} if changes else one).values()]
    )
    if donates:
        delete(one)
    latest.note_results((two, jnp.float32(0)), 2)
    latest.adopt_results()
    assert has_arrays_of(latest, two)
    assert latest.is_guess == changes


def test_results_written_into_before_next_step_are_a_guess():
    """E.g. if the function copies results to another dict, only what the step returned is known."""
    latest, one, two = JobState(), state(1.0), state(2.0)
    latest.set(state(0.0), 0)
    latest.note_results((one, jnp.float32(0)), 1)
    one["w"] = one["w"] + 1
    latest.note_arguments([jnp.ones(3), *one.values()])
    latest.note_results((two, jnp.float32(0)), 2)
    returned = dict(two)
    two["w"] = two["w"] + 1
    latest.adopt_results()
    assert has_arrays_of(latest, returned)
    assert latest.is_guess


def test_results_with_a_reported_change_are_no_guess():
    """Results whose change was reported by the function aren't a guess."""
    latest = JobState()
    latest.set(state(0.0), 0)
    for step in (1, 2):
        latest.note_arguments(list(latest.state.values()))
        latest.note_results((state(step), None), step)
        latest.set(state(7.0 + step), step)
    latest.adopt_results()
    assert not latest.is_guess
    assert latest.state["b"] == 9


@pytest.mark.parametrize("later", [lambda w: w, lambda w: (w, w["w"].sum(), 1), lambda w: w["w"]])
def test_results_of_another_make_are_looked_at_anew(later):
    """A static argument may change a step's results, which another function may receive."""
    latest, state = JobState(), {"w": jnp.ones(3)}
    latest.set(state, 0)
    for step, results in enumerate(
        ((state, jnp.float32(1)), later(state), (state, jnp.float32(1))), 1
    ):
        latest.note_arguments(jax.tree.leaves(state))
        latest.note_results(results, step)
    latest.note_arguments(jax.tree.leaves(state))
    latest.adopt_results()
    assert not latest.is_guess


def test_state_in_parts_is_not_mistaken_for_changed():
    latest, state = JobState(), ({"w": jnp.ones(3)}, {"m": jnp.ones(3)})
    latest.set(state, 0)
    for step in (1, 2):
        latest.note_arguments(jax.tree.leaves(state))
        latest.note_results((*state, jnp.float32(1)), step)
    latest.adopt_results()
    assert not latest.is_guess


def test_what_holds_a_state():
    state = ({"w": jnp.ones(3)}, {"m": jnp.ones(3)})
    assert holds_state(state, state) and holds_state(state, (*state, jnp.float32(1)))
    assert not holds_state(state, (jnp.ones(3), jnp.float32(1)))


def test_another_thread_may_read_while_the_job_ends():
    """Another job's lane reads the state while the job's thread sets it and drops results."""
    inside, at = True, 0
    while inside:
        at += 1
        latest = JobState()
        latest.set({"w": 0, "b": 0}, 0)
        latest.note_results(({"w": 1, "b": 1}, 2), 1)

        def end(latest=latest):
            latest.adopt_results()
            latest.release()

        (state, step), inside = interrupted(latest.newest, at, end, module=job_state)
        assert (state, step) == ({"w": 1, "b": 1}, 1), f"before bytecode {at}"
    assert at > 20
