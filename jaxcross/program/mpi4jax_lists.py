"""Checks by simulation whether the ranks' lists of MPI calls fit together.

**Problem.** A step may call mpi4jax directly, and these calls may legitimately differ between
ranks: what one rank sends, another receives. So we can't insist that all ranks make the same calls.
But if the calls don't fit together, the step can hang, so going without a check isn't an option
either.

**Idea.** We run all lists against each other. This finds messages that nobody receives, mismatched
calls, and deadlocks. A send never blocks in the simulation, as if it were buffered. A receive
blocks until there's a message with a matching communicator, source and tag. A collective blocks
until all members of its communicator have reached it.

In each round, every rank makes calls until it blocks. The simulation ends with a round in which no
rank makes progress; any rank that still has calls left is then deadlocked.

**Why one simulation is enough.** If all receives name their source, there's only one way to match
up the messages, so the outcome doesn't depend on which rank runs first. Once a receive accepts any
source, that's no longer true, so we skip the check. The same goes for a few other cases; see
`can_simulate`.

**Limits.** A step that relies on buffered sends passes the check, even though MPI may not buffer a
large message.

This module is pure: it neither communicates nor depends on MPI.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxcross.program.ir import Exchange

PREFIX = "mpi."
"""Prefix of `Exchange.op` for mpi4jax calls."""
_ROOTED = ("bcast", "gather", "reduce", "scatter")


def is_call(exchange: Exchange) -> bool:
    """Whether an exchange is an mpi4jax call."""
    return exchange.op.startswith(PREFIX)


def encode(calls: Iterable[Exchange]) -> str:
    """Serializes one rank's calls, so that they can be sent to other ranks."""
    return json.dumps([[x.op, x.axes, x.dtype, x.shape, x.params, x.source] for x in calls])


def decode(text: str) -> tuple[Exchange, ...]:
    """Parses what `encode` returned."""
    return tuple(
        Exchange(
            op=op,
            axes=tuple(axes),
            dtype=dtype,
            shape=tuple(shape),
            params=_tuples(params),
            source=source,
        )
        for op, axes, dtype, shape, params, source in json.loads(text)
    )


def comparison_text(calls: Iterable[Exchange]) -> str:
    """Returns a text that only depends on the calls, not on where the user makes them."""
    return "\n".join(x.line() for x in calls)


def partners(calls: Iterable[Exchange], rank: int) -> set[int]:
    """Returns the other ranks that these calls of `rank` exchange with, as far as they're named."""
    found: set[int] = set()
    for x in calls:
        params = dict(x.params)
        ranks = params["ranks"]
        named = [params[end] for end in ("source", "dest") if end in params]
        # A send or receive has a single peer, whereas a collective involves all members of the
        # communicator.
        if named:
            found.update(ranks[n] for n in named if isinstance(n, int))
        else:
            found.update(ranks)
    return found - {rank}


def names_peers(calls: Iterable[Exchange]) -> bool:
    """Whether any call is a send or a receive."""
    return any("dest" in params or "source" in params for params in (dict(x.params) for x in calls))


def expects_unknown(calls: Iterable[Exchange]) -> bool:
    """Whether any call accepts messages from any source."""
    return any(dict(x.params).get("source") == "any" for x in calls)


def all_senders_known(lists: Mapping[int, Sequence[Exchange]], rank: int) -> bool:
    """Whether the lists contain at least as many sends to `rank` as `rank` has receives."""
    wanted = sum(x.times for x in lists[rank] if dict(x.params).get("source") is not None)
    sent = sum(x.times for calls in lists.values() for x in calls if _dest(x) == rank)
    return sent >= wanted


def sends_to(calls: Iterable[Exchange], rank: int, others: Iterable[Exchange]) -> bool:
    """Whether `others` contains a message that `rank` might receive from an unnamed source.

    Args:
        calls: The calls made by `rank`.
        rank: The receiving rank.
        others: The calls made by some other rank.
    """
    wanted = {
        (_comm(x), dict(x.params)["recv_tag"])
        for x in calls
        if dict(x.params).get("source") == "any"
    }
    sent = [(_comm(x), dict(x.params)["send_tag"]) for x in others if _dest(x) == rank]
    return any((comm, tag) in wanted or (comm, "any") in wanted for comm, tag in sent)


def can_simulate(lists: Mapping[int, Sequence[Exchange]]) -> bool:
    """Whether the lists alone determine the outcome.

    They don't if a call receives from any source, if it's inside a loop or conditional, or if two
    communicators can't be told apart. In these cases, we don't know which messages match.
    """
    return not any(
        "loop" in params or params.get("source") == "any" or "#" in params.get("comm", "")
        for calls in lists.values()
        for params in (dict(x.params) for x in calls)
    )


def mismatch(name: str, lists: Mapping[int, Sequence[Exchange]]) -> str | None:
    """Returns an `ExchangeError` text if the ranks' calls don't fit together, or None if they do.

    Also None if the lists can't be simulated.

    Args:
        name: The step.
        lists: Each rank's calls, in the order it makes them. Must include every rank that's named
            by any of these calls.
    """
    if not can_simulate(lists):
        return None
    run = _Simulation(lists)
    try:
        run.finish()
    except _MisfitError as misfit:
        return f"the mpi4jax calls of `{name}` do not fit together: {misfit}"
    if run.blocked():
        lines = "\n".join(f"    rank {r} {run.blocked_text(r)}" for r in run.blocked())
        return (
            f"the mpi4jax calls of `{name}` would wait for each other forever:\n{lines}\n"
            "Make the calls in an order in which each one finds its partners: for example all "
            "ranks first exchange along rows, then along columns; between two ranks one sends "
            "first and the other receives first, or both call `sendrecv`."
        )
    return None


class _MisfitError(Exception): ...


@dataclass(slots=True)
class _Simulation:
    """All ranks' calls, each rank's next call, and the messages in flight."""

    lists: Mapping[int, Sequence[Exchange]]
    at: dict[int, int] = field(init=False)
    sent: set[int] = field(
        default_factory=set
    )  # ranks whose current call has already sent its message
    mail: dict[tuple[Any, int, int], deque[Exchange]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = dict.fromkeys(sorted(self.lists), 0)

    def finish(self) -> None:
        """Runs all ranks until none of them can make another call."""
        before = None
        while (self.at, self.sent) != before:  # a `sendrecv` that has sent counts as progress
            before = dict(self.at), set(self.sent)
            for rank in self.at:
                self._advance(rank)
        # While a rank is blocked, messages may be left over only because it hasn't got around to
        # receiving them. The actual error is the deadlock, so report that instead.
        for (_, source, dest), messages in self.mail.items():
            if messages and not self.blocked():
                raise _MisfitError(
                    f"rank {source} calls {_text(messages[0])}, but rank {dest} does not receive "
                    "this message. Add the receive, or leave out the send."
                )

    def blocked(self) -> list[int]:
        """Returns the ranks that still have calls left."""
        return [rank for rank in self.at if self._call(rank) is not None]

    def blocked_text(self, rank: int) -> str:
        call = self._call(rank)
        assert call is not None
        return (
            f"is blocked in its call {self.at[rank] + 1} of {len(self.lists[rank])}: {_text(call)}"
        )

    def _call(self, rank: int) -> Exchange | None:
        calls = self.lists.get(rank, ())
        return calls[self.at[rank]] if rank in self.at and self.at[rank] < len(calls) else None

    def _advance(self, rank: int) -> None:
        """Makes a rank's calls until it blocks."""
        while (call := self._call(rank)) is not None and self._make(rank, call):
            pass

    def _make(self, rank: int, call: Exchange) -> bool:
        kind = call.op.removeprefix(PREFIX)
        if kind not in ("send", "recv", "sendrecv"):
            return self._collective(call)
        params = dict(call.params)
        comm = _comm(call)
        # We may get here several times before a `sendrecv` has received its message, but it must
        # send only once.
        if params.get("dest") is not None and rank not in self.sent:
            dest = _member(call, rank, "dest")
            self.mail.setdefault((comm, rank, dest), deque()).append(call)
            self.sent.add(rank)
        if params.get("source") is not None:
            source = _member(call, rank, "source")
            mail = self.mail.get((comm, source, rank), deque())
            tag = params["recv_tag"]
            # MPI messages between two ranks don't overtake each other, so the first message with a
            # matching tag is received.
            found = next((m for m in mail if tag in ("any", dict(m.params)["send_tag"])), None)
            if found is None:
                return False
            mail.remove(found)
            _check_message(rank, call, source, found)
        self.sent.discard(rank)
        self.at[rank] += 1
        return True

    def _collective(self, call: Exchange) -> bool:
        ranks = dict(call.params)["ranks"]
        comm = _comm(call)
        calls = [self._call(rank) for rank in ranks]
        # Wait until every member's next call is a collective on this communicator.
        if any(c is None or _comm(c) != comm or _dest(c, named=True) for c in calls):
            return False
        first = calls[0]
        for rank, other in zip(ranks, calls, strict=True):
            assert first is not None and other is not None
            if _shared(other, rank) != _shared(first, ranks[0]):
                raise _MisfitError(
                    "these collective calls match up, but differ:\n    rank "
                    f"{ranks[0]} makes {_text(first)}\n    rank {rank} makes {_text(other)}\nAll "
                    "members of a communicator must make the same collective calls, with the same "
                    "numbers of elements, types, operators and roots."
                )
        for rank in ranks:
            self.at[rank] += 1
        return True


def _shared(call: Exchange, rank: int) -> tuple[Any, ...]:
    """Returns what a collective call must have in common on all members of the communicator."""
    # An exchange over named axes must be the same on all members.
    if not is_call(call):
        return (call.line(),)
    params = dict(call.params)
    kind = call.op.removeprefix(PREFIX)
    if kind == "barrier":
        return (kind,)
    count: float = call.count
    ranks = params["ranks"]
    # The root of a scatter passes in a block for each member.
    if kind == "scatter" and ranks[params["root"]] == rank:
        count /= len(ranks)
    return (
        kind,
        call.dtype,
        count,
        params.get("reduction"),
        params.get("root") if kind in _ROOTED else None,
    )


def _check_message(rank: int, call: Exchange, source: int, message: Exchange) -> None:
    params = dict(call.params)
    dtype = params.get("recv_dtype", call.dtype)
    shape = params.get("recv_shape", call.shape)
    if (message.dtype, message.count) != (dtype, math.prod(shape)):
        raise _MisfitError(
            f"a message is not what its receiver expects:\n    rank {source} calls "
            f"{_text(message)}\n    rank {rank} calls {_text(call)}\n"
            "The message must have as many elements as the receiver expects, of the same type."
        )


def _member(call: Exchange, rank: int, end: str) -> int:
    params = dict(call.params)
    ranks = params["ranks"]
    number = params[end]
    if not 0 <= number < len(ranks):
        raise _MisfitError(
            f"rank {rank} calls {_text(call)}, but `{end}` must be a rank of the communicator, 0 "
            f"to {len(ranks) - 1}, got {number}."
        )
    return ranks[number]


def _dest(call: Exchange, *, named: bool = False) -> int | bool | None:
    """Returns the world rank that a call sends to or, with `named`, whether it names any peer."""
    params = dict(call.params)
    if named:
        return "dest" in params or "source" in params
    number = params.get("dest")
    ranks = params["ranks"]
    return ranks[number] if isinstance(number, int) and 0 <= number < len(ranks) else None


def _comm(call: Exchange) -> tuple[Any, ...]:
    """Returns a key that tells communicators apart, by their members in order and their name."""
    params = dict(call.params)
    return params["ranks"], params.get("comm", ""), is_call(call)


def _text(call: Exchange) -> str:
    """Describes a call for an error text, numbering the ranks as in `COMM_WORLD`."""
    params = dict(call.params)
    ranks = params["ranks"]
    kind = call.op.removeprefix(PREFIX)
    text = f"`{kind}` of {call.dtype}{list(call.shape)}" if kind != "barrier" else "`barrier`"
    for end, word in (("dest", "to"), ("source", "from")):
        number = params.get(end)
        if isinstance(number, int):
            rank = ranks[number] if 0 <= number < len(ranks) else number
            text += f" {word} rank {rank}"
    for key, word in (
        ("send_tag", "send tag"),
        ("recv_tag", "receive tag"),
        ("reduction", "operator"),
    ):
        if params.get(key, "any") != "any":
            text += f", {word} {params[key]}"
    if kind in _ROOTED:
        text += f", root {ranks[params['root']]}"
    if "dest" not in params and "source" not in params:
        text += f" over ranks {', '.join(map(str, ranks))}"
    return f"{text}, at {call.source or 'unknown line'}"


def _tuples(value: object) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
