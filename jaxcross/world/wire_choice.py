"""Chooses the library for the exchanges, mpi4jax or mpi4py, for all ranks alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from jaxcross.errors import ExchangeError
from jaxcross.wire import WireLibrary

VARIABLE = "JAXCROSS_WIRE"
CHOICES: tuple[WireLibrary, ...] = get_args(WireLibrary)


def chosen(argument: str | None, environ: Mapping[str, str]) -> WireLibrary | None:
    """Returns the wire requested by `initialize(wire=...)`, or else by the environment, or None.

    Raises:
        ValueError: There's no such wire.
    """
    for what, value in (("`wire`", argument), (f"`{VARIABLE}`", environ.get(VARIABLE) or None)):
        if value is not None:
            if value not in CHOICES:
                raise ValueError(
                    f"{what} must be {' or '.join(map(repr, CHOICES))}, got {value!r}."
                )
            return cast(WireLibrary, value)
    return None


def default(accelerators: int, environ: Mapping[str, str]) -> tuple[WireLibrary, str]:
    """Returns a rank's wire if none was requested, and the reason unless it's mpi4jax.

    Args:
        accelerators: Number of accelerators on this node.
        environ: The environment. With `JAX_PLATFORMS=cpu`, the accelerators don't count.
    """
    if importlib.util.find_spec("mpi4jax") is None:
        return "mpi4py", "mpi4jax isn't installed"
    if accelerators and environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu":
        return (
            "mpi4py",
            "on accelerators, exchanges receive into buffers that a copy engine can read",
        )
    return "mpi4jax", ""


def check_equal(wires: Sequence[WireLibrary], reasons: Sequence[str] = ()) -> None:
    """Raises unless all ranks use the same wire.

    Mixing different wires has never been tested, and could deadlock.

    Args:
        wires: Each rank's wire.
        reasons: Why each rank uses its wire, as returned by `default`. Empty if the wire was
            requested or is mpi4jax.

    Raises:
        ExchangeError: The wires differ. The message is identical on all ranks.
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
            'the same one on every rank, with `initialize(wire="mpi4py")`, which works on all of '
            f"them, or with the environment variable `{VARIABLE}`."
        )
