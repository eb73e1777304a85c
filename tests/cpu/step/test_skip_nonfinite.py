"""`nonfinite="skip"`: which parts of a step's results are its state, and which steps it rejects."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcross
from jaxcross.errors import CutError, JobError
from jaxcross.jobs.runner import Runner
from jaxcross.step.commit_flag import with_commit_flag


class Out(NamedTuple):
    loss: Any
    train: Any


PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
OPT = {"mu": PARAMS, "count": jnp.int32(7)}  # parts of it look like the parameters
BATCH = jnp.ones((4, 3))
LOSS = jnp.float32(0.5)


def new(tree):
    return jax.tree.map(lambda x: x + 1, tree)


def skipped(results, *args, state=(0,), donated=True):
    """Returns what a step with these `results` returns when it's skipped."""
    return with_commit_flag(lambda *_: results, "step", state, donated=donated)(
        *args, jnp.asarray(False)
    )


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


BOTH = {"state": (0, 1)}


@pytest.mark.parametrize(
    ("returns", "options"),
    [
        (lambda params, opt: (params, {"opt": opt}), BOTH),
        (lambda params, opt: {"opt": opt, "params": params, "loss": LOSS}, BOTH),
        (lambda params, opt: Out(loss=LOSS, train=(params, opt)), BOTH),
        (lambda params, opt: ({"opt": opt}, [LOSS, ({"all": {"params": params}},)]), BOTH),
        (lambda params, opt: ((params, opt), LOSS), BOTH),
    ],
)
def test_state_is_kept_wherever_it_stands(returns, options):
    got = skipped(returns(new(PARAMS), new(OPT)), PARAMS, OPT, BATCH, **options)
    same(got, returns(PARAMS, OPT))


@pytest.mark.parametrize(
    "returns", [lambda s: {"state": s, "loss": LOSS}, lambda s: Out(loss=LOSS, train=s)]
)
@pytest.mark.parametrize("donated", [True, False])
def test_a_state_in_a_dict_or_a_named_tuple_is_kept(returns, donated):
    same(skipped(returns(new(PARAMS)), PARAMS, BATCH, donated=donated), returns(PARAMS))


def test_a_state_that_the_step_writes_into_is_kept():
    """Holds for a dict, and for an NNX state.

    The step updates a module that shares its variables with that state.
    """

    def write_dict(state):
        state["w"] += 1
        return state, LOSS

    graph, variables = nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))

    def write_module(state):
        module = nnx.merge(graph, state)
        module(BATCH)
        return nnx.state(module), LOSS

    for write, make in (
        (write_dict, lambda: dict(PARAMS)),
        (write_module, lambda: jax.tree.map(jnp.copy, variables)),
    ):
        step = jax.jit(with_commit_flag(write, "step", (0,), donated=True))
        same(step(make(), jnp.asarray(False)), (make(), LOSS))
        assert any(
            map(
                jnp.any,
                jax.tree.leaves(
                    jax.tree.map(jnp.subtract, step(make(), jnp.asarray(True))[0], make())
                ),
            )
        )


def test_metrics_are_what_the_step_made_of_them():
    """A single-array argument must be a whole result or none: metrics may share its shape."""
    rate = jnp.float32(0.1)
    got = skipped(
        (new(PARAMS), {"loss": LOSS, "seen": BATCH[0]}), PARAMS, rate, BATCH[1], state=(0, 1)
    )
    same(got, (PARAMS, {"loss": LOSS, "seen": BATCH[0]}))


@pytest.mark.parametrize(
    ("results", "args", "options", "message"),
    [
        (
            (new(PARAMS), (new(OPT["mu"]), OPT["count"])),
            (PARAMS, {"mu": OPT["mu"], "n": OPT["count"]}),
            BOTH,
            (
                "it donates argument 1 and returns arrays of the same shapes and types in another "
                "structure"
            ),
        ),
        (
            (new(PARAMS), (jnp.ones(5), jnp.ones(6))),
            (PARAMS, {"m": jnp.zeros(5), "v": jnp.zeros(6)}),
            BOTH,
            (
                "it donates argument 1 and returns arrays of the same shapes and types in another "
                "structure"
            ),
        ),
        (
            {"now": new(PARAMS), "ema": new(PARAMS)},
            (PARAMS,),
            {"donated": False},
            "2 of its results have the structure, shapes and types of 1 argument",
        ),
        (
            (new(PARAMS), new(OPT), LOSS),
            (PARAMS, OPT, BATCH),
            {"donated": False},
            (
                "it donates no argument, so the first one is taken as its state, "
                "but argument 1 is returned in its own structure as well"
            ),
        ),
    ],
)
def test_step_keeping_part_of_its_state_is_rejected(results, args, options, message):
    """A step that would keep part of its state when skipped is rejected."""
    with pytest.raises(CutError, match=rf"^`step` cannot skip a step: {message}"):
        skipped(results, *args, **options)


def test_a_state_that_is_given_by_name_is_kept():
    def step(*_, **__):
        return new(PARAMS), new(OPT), LOSS

    flagged = with_commit_flag(step, "step", ("params", "opt"), donated=True)
    got = flagged(BATCH, jnp.asarray(False), params=PARAMS, opt=OPT)
    same(got, (PARAMS, OPT, LOSS))
    with pytest.raises(CutError, match="argument `opt` is returned in its own structure as well"):
        with_commit_flag(step, "step", (0,), donated=False)(PARAMS, jnp.asarray(False), opt=OPT)


def test_a_batch_may_be_donated_as_well():
    got = skipped((new(PARAMS), {"loss": LOSS}), PARAMS, {"x": BATCH}, state=(0, 1))
    same(got, (PARAMS, {"loss": LOSS}))


def in_a_job(fn, batches):
    runner = Runner(jaxcross.initialize())

    def skips(job):
        job.nonfinite = "skip"
        return fn(job, job.batches(batches))

    job = runner.add("a", skips)
    runner.run()
    return job


def test_missing_state_is_rejected_at_the_first_call():
    """A step without its state would silently commit NaN."""

    @jaxcross.crossover(axes="batch")
    def step(batch, state):
        return state + jax.lax.pmean(batch.sum(), "batch"), None

    def fn(job, batches):
        state = job.restore(jnp.ones(3))
        for batch in batches:
            state, _ = step(batch, state)

    with pytest.raises(
        JobError,
        match=(
            "CutError: `step` cannot skip a step: none of its results has the structure.* of its "
            "first arg"
        ),
    ):
        in_a_job(fn, [np.ones(4, np.float32)])


def test_an_evaluation_after_the_step_is_left_alone():
    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        return {"state": {"w": state["w"] + jax.lax.pmean(batch.sum(), "batch")}}

    @jaxcross.crossover(axes="batch")
    def evaluate(state, batch):
        return jax.lax.pmean(state["w"].sum() * batch.mean(), "batch")

    def fn(job, batches):
        state = job.restore({"w": jnp.zeros(3)})
        for batch in batches:
            state = step(state, batch)["state"]
            job.log({"value": evaluate(state, batch)})
        return state

    job = in_a_job(fn, [np.full(4, value, np.float32) for value in (1.0, np.nan, 2.0)])
    assert (job.status, job.step, job.skipped) == ("ended", 3, 1)
    assert job.state["w"].tolist() == [12.0] * 3
    assert [bool(np.isfinite(values["value"])) for _, values in job.history] == [True, False, True]
