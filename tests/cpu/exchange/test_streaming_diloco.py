"""Streaming DiLoCo against its algorithm in NumPy: schedule, messages, and what it rejects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import finish
from jaxcross.exchange.diloco import diloco
from jaxcross.exchange.streaming_diloco import Clock, FragmentTurns, streaming_diloco
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide
from jaxcross.wire.bytes import wire_bytes
from tests.support.decentralised_training import RANKS, assert_close, distance, grads, starts, train

pytestmark = pytest.mark.usefixtures("compiled_quickly")
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
INNER = optax.sgd(0.1)
RATE = 0.05


def vectors(tree):
    """Returns all leaves of each rank as one vector, in tree order."""
    return np.concatenate([x.reshape(RANKS, -1) for x in jax.tree.leaves(tree)], axis=1)


def by_hand(every, fragments, delay, mix, steps):
    """Returns the parameters after each step, as vectors of all ranks, and the anchor."""
    x = starts(RANKS)
    anchor = vectors(x)
    trace_ = np.zeros_like(anchor)
    parts = np.array_split(np.arange(anchor.shape[1]), fragments)
    assert len({len(p) for p in parts}) == 1
    period, sent, history = every // fragments, {}, []
    for t in range(steps):
        x = {k: v - RATE * g for (k, v), g in zip(x.items(), grads(x, t).values(), strict=True)}
        flat = vectors(x)

        def apply(f, gradient, flat=flat):
            at = parts[f]
            trace_[:, at] = 0.9 * trace_[:, at] + gradient
            anchor[:, at] -= 0.7 * (0.9 * trace_[:, at] + gradient)
            flat[:, at] = mix * flat[:, at] + (1 - mix) * anchor[:, at]

        if t - delay in sent and delay:
            apply(*sent[t - delay])
        if (t + 1) % period == 0:
            f = (t // period) % fragments
            gradient = (anchor[:, parts[f]] - flat[:, parts[f]]).mean(0, keepdims=True)
            if delay:
                sent[t] = f, gradient
            else:
                apply(f, gradient)
        sizes = [v[0].size for v in jax.tree.leaves(x)]
        split = np.split(flat, np.cumsum(sizes)[:-1], axis=1)
        leaves = [s.reshape(v.shape) for s, v in zip(split, jax.tree.leaves(x), strict=True)]
        x = jax.tree.unflatten(jax.tree.structure(x), leaves)
        history.append(x)
    return history, anchor


@pytest.mark.mostly_integration("4-1-4-0.5")
@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mix"),
    [
        (3, 3, 0, 0.0),
        (6, 3, 1, 0.5),
        (6, 3, 2, 0.25),
        (4, 1, 3, 0.5),
        (4, 1, 4, 0.5),
        (3, 3, 1, 0.0),
    ],
)
def test_parameters_are_those_of_the_algorithm(every, fragments, delay, mix):
    """Covers more than two rounds, with fragments that split leaves in two."""
    tx = streaming_diloco(
        optax.sgd(RATE), NESTEROV, "batch", every=every, fragments=fragments, delay=delay, mix=mix
    )
    steps = 2 * every + every // fragments + delay + 1
    got, state = train(tx, starts(RANKS), steps)
    want, anchor = by_hand(every, fragments, delay, mix, steps)
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, rtol=2e-5)
    model = finish(*jax.tree.map(lambda x: x[0], (got[-1], state)))
    assert_close(
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(model)]), anchor[0], rtol=2e-5
    )


@pytest.mark.mostly_integration("12-6-0", "12-6-2", "6-6-0", "6-6-1", "6-6-2")
@pytest.mark.parametrize("stopped", range(13))
@pytest.mark.parametrize(("before", "after"), [(6, 12), (12, 6), (12, 9), (6, 6)])
def test_rounds_of_another_length_keep_fragments(before, after, stopped):
    """After a restart with another `every`, a pending fragment is still applied once.

    The whole fragment is applied, to its own part of the model.
    """
    clock, captured, slices, applied = Clock.begin(), [], [], []
    for every, steps in ((before, stopped), (after, 2 * after)):
        turns = FragmentTurns.checked(every, 3, 2, "it")
        for _ in range(steps):
            turn = turns.kinds()[int(turns.kind(clock))]
            slices += [] if turn.slice is None else [turn.slice]
            if turn.applied is not None:
                assert (turn.applied, slices) == (captured[-1], [0, 1])
                applied.append(turn.applied)
                slices = []
            captured += [] if turn.captured is None else [turn.captured]
            clock = turns.after(clock)
    assert len(applied) >= len(captured) - 1
    assert captured == [n % 3 for n in range(len(captured))]


def test_at_once_and_whole_it_is_diloco():
    make: Any = lambda of, **more: of(optax.sgd(RATE), NESTEROV, "batch", every=3, **more)  # noqa: E731
    got, state = train(make(streaming_diloco, fragments=1, delay=0), starts(RANKS), 7)
    want, other = train(make(diloco), starts(RANKS), 7)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    assert_close(np.asarray(state.anchor[0]), vectors(other.anchor))


@pytest.mark.integration
@pytest.mark.parametrize(("bits", "off", "delay"), [(8, 0.02, 1), (4, 0.3, 1), (8, 0.02, 2)])
def test_few_bits_end_near_the_whole_numbers(bits, off, delay):
    make: Any = lambda bits: streaming_diloco(  # noqa: E731
        optax.sgd(RATE), NESTEROV, "batch", every=3 * delay, fragments=3, delay=delay, bits=bits
    )
    (*_, got), _ = train(make(bits), starts(RANKS), 12 * delay)
    (*_, want), _ = train(make(32), starts(RANKS), 12 * delay)
    assert 0 < distance(got, want) < off * max(np.abs(x).max() for x in want.values())


def programs(tx: Any, steps: int) -> Any:
    """Yields the program one rank runs at each step: a step with products around the exchange."""
    params = {"w": jnp.ones((16, 16))}

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (params, tx.init(params), jnp.ones((4, 16)))
    for _ in range(steps):
        traced = trace(step, args, axes={"batch": 2}, wire=LocalRanks(), donate_argnums=(0, 1))
        yield stages.cut(decide(traced, jax.tree.leaves(args)))
        clock = jax.tree.map(
            lambda x: jnp.int32(np.asarray(x)),
            FragmentTurns.checked(4, 2, 0, "").after(args[1].clock),
        )
        state = args[1]._replace(clock=clock)
        args = (args[0], state, args[2])


@pytest.mark.integration
@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize(("delay", "wanted"), [(2, "..111111"), (1, "..1.1.1."), (0, ".1.1.1.1")])
def test_exchanges_are_carried_and_spread_over_the_delay(delay, wanted, bits):
    """Exchanging steps receive equally many bytes, and wait for them only without a delay."""
    tx = streaming_diloco(
        optax.adam(0.1), NESTEROV, "batch", every=4, fragments=2, delay=delay, mix=0.0, bits=bits
    )
    found = [*programs(tx, 8)]
    sent = [sum(wire_bytes(x, {"batch": 2}) for x in p.exchanges) for p in found]
    assert "".join("1" if n else "." for n in sent) == wanted
    assert len({n for n in sent if n}) == 1
    for program in found:
        assert len(program.order.carried) == (len(program.collectives) if delay else 0)


def test_state_is_as_large_as_promised():
    """Anchor and momentum are each as large as the parameters.

    In addition, a fragment is pending, which takes a quarter of its size or less at 8 bits.
    """
    params = {"w": jnp.ones((64, 48)), "b": jnp.ones(1024)}
    whole = 4 * 4096
    for bits, pending in (
        (32, whole // 4),
        (8, whole // 16 + whole // 512 + whole // 4),
        (4, None),
    ):
        tx: Any = streaming_diloco(
            optax.sgd(0.1), NESTEROV, "batch", every=8, fragments=4, delay=2, bits=bits
        )
        state = tx.init(params)
        held = sum(x.nbytes for x in jax.tree.leaves((state.pending, state.arrived)))
        assert pending is None or held == pending
        assert sum(x.nbytes for x in jax.tree.leaves((state.anchor, state.outer))) == 2 * whole


BAD = (
    (
        dict(every=10, fragments=4),
        r"`every` of `streaming_diloco` must be .*, got `every=10` and `fragments=4`",
    ),
    (dict(every=8, fragments=4, delay=3), r"`delay` of `streaming_diloco` is 3, .* = 2 steps"),
    (dict(delay=-1), "`delay` of `streaming_diloco` must be .*, got `-1`"),
    (dict(fragments=0), "`fragments` of `streaming_diloco` must be .*, got `0`"),
    (dict(mix=1), "`mix` of `streaming_diloco` .* must be .*, got `1`"),
    (dict(mix="x"), "`mix` of `streaming_diloco` .* must be .*, got `'x'`"),
    (dict(bits=2), "`bits` of `streaming_diloco` .* must be .*, got `2`"),
    (dict(bits=8.0), r"`bits` of `streaming_diloco` .* must be .*, got `8\.0`"),
    (dict(bits=jnp.int32(8)), "`bits` of `streaming_diloco` .* must be .*, got `Array"),
)


def made(inner: Any = INNER, outer: Any = NESTEROV, **changed: Any) -> Any:
    return streaming_diloco(
        inner, outer, "batch", **{"every": 4, "fragments": 2, "delay": 1, **changed}
    )


@pytest.mark.parametrize(("changed", "text"), BAD)
def test_wrong_arguments_are_refused(changed, text):
    with pytest.raises(ValueError, match=text):
        made(**changed)


def traced(tx, params, state=None):
    step = jax.vmap(
        lambda g, s, p: tx.update(g, s, p), axis_name="batch", in_axes=None, axis_size=2
    )
    return jax.eval_shape(step, params, tx.init(params) if state is None else state, params)


@pytest.mark.parametrize("other", [dict(fragments=4), dict(delay=2), dict(bits=8), dict(bits=4)])
def test_state_of_other_arguments_is_refused(other):
    params = {"w": jnp.ones((16, 32))}
    with pytest.raises(
        ValueError,
        match=r"the state of `streaming_diloco` has .* created with different `fragments`",
    ):
        traced(made(**other), params, made().init(params))
    traced(made(), params, made().init(params))


def test_what_cannot_be_cut_is_refused():
    params = {"w": jnp.ones((16, 32))}
    with pytest.raises(
        ValueError,
        match="outer steps of `streaming_diloco` does not work element by element.*use `diloco`",
    ):
        traced(made(outer=optax.lamb(0.1)), params)
    with pytest.raises(ValueError, match="complex64"):
        traced(made(), {"w": jnp.ones(4, jnp.complex64)})
    with pytest.raises(ValueError, match="got no `params`"):
        made().update(params, made().init(params))


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "programs"),
    [(8, 4, 0, 5), (8, 4, 1, 9), (8, 4, 2, 7), (8, 1, 3, 5), (16, 4, 4, 9), (100, 4, 25, 30)],
)
def test_a_step_has_as_many_programs_as_is_said(every, fragments, delay, programs):
    turns, clock, found = FragmentTurns.checked(every, fragments, delay, "it"), Clock.begin(), set()
    for _ in range(2 * every):
        found.add(int(turns.kind(clock)))
        clock = turns.after(clock)
    assert len(found) == programs
    full = delay == every // fragments
    assert programs == (delay + fragments + 1 if full or not delay else delay + 2 * fragments)


def test_leaves_that_are_not_floats_stay_out():
    params = {"n": jnp.int32(3), "w": jnp.ones(4)}
    tx = made(inner=optax.identity(), every=2, delay=0)
    state = tx.init(params)
    assert [x.size for x in state.anchor] == [2, 2]
    assert state.model({"n": jnp.int32(5), "w": jnp.zeros(4)})["n"] == 5
