"""Which library makes the exchanges: mpi4jax, or mpi4py on host buffers. All ranks must use the
same one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from jaxcross.errors import ExchangeError
from jaxcross.wire.mpi_wire import Over

VARIABLE = "JAXCROSS_WIRE"
CHOICES: tuple[Over, ...] = get_args(Over)


def chosen(argument: str | None, environ: Mapping[str, str]) -> Over | None:
    """Returns what `initialize(wire=...)` or else the environment asks for, None if neither does.

    Raises:
        ValueError: There's no wire of that name.
    """
    for what, value in (("`wire`", argument), (f"`{VARIABLE}`", environ.get(VARIABLE) or None)):
        if value is not None:
            if value not in CHOICES:
                raise ValueError(
                    f"{what} must be {' or '.join(map(repr, CHOICES))}, got {value!r}."
                )
            return cast(Over, value)
    return None


def default(accelerators: int, environ: Mapping[str, str]) -> tuple[Over, str]:
    """Returns the wire of a rank that asks for none, and why if that isn't mpi4jax.

    Args:
        accelerators: How many the node has.
        environ: `JAX_PLATFORMS=cpu` leaves them alone.
    """
    if importlib.util.find_spec("mpi4jax") is None:
        return "mpi4py", "mpi4jax isn't installed"
    if accelerators and environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu":
        return (
            "mpi4py",
            "on accelerators, exchanges receive into buffers that a copy engine can read",
        )
    return "mpi4jax", ""


def check_equal(wires: Sequence[Over], reasons: Sequence[str] = ()) -> None:
    """Makes sure that all ranks use one wire: ranks that mix them aren't tested, and may wait for
    each other for ever.

    Args:
        wires: By rank.
        reasons: Why each rank has its wire, as of `default`; empty if it was asked for or is
            mpi4jax.

    Raises:
        ExchangeError: They don't; the same text on every rank.
    """
    if len(set(wires)) > 1:
        why = "; ".join(dict.fromkeys(filter(None, reasons)))
        ranks = {
            name: [str(rank) for rank, wire in enumerate(wires) if wire == name] for name in CHOICES
        }
        found = "; ".join(
            f"{name} on rank{'s' * (len(on) > 1)} {', '.join(on)}" for name, on in ranks.items()
        )
        raise ExchangeError(
            f"Ranks would exchange by different libraries: {found}{why and f' ({why})'}. Choose "
            'one on every rank: by `initialize(wire="mpi4py")`, which all of them can use, or by '
            f"the variable `{VARIABLE}`."
        )
