"""`jaxcross.estimate` over MPI gives the same result on every rank, and a mistake on one rank is an
error on all.

Prints `rank R: estimates done`.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcross
from jaxcross.plan import Profile, cut
from jaxcross.plan.speedup import estimate_of

WORLD = jaxcross.initialize(stall_timeout_s=60)
RANK, P = WORLD.rank, WORLD.size
X = np.full((4, 3), RANK, np.float32)


def make_step(axis="batch", wrong=False, cut: Any = "whole"):
    @jaxcross.crossover(axes=axis, donate_argnums=0, cut=cut)
    def train_step(layers, batch):
        def loss_fn(layers):
            hidden = jnp.tanh(batch @ layers["in"])
            return (jnp.tanh(hidden @ layers["middle"]) ** 2).mean()

        grads = jax.grad(loss_fn)(layers)
        grads = lax.pmean(grads["in"] if wrong else grads, axis)
        return (
            jax.tree.map(lambda w: w - 0.1 * jnp.mean(grads), layers)
            if wrong
            else jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads)
        )

    return train_step


def fresh():
    return {"in": jnp.ones((3, 200)), "middle": jnp.ones((200, 150)) / 150}


def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def the_same_on_every_rank():
    step, state = make_step(), fresh()
    found = jaxcross.estimate(step, state, X, mbps=1, memory=10**9)
    assert len(set(WORLD.control.allgather_text(json.dumps(found.as_dict())))) == 1
    # In an all-reduce over P ranks, a rank receives 2(P - 1)/P times the gradients' bytes. The
    # emulated link of 1 Mbit/s delays the exchange for at least as long as it takes to send these.
    nbytes = 4 * (3 * 200 + 200 * 150)
    assert abs(found.cost.wire_bytes - 2 * (P - 1) / P * nbytes) < 8
    assert found.cost.exchange_s >= 8e-6 * found.cost.wire_bytes
    assert found.cost.cut is not None
    assert found.cost.cut.graph.kinds.count("collective") == 2
    assert found.cost.limit_bytes == 10**9
    assert not any(x.is_deleted() for x in state.values())
    trained, alone = step(state, X), make_step()(fresh(), X)
    assert all((trained[k] == alone[k]).all() for k in trained), "what follows has the same bits"


def a_profile_in_place_of_a_measurement():
    """A profile gives the same c and m without any timing.

    A profile of another step is refused on every rank.
    """
    first = jaxcross.estimate(make_step(), fresh(), X, steps=1).cost
    assert first.cut is not None
    profiles = [first.whole, first.cut]
    found = jaxcross.estimate(make_step(), fresh(), X, profiles=profiles)
    assert (found.cost.compute_s, found.cost.exchange_s) == (first.compute_s, first.exchange_s)
    assert found.cost.steps == 0 and "as its profile says" in str(found).splitlines()[0]
    assert found.cut_alone == estimate_of(first).cut_alone and "one job cut in 2: at most" in str(
        found
    )
    unknown = [replace(profile, memory=None) for profile in profiles]
    assert (
        jaxcross.estimate(make_step(), fresh(), X, profiles=unknown).cost.whole.memory
        == first.whole.memory
    )
    other = Profile.whole("a", compute_s=1.0, exchange_s=1.0, nbytes=10**6, ranks=P)
    for refused, reason in (
        (other, "of another step"),
        (replace(first.whole, ranks=P + 1, rank_seconds=()), f"and `train_step` runs on {P}"),
    ):
        text = raised(
            lambda given=refused: jaxcross.estimate(make_step(), fresh(), X, profiles=given)
        )
        assert text.startswith("CutError: The profile") and reason in text, text
        text = raised(lambda given=refused: make_step(cut=cut(given))(fresh(), X))
        assert text.startswith("CutError: The profile") and reason in text, text
    mine = first.whole if RANK else other
    text = raised(lambda: jaxcross.estimate(make_step(), fresh(), X, profiles=mine))
    assert (
        "ExchangeError: `train_step` cannot be measured, as rank 0 failed: CutError"
        if RANK
        else "CutError"
    ) in text
    text = raised(
        lambda: jaxcross.estimate(
            make_step(), fresh(), X, profiles=replace(first.whole, host_s=1.0 + RANK)
        )
    )
    assert text.startswith("ExchangeError: Ranks 0 and 1 ask for different estimates"), text


def a_profile_in_place_of_a_cut():
    """The profiles choose the cut that is fastest alone, and results equal those of that `cut=`."""
    cost = jaxcross.estimate(make_step(), fresh(), X, steps=1).cost
    assert cost.cut is not None
    slow = replace(cost.whole, seconds=tuple(1.0 for _ in cost.whole.seconds), rank_seconds=())
    fine = replace(cost.cut, seconds=tuple(0.1 for _ in cost.cut.seconds), rank_seconds=())
    for given, number in (
        ([slow, fine], 2),
        ([fine, slow], 2),
        (fine, 2),
        (replace(slow, seconds=(1.0, 0.0, 0.0)), 1),
    ):
        by_profile = make_step(cut=cut(given))
        assert by_profile.cut == number, by_profile.cut
        found, wanted = by_profile(fresh(), X), make_step(cut=number)(fresh(), X)
        assert all((found[k] == wanted[k]).all() for k in found)
        program = by_profile.latest_program
        assert program is not None and len(program.collectives) == number


def in_a_job_of_several():
    def train(job):
        step, state = make_step(), fresh()
        if job.name == "a":
            found.append(jaxcross.estimate(step, state, X, steps=1))
        for _ in range(3):
            state = step(state, X)
        return state

    found, runner = [], jaxcross.Runner(WORLD)
    jobs = [runner.add(name, train) for name in "ab"]
    runner.run()
    assert found[0].cost.where == "job `a`"
    assert found[0].cost.exchange_s > 0
    assert (jobs[0].state["in"] == jobs[1].state["in"]).all()


def one_rank_that_asks_wrongly():
    text = raised(lambda: jaxcross.estimate(make_step(), fresh(), X, jobs=RANK))
    wanted = (
        "ValueError: `jobs` must be at least 1, got 0."
        if RANK == 0
        else (
            "ExchangeError: `train_step` cannot be measured, as rank 0 failed: ValueError: `jobs` "
            "must be at least 1, got 0."
        )
    )
    assert text == wanted, text
    text = raised(lambda: jaxcross.estimate(make_step(), fresh(), X, steps=1 + RANK))
    assert text.startswith(
        "ExchangeError: Ranks 0 and 1 ask for different estimates of `train_step`: {'jobs': 2"
    ), text


def other_steps():
    text = raised(lambda: jaxcross.estimate(make_step(wrong=RANK == 1), fresh(), X))
    assert text.startswith("ExchangeError: ") and "train_step" in text, text


def a_rank_that_fails():
    def fails(x):
        if RANK == 1:
            raise RuntimeError("no disk")
        return x

    @jaxcross.crossover(axes="batch")
    def reads(state, batch):
        read = jax.pure_callback(fails, jax.ShapeDtypeStruct((4, 3), jnp.float32), batch)
        return state + lax.pmean(read, "batch")

    text = raised(lambda: jaxcross.estimate(reads, X, X))
    assert text.startswith(
        "ExchangeError: `reads` cannot be measured, as it fails on copies of its arguments: rank 1"
    ), text


def a_rank_that_exchanges_nothing():
    step = jaxcross.crossover(
        (lambda s, x: s + x) if RANK else (lambda s, x: s + lax.psum(x, "batch")), axes="batch"
    )
    text = raised(lambda: jaxcross.estimate(step, X, X))
    assert text.startswith(
        "CutError" if RANK else "ExchangeError: `<lambda>` cannot be measured, as rank 1 failed"
    ), text


def a_rank_that_computes_longer():
    """Rank 1 waits in each step's computation. The estimate and the report of a run both name it.

    The rank is slower by such a factor that it doesn't matter what else the machine is doing.
    """
    never = threading.Event()

    def slowly(x):
        never.wait(0.25 * (RANK == 1))
        return x

    @jaxcross.crossover(axes="batch")
    def train_step(state, batch):
        read = jax.pure_callback(slowly, jax.ShapeDtypeStruct((4, 3), jnp.float32), batch)
        return state + lax.pmean(read, "batch")

    found = jaxcross.estimate(train_step, X, X)
    assert found.slow_rank is not None and found.slow_rank.rank == 1, found
    assert found.cost.whole.rank_compute_s[1] == max(found.cost.whole.rank_compute_s) >= 0.25
    assert "Rank 1 computes" in str(found).splitlines()[-2], found
    assert len(set(WORLD.control.allgather_text(json.dumps(found.as_dict())))) == 1

    def train(job):
        state = job.restore(np.zeros_like(X))
        for batch in job.batches([X] * 6):
            state = train_step(state, batch)
        return state

    runner = jaxcross.Runner(WORLD)
    runner.add("slow", train)
    report = runner.run()
    slow = report.rounds.slow_rank
    assert slow is not None and slow.rank == 1 and slow.cost_share > 0.5, report
    assert "Rank 1 computes" in str(report), report
    profile = Profile.of(report, "slow")
    assert len(profile.rank_seconds) == P and profile.rank_compute_s[1] >= 0.25


CASES = (
    the_same_on_every_rank,
    a_profile_in_place_of_a_measurement,
    a_profile_in_place_of_a_cut,
    in_a_job_of_several,
    one_rank_that_asks_wrongly,
    other_steps,
    a_rank_that_fails,
    a_rank_that_exchanges_nothing,
    a_rank_that_computes_longer,
)

if __name__ == "__main__":
    for case in CASES:
        case()
    print(f"rank {RANK}: estimates done", flush=True)
