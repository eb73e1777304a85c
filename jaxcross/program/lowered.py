"""Collective segments as a wire hands them back: `Wire.lower` returns a `Lowered`, which makes an
executable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from jaxcross import _jax_compat as compat


class Lowered(Protocol):
    """A jaxpr whose exchanges have become the wire's own operations."""

    @property
    def lent(self) -> Sequence[int]:
        """Positions of the results that may be in the wire's memory. XLA has to copy such an array
        to overwrite it.
        """
        ...

    def compile(
        self, structs: Sequence[Any], /, *, name: str, host: Any, place: Sharding | None
    ) -> Any:
        """Returns a function of flat arrays that runs on the host and waits for the peers. Waits
        for XLA.

        The function also has `memory_analysis`, as executables do.

        Args:
            structs: Types of the arguments.
            name: The executable's name in profiles.
            host: CPU device that it runs on.
            place: Sharding of the arguments; None if JAX may place them.
        """
        ...


@dataclass(
    frozen=True, slots=True, weakref_slot=True
)  # `jax.jit` needs weak references, and crashes without
class Traceable:
    """A jaxpr that is an ordinary function again: one executable computes it, exchanges
    included.
    """

    function: Callable[..., Sequence[Any]]

    @property
    def lent(self) -> Sequence[int]:
        """None of them: XLA allocates the results."""
        return ()

    def __call__(self, *args: Any) -> list[Any]:
        return list(self.function(*args))

    def compile(
        self, structs: Sequence[Any], /, *, name: str, host: Any, place: Sharding | None
    ) -> Any:
        """Compiles it for the host; see `Lowered.compile`."""
        return compile_with_arguments(self, structs, name=name, host=host, place=place)


def struct_of(aval: Any, place: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Returns an abstract value as the type of an argument, which may be committed to a place."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=place, weak_type=getattr(aval, "weak_type", False)
    )


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
    function: Callable[..., Sequence[Any]],
    structs: Sequence[Any],
    *,
    name: str,
    host: Any,
    place: Sharding | None,
    donate: Sequence[int] = (),
) -> Any:
    """Compiles a function for the host; arrays that its trace closes over become arguments of the
    executable.

    Otherwise XLA would write them into its code, and kernels that are the same would differ. Waits
    for XLA.

    Args:
        function: Takes and returns flat arrays.
        structs: Types of its arguments.
        name: The executable's name in profiles.
        host: CPU device for the arrays.
        place: Sharding of these arrays; None if JAX may place them.
        donate: Arguments that the executable may overwrite.
    """
    closed, consts = compat.constants_first(jax.make_jaxpr(function)(*structs))
    inner = jaxpr_as_fun(closed) if consts else function

    def compiled(*args: Any) -> list[Any]:
        return list(inner(*args))

    compiled.__name__ = name
    first = tuple(jax.device_put(list(consts), host))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in first]
    donated = tuple(n + len(first) for n in donate)
    executable = (
        jax.jit(compiled, keep_unused=True, donate_argnums=donated)
        .lower(*types, *structs)
        .compile()
    )
    return Bound(executable, first) if first else executable
