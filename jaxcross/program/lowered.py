"""What `Wire.lower` returns: a collective segment, ready to be compiled for the host.

`Lowered` is the protocol. `Traceable` implements it for wires whose exchanges are part of the
executable. Wires that exchange outside of any executable bring their own implementation, which may
return results that live in the wire's memory.
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
    """A jaxpr whose exchanges have been replaced with the wire's own operations."""

    @property
    def lent(self) -> Sequence[int]:
        """Positions of the results that may live in the wire's memory.

        XLA can't reuse such a buffer, so it has to copy the array before overwriting it.
        """
        ...

    def compile(
        self, structs: Sequence[Any], /, *, name: str, host: Any, place: Sharding | None
    ) -> Any:
        """Compiles to a function of flat arrays that runs on the host and waits for its peers.

        Waits for XLA. Like an executable, the returned function has a `memory_analysis` method.

        Args:
            structs: Types of the arguments.
            name: The executable's name in profiles.
            host: CPU device to run on.
            place: Sharding of the arguments, or None to leave their placement to JAX.
        """
        ...


@dataclass(
    frozen=True, slots=True, weakref_slot=True
)  # `jax.jit` crashes on functions that don't support weak references
class Traceable:
    """A jaxpr as a function that compiles to a single executable, exchanges included."""

    function: Callable[..., Sequence[Any]]

    @property
    def lent(self) -> Sequence[int]:
        """Empty, because all results are allocated by XLA."""
        return ()

    def __call__(self, *args: Any) -> list[Any]:
        return list(self.function(*args))

    def compile(
        self, structs: Sequence[Any], /, *, name: str, host: Any, place: Sharding | None
    ) -> Any:
        """Compiles the function for the host; see `Lowered.compile`."""
        return compile_with_arguments(self, structs, name=name, host=host, place=place)


def struct_of(aval: Any, place: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Returns an abstract value as an argument type, committed to `place` unless that's None."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=place, weak_type=getattr(aval, "weak_type", False)
    )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Bound:
    """An executable with its first arguments bound, which are passed on every call."""

    call: Any
    first: tuple[Any, ...]

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.call(*self.first, *args)

    def memory_analysis(self) -> Any:
        """Returns XLA's memory figures for the executable."""
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
    """Compiles a function for the host, passing the arrays that its trace closes over as arguments.

    XLA would embed the values of a closed-over array in the code, and two kernels that differ only
    in these values would be compiled separately. Returns once XLA has compiled the function.

    Args:
        function: Takes and returns flat arrays.
        structs: Argument types.
        name: The executable's name in profiles.
        host: CPU device that holds the closed-over arrays.
        place: Sharding of these arrays, or None to leave their placement to JAX.
        donate: Positions of the arguments that the executable may overwrite.
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
