"""A step called alone, in a single-rank world: what it accepts, and its errors for wrong calls."""

from __future__ import annotations

import contextlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross._arguments import Selection
from jaxcross._jax_compat import trace_context
from jaxcross.errors import JobError
from jaxcross.step.step import crossover
from jaxcross.world.exchange_owner import ExchangeOwner
from tests.support.script_text import RAISED, run_to_end

CHECKS = (
    RAISED
    + """
import threading, warnings
import jax, jax.numpy as jnp, numpy as np
import jaxcross
from jax import lax

warnings.simplefilter("ignore")
jaxcross.initialize()


def crossed(function, **options):
    return jaxcross.crossover(function, axes="batch", **options)


def step(x, k):
    kind = 2 if isinstance(k, bool) else 3 if isinstance(k, int) else 5
    return lax.psum(x, "batch") * kind


# static arguments of unlike types
typed = crossed(step, static_argnums=1)
for _ in range(2):
    assert [float(typed(jnp.ones(()), k)) for k in (1, True, 1.0)] == [3, 2, 5]

# negative numbers
assert crossed(step, static_argnums=-1)(jnp.ones(()), 2) == 3
ends = crossed(lambda k, s, x: s + lax.psum(x, "batch") * k, static_argnums=(0, -1))
assert ends.trace(2, 0.5, 3).in_avals == (jax.typeof(0.5),)
given = jnp.ones(3)
late = crossed(lambda k, s: s + lax.psum(s.sum(), "batch"), static_argnums=0, donate_argnums=-1)
assert late("a", given).sum() == 12
assert given.is_deleted()
print(raised(lambda: crossed(step, donate_argnums=-3)(jnp.ones(()), 2)))
print(raised(lambda: crossed(step, donate_argnums=-1, static_argnums=1)(jnp.ones(()), 2)))

# arguments that cannot be
print(raised(lambda: typed(jnp.ones(()), (1, [2]))))
class Model: pass
leaf = crossed(lambda state, x: lax.psum(x, "batch"))
print(raised(lambda: leaf({"names": {"abc"}}, jnp.ones(1))))
print(raised(lambda: leaf(1.0, Model())))
fold = crossed(
    lambda s: {"key": jax.random.fold_in(s["key"], 1), "p": lax.psum(s["p"], "batch")},
    donate_argnums=0,
)
state = {"key": jax.random.key(0), "p": jnp.ones(1)}
new = fold(state)
print(raised(lambda: fold({"key": state["key"], "p": new["p"]})))
with jax.disable_jit():
    print(raised(lambda: leaf(1.0, jnp.ones(1))))


def logarithm(x):
    return lax.psum(jnp.log(x), "batch")


jax.config.update("jax_debug_nans", True)
print(raised(lambda: crossed(logarithm)(-jnp.ones(3))))
jax.config.update("jax_debug_nans", False)

# JAX's configuration
double = crossed(lambda x: lax.psum(x, "batch") + jnp.linspace(0.0, 1.0, 3).sum())
constant = crossed(lambda x: (lax.psum(x, "batch"), np.arange(3) * 0.5))
for call in (lambda: double(jnp.ones((), jnp.float32)), lambda: constant(jnp.float32(1))[1]):
    assert call().dtype == jnp.float32
    with jax.enable_x64(True):
        assert call().dtype == jnp.float64
    assert call().dtype == jnp.float32

wide = crossed(lambda p, x, rate: p - rate * lax.psum(x, "batch"))


def in_a_job(job):
    with jax.enable_x64(True):
        return wide(jnp.zeros(3), np.ones(3), 0.25)


runner = jaxcross.Runner()
job = runner.add("wide", in_a_job)
runner.run()
assert job.state.dtype == jnp.float64 and (job.state == -0.25).all()

# nobody to exchange with: any thread may call
threads = [
    threading.Thread(target=lambda: [leaf(1.0, jnp.ones(4)) for _ in range(50)]) for _ in range(3)
]
[t.start() for t in threads]
[t.join() for t in threads]
print("end")
"""
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    pytest.importorskip("mpi4jax")
    return run_to_end(CHECKS).stdout.splitlines()


@pytest.mark.mostly_integration(
    "sentence3",
    "CutError: argument `args[1]` of `<lambda>` holds a `Model`, which is not an array.",
    "ValueError: argument [0]['key'] of `<lambda>` was donated to an earlier step and is gone.",
    "sentence6",
    "FloatingPointError: segment 0 of `logarithm` (computation) computed an invalid value",
)
@pytest.mark.parametrize(
    "sentence",
    [
        (
            "ValueError: `donate_argnums` of `step` names argument -3, but `step` takes 2 "
            "positional arguments."
        ),
        (
            "ValueError: argument 1 of `step` is both donated and static, but a static argument "
            "has no arrays"
        ),
        (
            "ValueError: static argument 1 of `step` cannot be hashed: it is or holds a `tuple` "
            "(unhashable type: 'list')."
        ),
        (
            "CutError: argument `args[0]['names']` of `<lambda>` holds a `set`, which is not an "
            "array. It cannot be static either, because it cannot be hashed"
        ),
        "CutError: argument `args[1]` of `<lambda>` holds a `Model`, which is not an array.",
        "ValueError: argument [0]['key'] of `<lambda>` was donated to an earlier step and is gone.",
        (
            "CutError: `<lambda>` was called under `jax.disable_jit()`, but a crossover step only "
            "runs compiled. Call it outside `disable_jit`."
        ),
        "FloatingPointError: segment 0 of `logarithm` (computation) computed an invalid value",
    ],
)
def test_first_sentences(lines: list[str], sentence: str) -> None:
    assert any(line.startswith(sentence) for line in lines), "\n".join(lines)


def test_the_rest_holds(lines: list[str]) -> None:
    assert lines[-1] == "end"


def test_second_thread_is_rejected_while_first_is_busy() -> None:
    """A second thread is rejected until the first one has finished its step."""
    owner, refused = ExchangeOwner(), []

    def other() -> None:
        try:
            with owner.step("second"):
                refused.append("no")
        except JobError as error:
            refused.append(str(error))

    def run() -> None:
        thread = threading.Thread(target=other, name="mine")
        thread.start()
        thread.join()

    with owner.step("first"):
        run()
    with contextlib.suppress(KeyError), owner.step("first"):
        raise KeyError
    run()
    name = threading.current_thread().name
    assert refused[0].startswith(
        f"`second` was called from thread `mine` while thread `{name}` is running `first`. "
    )
    assert refused[1] == "no", "an error gives the turn back"


AXES = (
    '`axes` must be one name, such as "batch", for an axis over all ranks, or a mapping of names '
    'to sizes, such as {"batch": -1}, got '
)
NUMBERS = (
    "must be the number of a positional argument, such as 0, or a sequence of numbers, such as (0, "
    "1), got"
)
NAMES = (
    "must be the name of an argument, such as 'state', or a sequence of names, such as ('state', "
    "'batch'), got"
)
SIZES = "`axes` must map strings to whole numbers, 1 or more, or -1 for the remaining ranks"
BYTES = (
    "`bucket_bytes` must be a whole number of bytes, or 0 if exchanges should not share buffers, "
    "got "
)
CUT = '`cut` must be "whole", "auto" or a positive number of exchange segments, got '


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"axes": ("batch",)}, TypeError, f"{AXES}`('batch',)`"),
        ({"axes": ["batch"]}, TypeError, f"{AXES}`['batch']`"),
        ({"axes": None}, TypeError, f"{AXES}`None`"),
        ({"axes": {}}, ValueError, "`axes` must contain at least one axis, got `{}`."),
        (
            {"axes": {"a": 2.0}},
            ValueError,
            f"{SIZES}, got size 2.0 for axis 'a'.",
        ),
        (
            {"axes": {"a": True, "b": -1}},
            ValueError,
            f"{SIZES}, got size True for axis 'a'.",
        ),
        (
            {"axes": {"a": "2"}},
            ValueError,
            f"{SIZES}, got size '2' for axis 'a'.",
        ),
        (
            {"axes": {"a": -1, "b": -1}},
            ValueError,
            "Only one size in `axes` may be -1, got -1 for 'a', 'b'.",
        ),
        ({"cut": "half"}, ValueError, f"{CUT}'half'"),
        ({"cut": np.int64(0)}, ValueError, f"{CUT}np.int64(0)"),
        (
            {"bucket_bytes": None},
            ValueError,
            f"{BYTES}`None`",
        ),
        (
            {"bucket_bytes": "1MB"},
            ValueError,
            f"{BYTES}`'1MB'`",
        ),
        (
            {"bucket_bytes": -1},
            ValueError,
            f"{BYTES}`-1`",
        ),
        ({"donate_argnums": 0.0}, TypeError, f"`donate_argnums` {NUMBERS} 0.0."),
        ({"donate_argnums": True}, TypeError, f"`donate_argnums` {NUMBERS} True."),
        ({"static_argnums": "x"}, TypeError, f"`static_argnums` {NUMBERS} 'x'."),
        ({"donate_argnames": 0}, TypeError, f"`donate_argnames` {NAMES} 0."),
        ({"static_argnames": ("x", 1)}, TypeError, f"`static_argnames` {NAMES} ('x', 1)."),
    ],
)
def test_invalid_options_are_rejected_where_given(options, error, sentence) -> None:
    with pytest.raises(error, match="^" + re.escape(sentence)):
        crossover(lambda x: x, **{"axes": "batch", **options})


def test_numbers_of_numpy_are_numbers() -> None:
    two = np.int64(2)
    numbers = {
        "cut": two,
        "bucket_bytes": two,
        "donate_argnums": two,
        "static_argnums": np.arange(2),
    }
    step = crossover(lambda x, y, z: x, axes={"a": two, "b": -1}, **numbers)
    found = (step.axes, step.cut, step.bucket_bytes, step.donate.numbers, step.static.numbers)
    assert repr(found) == "({'a': 2, 'b': -1}, 2, 2, (2,), (0, 1))"
    assert crossover(lambda x: x, axes="batch", bucket_bytes=0).bucket_bytes == 0


def test_negative_numbers_count_from_the_end() -> None:
    assert Selection((-1, 0, -2)).places(3, ()) == (2, 0, 1)
    assert Selection((1, -3), ("x", "y")).places(2, {"y": 1, "z": 2}) == (1, "y")


def test_jax_configuration_is_part_of_the_compile_key() -> None:
    before = trace_context()
    with jax.enable_x64(True):
        assert trace_context() != before
        assert jnp.ones(()).dtype == jnp.float64
    assert trace_context() == before
    assert hash(trace_context()) == hash(before)
