"""Ranks that would cut one step differently all get a clear error before the first exchange, rather
than a deadlock.

Prints `passed NAME` for each case, and at the end `rank R: cuts done`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxcross
from jaxcross.plan import Profile, ProfiledCut

WORLD = jaxcross.initialize(stall_timeout_s=60)
RANK, P = WORLD.rank, WORLD.size
X = np.linspace(0.0, 1.0 + RANK, 12, dtype=np.float32).reshape(4, 3)
DIVIDED = " into segments differently. The numbers of exchanges in each segment are\n    rank 0: "


def alongside_an_accelerator(rank: int) -> Any:
    """Makes that rank cut steps as if it had an accelerator."""
    if rank != RANK:
        return nullcontext()
    return mock.patch("jaxcross.program.cut.on_accelerator", return_value=True)


def adasum(grads: Any) -> Any:
    return jaxcross.exchange.adasum("batch").update(grads, optax.EmptyState())[0]


def means(state: Any) -> Any:
    """Several small exchanges. A rank with an accelerator packs them in a different place."""
    return jax.tree.map(
        lambda w, g: w - 0.1 * g, state, lax.pmean(jax.tree.map(jnp.sin, state), "batch")
    )


def two_layers(layers: Any, batch: Any) -> Any:
    def loss(layers: Any) -> Any:
        return (jnp.tanh(jnp.tanh(batch @ layers["in"]) @ layers["out"]) ** 2).mean()

    return jax.tree.map(
        lambda w, g: w - 0.1 * g, layers, lax.pmean(jax.grad(loss)(layers), "batch")
    )


LAYERS = {"in": jnp.ones((3, 20)), "out": jnp.ones((20, 15)) / 20}


def alone(step: Any, *args: Any) -> str:
    """Returns the error of one call, or an empty text."""
    try:
        step(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_a_job(step: Any, *args: Any) -> str:
    """Returns the error of a job's first step, while another job trains to its end."""
    sound = jaxcross.crossover(means, axes="batch")

    def train(job: Any) -> Any:
        return step(*args)

    def other(job: Any) -> Any:
        state = [jnp.ones(3)]
        for _ in range(3):
            state = sound(state)
        return state

    runner = jaxcross.Runner(WORLD)
    job = runner.add("job", train)
    good = runner.add("good", other)
    try:
        runner.run()
    except Exception as error:
        assert good.status == "ended", good.status
        return f"{type(error).__name__}: {error}"
    assert job.status == good.status == "ended"
    return ""


def the_same_everywhere(text: str) -> str:
    assert len(set(WORLD.control.allgather_text(text))) == 1, text
    return text


def refused(make_step: Callable[[], Any], *args: Any) -> None:
    """Checks that all ranks get the same error, both alone and in a job, and can continue."""
    for run in (alone, in_a_job):
        text = the_same_everywhere(run(make_step(), *args))
        assert text.startswith("ExchangeError: "), text
        assert DIVIDED in text, text
        assert "\n    rank 1: " in text, text


def kinds_that_cut_differently() -> None:
    """Adasum stays on the host if there's an accelerator, and is several segments otherwise."""
    for rank in (0, 1):
        with alongside_an_accelerator(rank):
            refused(lambda: jaxcross.crossover(adasum, axes="batch"), [X, X[0]])
    assert not alone(jaxcross.crossover(adasum, axes="batch"), [X, X[0]])


def kinds_that_cut_alike() -> None:
    """Ranks may pack matching exchanges differently without changing any bit of the result."""
    state = [jnp.asarray(X[0] * n) for n in range(1, 5)]
    expected = jaxcross.crossover(means, axes="batch", cut=2)(state)
    with alongside_an_accelerator(1):
        step = jaxcross.crossover(means, axes="batch", cut=2)
        got = step(state)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def profiled_cuts() -> dict[str, ProfiledCut]:
    """Cuts by profile, named after what they choose: one segment, two, or none, because the profile
    is of something else.
    """
    cost = jaxcross.estimate(jaxcross.crossover(two_layers, axes="batch"), LAYERS, X, steps=1).cost
    whole, cut = cost.whole, cost.cut
    assert cut is not None
    found = {
        "one": replace(whole, seconds=(1.0, 0.0, 0.0), rank_seconds=()),
        "two": replace(cut, seconds=tuple(0.1 for _ in cut.seconds), rank_seconds=()),
        "of other ranks": replace(whole, ranks=P + 1, rank_seconds=()),
        "of another step": Profile.whole("a", compute_s=1.0, exchange_s=1.0, nbytes=10**6, ranks=P),
    }
    return {name: jaxcross.plan.cut(profile) for name, profile in found.items()}


def profiles_that_differ() -> None:
    """The profiles choose different cuts, or are of different things.

    No rank runs the step, whichever rank has the other profile.
    """
    known = profiled_cuts()
    pairs = (("one", "two"), ("two", "of other ranks"), ("of another step", "one"))
    for first, other in pairs:
        given = known[other if RANK else first]
        refused(
            lambda given=given: jaxcross.crossover(two_layers, axes="batch", cut=given), LAYERS, X
        )
    for wrong in ("of other ranks", "of another step"):
        for run in (alone, in_a_job):
            text = run(jaxcross.crossover(two_layers, axes="batch", cut=known[wrong]), LAYERS, X)
            assert "The profile `" in the_same_everywhere(text), text
    assert not alone(jaxcross.crossover(two_layers, axes="batch", cut=known["two"]), LAYERS, X)


def a_search_on_one_rank_alone() -> None:
    """All ranks exchange alike, but one would try cuts while the others train."""
    refused(
        lambda: jaxcross.crossover(two_layers, axes="batch", cut="auto" if RANK else 1), LAYERS, X
    )


CASES = (
    kinds_that_cut_differently,
    kinds_that_cut_alike,
    profiles_that_differ,
    a_search_on_one_rank_alone,
)

if __name__ == "__main__":
    for case in CASES:
        case()
        print(f"rank {RANK}: passed {case.__name__}", flush=True)
    print(f"rank {RANK}: cuts done", flush=True)
