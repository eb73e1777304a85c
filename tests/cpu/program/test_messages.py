"""User messages: the first sentence of every error and notice of trace, cut and `crossover`."""

from __future__ import annotations

import dataclasses
import functools
import logging
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxcross.errors import CutError
from jaxcross.program import stages
from jaxcross.program.flatten import UNROLLED
from jaxcross.program.trace import Traced, trace
from jaxcross.step.advice import advise
from jaxcross.testing import LocalRanks
from tests.support.script_text import run_to_end

AXES = {"batch": 2}
X = jnp.ones((4, 2))


def traced(step, *args, **options) -> Traced:
    return trace(step, args, axes=AXES, wire=LocalRanks(), **options)


def test_unknown_axis() -> None:
    def train_step(x):
        return lax.psum(x, "ranks")

    with pytest.raises(
        CutError, match="^`train_step` uses an axis that is not bound: .*ranks"
    ) as error:
        traced(train_step, X)
    assert "The axes of this step are `batch` of 2" in str(error.value)


def test_state_that_is_no_pytree() -> None:
    class Model:
        pass

    def train_step(state, x):
        return state

    message = (
        "^argument `args\\[0\\]\\['m'\\]` of `train_step` holds a `Model`, which is not an array"
    )
    with pytest.raises(CutError, match=message):
        traced(train_step, {"m": Model()}, X)


@jax.tree_util.register_pytree_node_class
class Linear:
    """A module like those of Equinox: a pytree with an activation function as a leaf."""

    def __init__(self, w: jax.Array, activation: object) -> None:
        self.w, self.activation = w, activation

    def tree_flatten(self) -> tuple[tuple[object, ...], None]:
        return (self.w, self.activation), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[jax.Array, object]) -> Linear:
        return cls(*leaves)


@pytest.mark.parametrize("inside", [lambda m: m, lambda m: {"model": (m, m)}])
@pytest.mark.parametrize("leaf", [{1}, object()], ids=["set", "object"])
def test_module_with_an_unusable_leaf_says_what_to_replace_it_by(inside, leaf) -> None:
    """A module with static leaves is a pytree already, so it can't be registered as one."""
    message = "holds a `.*`, which is not an array. It cannot be static either, because it .*"
    cure = "`Linear` is a pytree that has it among its leaves. Replace it by"
    with pytest.raises(CutError, match=f"{message}{cure}"):
        traced(lambda m, x: lax.pmean(x, "batch"), inside(Linear(X, leaf)), X)
    with pytest.raises(CutError, match=f"^`result.* of .* is a `{type(leaf).__name__}`.*{cure}"):
        traced(lambda x: inside(Linear(lax.pmean(x, "batch"), leaf)), X)


@dataclasses.dataclass
class Plain:
    w: jax.Array


def test_dataclass_error_says_to_register_it() -> None:
    cure = (
        "put `@jax.tree_util.register_dataclass` above `Plain`, or make it a "
        "`flax.struct.dataclass`"
    )
    with pytest.raises(
        CutError,
        match=f"^argument .* holds a `Plain`, which is not an array. .* A dataclass .* {cure}",
    ):
        traced(lambda p, x: lax.pmean(x @ p.w, "batch"), {"p": Plain(X)}, X)
    with pytest.raises(CutError, match=f"^`result` of .* is a `Plain`, .* A dataclass .* {cure}"):
        traced(lambda x: Plain(lax.pmean(x, "batch")), X)


@pytest.mark.parametrize(
    "wrong", [np.array(["a"]), np.array([None]), np.zeros(2, ">f4"), np.datetime64("2020-01-01")]
)
def test_numpy_types_that_jax_lacks_are_named(wrong) -> None:
    with pytest.raises(
        CutError,
        match=r"^argument `args\[0\]` of `pmean` holds a NumPy array of type `.*`, which JAX",
    ):
        traced(functools.partial(lax.pmean, axis_name="batch"), wrong)


@pytest.mark.parametrize("step", [0, 1, 2], ids=["function", "jit", "partial"])
def test_jax_errors_name_user_function_and_argument(step) -> None:
    def train_step(state, train):
        return lax.pmean(state["w"], "batch") if train else state["w"]

    wrapped = (train_step, jax.jit(train_step), functools.partial(train_step, {"w": X}))[step]
    given = (True,) if step == 2 else ({"v": 0.0, "w": X}, True)
    argument = "train"
    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=f"train_step at .*the argument {argument}"
    ) as e:
        traced(wrapped, *given)
    assert "flat" not in str(e.value)


@pytest.mark.parametrize("wrong", [{"text"}, object()], ids=["set", "object"])
def test_result_that_is_no_array(wrong) -> None:
    def train_step(state, x):
        return state, {"loss": lax.pmean(x, "batch"), "note": wrong}

    with pytest.raises(
        CutError,
        match=f"^`result\\[1\\]\\['note'\\]` of `train_step` is a `{type(wrong).__name__}`, but",
    ):
        traced(train_step, X, X)


def test_exchange_where_it_cannot_be_cut() -> None:
    def train_step(x):
        return lax.reduce(x, jnp.float32(0), lambda a, b: lax.psum(a + b, "batch"), (0, 1))

    with pytest.raises(
        CutError, match="^an exchange inside `reduce` cannot be cut at .*test_messages"
    ):
        traced(train_step, X)


def test_while_beside_an_exchange_in_an_unknown_branch() -> None:
    """Ranks don't vote on a loop without an exchange, which might never end on zeros."""

    def train_step(x):
        def body(c, _):
            return lax.psum(
                lax.while_loop(lambda v: v.max() < 9, lambda v: v * 2, c), "batch"
            ), None

        def branch(v):
            return lax.scan(body, v, None, length=3)[0]

        return lax.cond(lax.pmax(x.max(), "batch") > 0, branch, lambda v: v, x)

    with pytest.raises(
        CutError,
        match="^a `while` loop alongside an exchange inside `cond` cannot be cut at .*test_mess",
    ):
        traced(train_step, X)


@pytest.mark.parametrize("acts", [io_callback, jax.pure_callback])
def test_callback_beside_an_exchange_in_a_cond_loop(acts) -> None:
    """In a loop with an exchange inside `cond`, only pure callbacks are accepted.

    Other callbacks might run on ranks that don't intend them.
    """

    def train_step(x):
        def body(c, _):
            return lax.pmean(c, "batch") + jax.jit(lambda v: acts(lambda v: v, v, v))(c), None

        def branch(v):
            return lax.scan(body, v, None, length=3)[0]

        return lax.cond(lax.pmax(x.max(), "batch") > 0, branch, lambda v: v, x)

    if acts is jax.pure_callback:
        traced(train_step, X)
        return
    with pytest.raises(
        CutError,
        match="^an exchange and a callback in the same loop inside `cond` cannot be cut at ",
    ):
        traced(train_step, X)


@pytest.mark.parametrize("given", [False, True])
def test_mutable_array(given) -> None:
    def train_step(x):
        ref = jax.new_ref(x)
        total = lax.psum(ref[...], "batch")
        if given:
            jax.jit(lambda r: r.set(total))(ref)
        else:
            ref[...] = total
        return ref[...]

    with pytest.raises(
        CutError, match="^`new_ref` on a mutable array cannot be cut at .*test_messages"
    ):
        traced(train_step, X)


def test_mutable_array_inside_a_jit_or_a_loop() -> None:
    def counted(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    def train_step(x):
        y = lax.psum(jax.jit(counted)(x), "batch")
        return lax.scan(
            lambda c, _: (lax.psum(counted(c), "batch"), None), y, None, length=UNROLLED + 1
        )[0]

    traced(train_step, X)


@pytest.mark.parametrize("cut", ["x", 0, -1, 1.5, None, True])
def test_cut_that_is_none(cut) -> None:
    wanted = '^`cut` must be "whole", "auto" or a positive number of exchange segments, got '
    with pytest.raises(ValueError, match=wanted):
        stages.cut(traced(lambda x: lax.psum(x, "batch"), X), cut)


def test_step_without_exchange_is_warned_of() -> None:
    def evaluate(x):
        return x + 1

    program = stages.cut(traced(evaluate, X))
    with pytest.warns(
        UserWarning, match="^`evaluate` has no exchange over `batch`: every rank computes alone"
    ):
        advise(program.traced, program, set())


def test_step_that_exchanges_at_other_times_is_not(recwarn: pytest.WarningsRecorder) -> None:
    def every_eighth(step, x):
        return lax.cond(step % 8 == 7, lambda: lax.pmean(x, "batch"), lambda: x)

    undecided = traced(every_eighth, jnp.int32(0), X)
    programs = [stages.cut(undecided.decide(branch)) for branch in (0, 1)]
    assert [len(program.exchanges) for program in programs] == [0, 1]
    for program in programs:
        advise(program.traced, program, set())
    assert not recwarn.list


def test_exchange_in_a_loop_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    def ring(x):
        def body(c, _):
            c = lax.psum(c, "batch") + lax.pmax(c, "batch")
            return c, None

        return lax.scan(body, x, None, length=UNROLLED + 1)[0]

    with caplog.at_level(logging.WARNING, "jaxcross"):
        warned: set[str] = set()
        for cut in ("whole", 2):  # compiled twice
            program = stages.cut(traced(ring, X), cut)
            advise(program.traced, program, warned)
    lines = [r.getMessage() for r in caplog.records]
    assert all(line.startswith("`ring` exchanges inside a scan at ") for line in lines)
    assert len(lines) == 1, "one loop, one notice"


def test_calls_around_an_exchange_are_not_loops(caplog: pytest.LogCaptureFixture) -> None:
    """Calls around an exchange in a loop aren't treated as loops."""

    def ring(key, n):
        return lax.fori_loop(
            0, n, lambda _, k: jax.jit(lambda k: lax.all_gather(k, "batch"))(k)[0], key
        )

    with caplog.at_level(logging.WARNING, "jaxcross"):
        program = stages.cut(
            traced(ring, jax.random.key(0), 3)
        )  # a random key is sent as its words, by a call
        advise(program.traced, program, set())
    assert [dict(x.params).get("loop") for x in program.exchanges] == [
        "while ?"
    ] * 2  # and its vote
    assert "exchanges inside a while at" in caplog.text
    assert "closed_call" not in program.exchange_signature()


SCRIPT = """
import functools, logging, warnings
import jax, jax.numpy as jnp
import jaxcross
from jax import lax

def first_sentence(call):
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

@functools.partial(jaxcross.crossover, axes="batch", donate_argnums=0)
def train_step(state, x):
    return state + lax.psum(x, "batch").sum(), x

x = jnp.ones((4, 2))
first_sentence(lambda: train_step(jnp.ones(3), x))
logging.basicConfig(format="%(message)s")
world = jaxcross.initialize()
first_sentence(lambda: jaxcross.crossover(3, axes="batch"))
first_sentence(lambda: jaxcross.crossover(lambda v: v, axes={"batch": 7})(x))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    state = jnp.ones((3, 3))
    new, _ = train_step(state, x)
    first_sentence(lambda: train_step(state, x))
    for n in (5, 6, 7):
        new, _ = train_step(new, jnp.ones((n, 2)))
    train_step(new, jnp.ones((7, 2)))
    sharded = jaxcross.crossover(lambda v, n: v * n, axes="batch", static_argnums=1)
    partial = jaxcross.crossover(functools.partial(max, 1), axes="b")
    print("name", train_step.__name__, partial.__name__)
print("end")
"""


@pytest.fixture(scope="module")
def script() -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mpi4jax")
    return run_to_end(SCRIPT, timeout_s=120)


@pytest.mark.mostly_integration(
    "TypeError: `crossover` takes a function, not `int`",
    "ValueError: The axes {'batch': 7} multiply to 7, but there are 1 ranks.",
    "ValueError: argument [0] of `train_step` was donated to an earlier step and is gone.",
    "name train_step max",
)
@pytest.mark.parametrize(
    "sentence",
    [
        "RuntimeError: jaxcross is not initialised: call `world = jaxcross.initialize()`",
        "TypeError: `crossover` takes a function, not `int`",
        "ValueError: The axes {'batch': 7} multiply to 7, but there are 1 ranks.",
        "ValueError: argument [0] of `train_step` was donated to an earlier step and is gone.",
        "name train_step max",
    ],
)
def test_first_sentences_of_crossover(
    script: subprocess.CompletedProcess[str], sentence: str
) -> None:
    assert any(line.startswith(sentence) for line in script.stdout.splitlines()), script.stdout


def test_changed_shapes_are_noticed_once(script: subprocess.CompletedProcess[str]) -> None:
    notices = [line for line in script.stderr.splitlines() if "is compiled again" in line]
    assert notices == [
        (
            "`train_step` is compiled again: argument [0][1] was float32[4,2], is float32[5,2]. "
            "This notice comes once."
        )
    ]
