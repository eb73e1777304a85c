"""Checks that `crossover` is given a function, jitted or not, and nothing that has chosen its devices already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax

from jaxcross import _jax_compat as compat
from jaxcross.errors import CutError

_PMAP = (
    "`jax.pmap` runs a function on devices of this process, where `crossover` runs it on ranks. Give `crossover` the"
    " function itself, pmap's `axis_name` as `axes`, and arguments without the leading axis of devices; its"
    " `donate_argnums` and `static_broadcasted_argnums` become `donate_argnums` and `static_argnums` of `crossover`."
)


def check_step(step: object, name: str) -> None:
    """Makes sure that `step` is a function that can be traced.

    Raises:
        TypeError: It cannot be called, is a class or compiled already, or is or wraps a `jax.pmap`.
    """
    if isinstance(step, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced):
        raise TypeError(
            f"`crossover` takes a function, not a `{type(step).__name__}`: it traces and compiles the function itself."
        )
    if isinstance(step, type) or not callable(step):
        what = f"the class `{step.__name__}`" if isinstance(step, type) else f"`{type(step).__name__}`"
        raise TypeError(f"`crossover` takes a function, not {what}")
    if any(compat.runs_pmap(getattr(function, "__code__", None)) for function in _layers(step)):
        raise TypeError(f"`{name}` is a `jax.pmap`. {_PMAP}")


def explain_failed_trace(step: Callable[..., Any], error: Exception, name: str) -> None:
    """Raises a clearer error where the text of a failed trace misleads; returns where it suffices.

    Raises:
        CutError: The step refers to a `jax.pmap`, or a `jax.jit` inside of it has static arguments.
    """
    if any(compat.runs_pmap(getattr(each, "__code__", None)) for inner in _layers(step) for each in _named(inner)):
        raise CutError(f"`{name}` calls a `jax.pmap`. {_PMAP}") from error
    if "Non-hashable static arguments" in str(error):
        raise CutError(
            f"`{name}` was called with an array where its `jax.jit` has a static argument: name the static ones by"
            " `static_argnums` of `crossover` as well, or leave the `jit` away."
        ) from error


def copy_signature(function: Callable[..., Any], step: Callable[..., Any]) -> None:
    """Makes JAX's errors about the traced function name `step` instead, with its line and its arguments."""
    *_, inner = _layers(step)
    function.__wrapped__ = inner  # type: ignore[attr-defined]
    with suppress(TypeError, ValueError):  # a callable without a signature
        function.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]


def _named(function: Callable[..., Any]) -> Iterator[Any]:
    """Yields the values of the globals and nonlocals that a function refers to."""
    # JAX leaves its own frames out of the tracebacks of its errors, so a `pmap` cannot be found there.
    code = getattr(function, "__code__", None)
    if code is not None:
        known = inspect.getclosurevars(function)
        yield from (*known.globals.values(), *known.nonlocals.values())


def _layers(step: Any) -> Iterator[Callable[..., Any]]:
    """Yields a callable and, one by one, the functions inside it: of partials, `jit`, other decorators, methods."""
    seen: set[int] = set()
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        yield step
        inner = step.func if isinstance(step, functools.partial) else getattr(step, "__wrapped__", None)
        step = inner if inner is not None else getattr(step, "__func__", None)
