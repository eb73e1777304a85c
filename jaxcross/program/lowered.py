"""An executable whose first arguments are fixed: the arrays that its trace closed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxcross import _jax_compat as compat


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bound:
    """An executable and its first arguments."""

    call: Any
    first: tuple[Any, ...]

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.call(*self.first, *args)

    def memory_analysis(self) -> Any:
        """Returns XLA's figures of the executable."""
        return self.call.memory_analysis()

    def as_text(self) -> str:
        """Returns XLA's optimised module."""
        return self.call.as_text()


def compile_with_arguments(
    function: Callable[..., list[Any]], structs: Sequence[Any], host: Any, sharding: jax.sharding.Sharding | None
) -> Any:
    """Compiles a function for the host; arrays that its trace closes over become arguments of the executable.

    XLA then cannot write them into its code, where they would make kernels differ that are otherwise the same. Waits
    for XLA.

    Args:
        function: Takes and returns flat arrays.
        structs: Types of its arguments.
        host: CPU device for the arrays.
        sharding: Of these arrays; None where JAX may place them.
    """
    closed, consts = compat.constants_first(jax.make_jaxpr(function)(*structs))
    if not consts:
        return jax.jit(function, keep_unused=True).lower(*structs).compile()
    inner = jaxpr_as_fun(closed)

    def with_arguments(*args: Any) -> list[Any]:
        return list(inner(*args))

    with_arguments.__name__ = function.__name__
    first = tuple(jax.device_put(list(consts), host))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in first]
    return Bound(jax.jit(with_arguments, keep_unused=True).lower(*types, *structs).compile(), first)
