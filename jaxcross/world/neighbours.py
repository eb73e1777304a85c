"""Texts of the ranks that exchange with one another, directly or through others; the rest of the
world takes no part.

Each rank sends what it knows to its partners and receives what they know, in rounds, until it knows
every rank that a known rank is a partner of. Its last message to a partner says so. The partner
then knows everything, too, so that each rank receives exactly the messages that its partners send,
and none is left over for the next gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

# A round's messages must not be taken for those of another one: a rank that waits for any sender
# looks at the tag.
_FIRST_TAG = 1000

Known = dict[int, tuple[str, frozenset[int]]]
Accepts = Callable[[Mapping[int, str], str | None], bool]


class Neighbours:
    """Gathers texts of connected ranks, one gathering at a time.

    Args:
        comm: An mpi4py communicator on which nothing else sends single messages.
    """

    __slots__ = ("_comm", "_early")

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._early: dict[
            int, Any
        ] = {}  # first messages of ranks that are partners in a later gathering

    def gather(
        self, text: str, partners: Iterable[int], *, accepts: Accepts | None = None
    ) -> dict[int, str]:
        """The texts of all ranks that are connected with this one. Waits for them; each must call
        it.

        Args:
            text: This rank's.
            partners: The ranks it exchanges with. A rank is a partner of its partners.
            accepts: Given for a rank that cannot name all of its partners. Of the texts by rank
                that it has, and the text of another rank that names this one: whether that is a
                partner, too. With None for that text: whether more partners are to come.

        Returns:
            The texts by rank, this one's included; the same on all connected ranks.
        """
        comm = self._comm
        me = self._comm.Get_rank()
        mine = set(partners)
        known: Known = {me: (text, frozenset(mine))}
        requests = [comm.isend((dict(known), False), dest=p, tag=_FIRST_TAG) for p in sorted(mine)]
        received = {p: self._first_from(p) for p in sorted(mine)}
        sent_to: dict[int, Known] = {p: dict(known) for p in mine}
        while accepts is not None and accepts(_texts(known, received), None):
            p, message = self._first_from_any(
                lambda theirs: accepts(_texts(known, received), theirs)
            )
            received[p] = message
            mine.add(p)
            known[me] = (text, frozenset(mine))
            requests.append(comm.isend((dict(known), False), dest=p, tag=_FIRST_TAG))
            sent_to[p] = dict(known)
        for theirs, _ in received.values():
            _learn(known, theirs)
        open_from = set(mine)
        tag = _FIRST_TAG
        finished = False
        while open_from or not finished:
            tag += 1
            last = not finished and _is_closed(known)
            if not finished:
                for p in sorted(mine):
                    new = {r: k for r, k in known.items() if sent_to[p].get(r) != k}
                    requests.append(comm.isend((new, last), dest=p, tag=tag))
                    sent_to[p] = dict(known)
            for p in sorted(open_from):
                theirs, over = comm.recv(source=p, tag=tag)
                _learn(known, theirs)
                if over:
                    open_from.discard(p)
            finished = finished or last
        for request in requests:
            request.wait()
        return {rank: known[rank][0] for rank in sorted(known)}

    def _first_from(self, partner: int) -> Any:
        if partner in self._early:
            return self._early.pop(partner)
        return self._comm.recv(source=partner, tag=_FIRST_TAG)

    def _first_from_any(self, accepts: Callable[[str], bool]) -> tuple[int, Any]:
        from mpi4py import MPI

        for p, message in self._early.items():
            if accepts(message[0][p][0]):
                return p, self._early.pop(p)
        status = MPI.Status()
        while True:
            message = self._comm.recv(source=MPI.ANY_SOURCE, tag=_FIRST_TAG, status=status)
            p = status.Get_source()
            if accepts(message[0][p][0]):
                return p, message
            self._early[p] = message  # it waits for an answer to this one, and sends no other


def _learn(known: Known, theirs: Known) -> None:
    for rank, (text, partners) in theirs.items():
        if rank not in known or len(known[rank][1]) < len(
            partners
        ):  # a rank may find partners while it waits
            known[rank] = text, partners


def _is_closed(known: Known) -> bool:
    return all(
        p in known and r in known[p][1] for r, (_, partners) in known.items() for p in partners
    )


def _texts(known: Known, received: Mapping[int, tuple[Known, bool]]) -> dict[int, str]:
    texts = {rank: text for rank, (text, _) in known.items()}
    texts.update({p: message[0][p][0] for p, message in received.items()})
    return texts
