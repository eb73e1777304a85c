"""The parts of a parameter server: layout, shard, and which ranks a lane waits for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.server.clocks import Clocks
from jaxcross.server.lane import Lane
from jaxcross.server.message_layout import MessageLayout
from jaxcross.server.served_part import ServedPart
from tests.support.server_jobs import parameters


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_layout_puts_together_what_it_took_apart(ranks):
    params = parameters() | {
        "h": jnp.arange(11, dtype=jnp.bfloat16),
        "c": jnp.ones((2, 2), jnp.complex64),
    }
    layout = MessageLayout(params, ranks)
    leaves = jax.tree.leaves(params)
    messages = layout.parts(leaves)
    assert {message.nbytes for message in messages} == {layout.nbytes}
    for got, want in zip(layout.join(messages), leaves, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    for message in messages:
        np.testing.assert_array_equal(layout.message(layout.views(message)), message)


def test_16_bit_gradients_are_added_in_32():
    params = {"h": jnp.zeros(2, jnp.bfloat16)}
    layout = MessageLayout(params, 1)
    shard = ServedPart(optax.sgd(1.0), layout, layout.parts([params["h"]])[0], ranks=3)
    grads = [jnp.asarray([x, 1], jnp.bfloat16) for x in (256, 1, 1)]
    shard.apply({rank: layout.parts([g])[0] for rank, g in enumerate(grads)})
    (got,) = layout.join([shard.message()])
    assert got.astype(np.float32).tolist() == [-86, -1]


def test_the_ranks_that_are_waited_for_have_names():
    lane = object.__new__(Lane)
    lane._clocks, lane._answers = Clocks(3, 1), {0: None, 2: None}
    lane._mailbox = type("Box", (), {"rank": 0, "size": 3})()
    assert lane.waiting_for() == {1: "its server has not answered"}
    for _ in range(2):
        lane._clocks.push(0)
    lane._clocks.push(2)
    assert lane.waiting_for() == {1: "its worker is at step 0"}
