"""Donated and static arguments, by number and name, match `jax.jit` for equal options and calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcross

pytestmark = pytest.mark.usefixtures("compiled_quickly")
S, B, E = jnp.ones(2), jnp.ones(3), jnp.ones(4)


def step(state: Any, batch: Any, rate: Any = 2, *, ema: Any = None) -> Any:
    return state * rate + batch.sum(), batch + 1, None if ema is None else ema + 1


def open_step(state: Any, *rest: Any, **named: Any) -> Any:
    return state, rest, named


def by_position_only(state: Any, /, batch: Any) -> Any:
    return state + batch.sum()


@pytest.fixture(autouse=True)
def _world() -> None:
    jaxcross.initialize()


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((S, B), {}),
    ((S, B, 3), {"ema": E}),
    ((S,), {"ema": E, "batch": B}),
    ((), {"rate": 3, "batch": B, "state": S}),
]


@pytest.mark.parametrize("function", [step, open_step])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"donate_argnums": 0},
        {"donate_argnames": "state"},
        {"donate_argnames": ("ema", "state")},
        {"donate_argnums": (0, 1), "static_argnames": ["rate"]},
        {"donate_argnames": "ema", "static_argnums": 2},
        {"donate_argnums": 0, "donate_argnames": "batch"},
        {"donate_argnums": (), "donate_argnames": "state"},
        {"static_argnums": 2, "static_argnames": "rate", "donate_argnames": "batch"},
    ],
    ids=str,
)
def test_arguments_are_those_of_jit(function: Any, options: dict[str, Any]) -> None:
    for args, kwargs in CALLS:
        if function is open_step and "state" in kwargs and "static_argnums" in options:
            continue  # to `jit`, a number with no place in the call is an error
        traced = jaxcross.crossover(function, axes="batch", **options).trace(*args, **kwargs)
        lowered = jax.jit(function, **options).lower(*args, **kwargs)
        wanted = [info.donated for info in jax.tree.leaves(lowered.args_info)]
        assert len(traced.in_avals) == len(wanted), "as many are static"
        assert sorted(traced.donated) == [n for n, donated in enumerate(wanted) if donated]


def test_donated_and_static_arguments_by_name_run() -> None:
    def averaged(state: Any, batch: Any, rate: Any = 2, *, ema: Any = None) -> Any:
        return step(state, jax.lax.pmean(batch, "batch"), rate, ema=ema)

    call = jaxcross.crossover(
        averaged, axes="batch", donate_argnames=("state", "ema"), static_argnames="rate"
    )
    state, ema = jnp.ones(2), jnp.ones(4)
    new, _, later = call(batch=B, rate=3, state=state, ema=ema)
    assert new.tolist() == [6.0, 6.0] and later.tolist() == [2.0] * 4
    assert state.is_deleted() and ema.is_deleted() and not B.is_deleted()
    assert call(new, B, 1)[0].tolist() == [9.0, 9.0] and new.is_deleted()
    with pytest.raises(
        ValueError, match=r"^static argument `rate` of `averaged` cannot be hashed: "
    ):
        call(S, B, rate=[1])


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            step,
            {"donate_argnames": ("state", "stat")},
            (
                r"`donate_argnames` of `step` names `stat`, but `step` has no such argument. It "
                r"takes `state`, `batch`, `rate`, `ema`\."
            ),
        ),
        (
            step,
            {"static_argnums": 3},
            "`static_argnums` of `step` names argument 3, but `step` takes 3 positional arguments",
        ),
        (
            by_position_only,
            {"static_argnames": "state"},
            (
                "`static_argnames` of `by_position_only` names `state`, which `by_position_only` "
                r"only takes by position\. Select it by its number, with `static_argnums`"
            ),
        ),
        (
            step,
            {"donate_argnums": (0, 1), "static_argnames": "batch"},
            "argument `batch` of `step` is both donated and static, but a static argument has no",
        ),
    ],
)
def test_what_jit_refuses_is_refused(function: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        jaxcross.crossover(function, axes="batch", **options)
    with pytest.raises(ValueError):  # noqa: PT011 (its words are JAX's)
        jax.jit(function, **options)
