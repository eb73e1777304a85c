"""Gathers texts among the ranks that exchange with one another, directly or through others.

The ranks that exchange with each other (the partners) form a graph. We gather the texts of a
connected component of this graph, and the rest of the world doesn't take part.

The gathering proceeds in rounds. In each round a rank sends what it knows to its partners and
receives what they know. It stops once it has the text of every rank that any known rank names as a
partner, and flags its last message to each partner as such. The partner then also has all texts. So
each rank receives exactly the messages that its partners send, and none is left over for the next
gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Every round has its own tag, so that its messages can't be confused with those of another round: a
# rank that receives from any sender selects messages by the tag.
_FIRST_TAG = 1000

Known = dict[int, tuple[str, frozenset[int]]]
Accepts = Callable[[Mapping[int, str], str | None], bool]


class Neighbours:
    """Gathers the texts of connected ranks, one gathering at a time.

    Args:
        comm: An mpi4py communicator on which nothing else sends point-to-point messages.
    """

    __slots__ = ("_comm", "_early")

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        # First messages of ranks that will be partners in a later gathering.
        self._early: dict[int, Any] = {}

    def gather(
        self, text: str, partners: Iterable[int], *, accepts: Accepts | None = None
    ) -> dict[int, str]:
        """Returns the texts of all ranks that are connected with this one.

        Waits for these ranks, each of which must call it.

        Args:
            text: This rank's text.
            partners: The ranks with which this rank exchanges. The relation is symmetric: this rank
                must be a partner of each of its partners.
            accepts: Needed if this rank can't name all of its partners in advance. It gets two
                arguments: the texts received so far, by rank, and the text of another rank that
                names this rank as a partner. It returns whether that rank is a partner, too. If the
                second argument is None, it returns whether there are more partners to come.

        Returns:
            The texts by rank, including this rank's own. Identical on all connected ranks.
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
            self._early[p] = message  # the sender waits for an answer before it sends another


def _learn(known: Known, theirs: Known) -> None:
    for rank, (text, partners) in theirs.items():
        # A rank may find further partners while it waits, so the longer list is newer.
        if rank not in known or len(known[rank][1]) < len(partners):
            known[rank] = text, partners


def _is_closed(known: Known) -> bool:
    return all(
        p in known and r in known[p][1] for r, (_, partners) in known.items() for p in partners
    )


def _texts(known: Known, received: Mapping[int, tuple[Known, bool]]) -> dict[int, str]:
    texts = {rank: text for rank, (text, _) in known.items()}
    texts.update({p: message[0][p][0] for p, message in received.items()})
    return texts
