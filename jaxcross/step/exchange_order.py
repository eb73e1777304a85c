"""Checks that all ranks make the same exchanges in the same order.

Equal signatures don't guarantee that: two exchanges of the same kind, shape and type look alike.
Their labels (`jaxcross.program.exchange_labels`) distinguish them.
"""

from __future__ import annotations

import functools

from jaxcross.errors import ExchangeError
from jaxcross.program.exchange_labels import describe, find_swapped, label_text, order_of
from jaxcross.program.ir import Program, hash_62
from jaxcross.program.mismatch import order_mismatch
from jaxcross.wire.rank_grid import make_rank_grid
from jaxcross.wire.recognise import group_of
from jaxcross.world.control_plane import Control, all_equal


def order_hash(program: Program) -> int:
    """Returns a 62-bit hash of the labels of a program's exchanges, in their order.

    It may differ between ranks that fit together, because a short batch may change labels. Does not
    wait or communicate. See `jaxcross.program.exchange_labels`.
    """
    return hash_62(label_text(order_of(program)))


def agree_on_order(control: Control, program: Program, own: int) -> None:
    """Makes sure that ranks with equal signatures make the same exchanges in the same order.

    Waits for all ranks.

    Args:
        control: Reaches all ranks.
        program: The program that this rank is about to run.
        own: Its `order_hash`, which takes time to compute.

    Raises:
        ExchangeError: The ranks don't; raised on every rank.
    """
    if not all_equal(control, own):
        check_order(control, program)


def check_order(control: Control, program: Program) -> None:
    """Does the work of `agree_on_order` if some ranks' labels differ. Waits for all ranks.

    Gathers 192 bytes per exchanged array from each rank.

    Raises:
        ExchangeError: The ranks make the same exchange in different places; raised on every rank.
    """
    order = order_of(program)

    @functools.cache
    def peers(place: int, rank: int) -> frozenset[int]:
        exchange = order[place].labelled.exchange
        if not exchange.axes:
            return frozenset(dict(exchange.params)["ranks"])  # of the user's communicator
        mesh = make_rank_grid(dict(program.axes), rank=rank, size=control.size)
        return frozenset(mesh.group(*group_of(exchange, mesh)))

    found = find_swapped(control.allgather_text(label_text(order)), peers)
    if found is not None:
        (one, here), (other, there) = found
        mine = [describe(program.traced, order[place]) for place in sorted((here, there))]
        words = control.allgather_text("\n        ".join(mine))
        raise ExchangeError(order_mismatch(program.name, (one, other), words))
