"""Gathers texts among ranks that exchange with each other, directly or via other ranks.

Think of the ranks as a graph whose edges connect partners, i.e. ranks that exchange with each
other. Sometimes a rank needs the texts of its whole connected component, e.g. to compare which step
everyone is calling. A collective over the whole world would be simpler, but ranks outside the
component may be busy with something else and must not have to take part.

Instead, texts spread in rounds. In each round, every rank sends its partners everything it knows,
and receives what they know. A rank is done once it has the text of every rank that's named as a
partner by any rank it knows of. It then sends its partners a final message, flagged as such, which
leaves them with all the texts as well. Ranks receive exactly the messages their partners send, so
nothing is left over that the next gathering could receive by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Each round of a gathering uses its own MPI tag. A partner may already be a round ahead, and a rank
# that receives from any sender must not mistake that partner's message for one that belongs to the
# current round.
_FIRST_TAG = 1000

Known = dict[int, tuple[str, frozenset[int]]]
Accepts = Callable[[Mapping[int, str], str | None], bool]


class Neighbours:
    """Gathers texts from all connected ranks, one gathering at a time.

    Args:
        comm: An mpi4py communicator on which nothing else sends point-to-point messages.
    """

    __slots__ = ("_comm", "_early")

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        # First messages that arrived early, from ranks that won't be partners until a later
        # gathering.
        self._early: dict[int, Any] = {}

    def gather(
        self, text: str, partners: Iterable[int], *, accepts: Accepts | None = None
    ) -> dict[int, str]:
        """Returns the texts of all ranks connected to this one.

        Waits for these ranks, all of which have to make this call.

        Args:
            text: This rank's text.
            partners: The ranks that this rank exchanges with. They must name this rank as a partner
                in turn.
            accepts: Needed if this rank doesn't know all of its partners up front. It's called with
                the texts received so far, by rank, and the text of a rank that names this one as a
                partner; it returns whether that rank really is a partner. If the second argument is
                None, it returns whether there are more partners to come.

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
            self._early[p] = message  # at most one per rank, since the sender waits for an answer


def _learn(known: Known, theirs: Known) -> None:
    for rank, (text, partners) in theirs.items():
        # A rank may discover more partners during the gathering, so the longer list is more recent.
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
