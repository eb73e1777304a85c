"""Tests lists of mpi4jax calls against each other: which match, which deadlock, and what the errors
say.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.program.ir import Exchange
from jaxcross.program.mpi4jax_lists import (
    all_senders_known,
    decode,
    encode,
    expects_unknown,
    mismatch,
    partners,
)

WORLD = (0, 1, 2, 3)


def call(
    op: str, *, shape: tuple[int, ...] = (4,), dtype: str = "float32", **params: Any
) -> Exchange:
    """Returns an mpi4jax call on a communicator of all ranks, unless `ranks` is given."""
    params = {"ranks": WORLD, **params}
    return Exchange(
        op=f"mpi.{op}",
        axes=(),
        dtype=dtype,
        shape=shape,
        params=tuple(params.items()),
        source="run.py:7",
    )


def send(dest: int | None, tag: int = 0, **more: Any) -> Exchange:
    return call("send", dest=dest, send_tag=tag, **more)


def recv(source: int | str | None, tag: int | str = "any", **more: Any) -> Exchange:
    return call("recv", source=source, recv_tag=tag, **more)


def sendrecv(source: int | None, dest: int | None, **more: Any) -> Exchange:
    more = {"recv_dtype": "float32", "recv_shape": (4,), **more}
    return call("sendrecv", source=source, dest=dest, send_tag=0, recv_tag="any", **more)


def lists(*calls: list[Exchange]) -> dict[int, list[Exchange]]:
    return dict(enumerate(calls))


LOOP = {"loop": "scan 3"}
TOP, LEFT, RIGHT = {"ranks": (0, 1)}, {"ranks": (0, 2)}, {"ranks": (1, 3)}
FITTING = {
    "nothing": lists([], []),
    "one sends, one receives": lists([send(1)], [recv(0)]),
    "sends are buffered": lists([send(1), recv(1)], [send(0), recv(0)]),
    "a domain with walls": lists(
        [send(1), recv(1)],
        [recv(0), send(0), send(2), recv(2)],
        [recv(1), send(1), send(3), recv(3)],
        [recv(2), send(2)],
    ),
    "a ring": lists(*([sendrecv((r - 1) % 4, (r + 1) % 4)] for r in WORLD)),
    "to itself": lists([sendrecv(0, 0)]),
    "walls by PROC_NULL": lists([sendrecv(None, 1)], [sendrecv(0, None)]),
    "tags overtake": lists([send(1, 5), send(1, 6)], [recv(0, 6), recv(0, 5)]),
    "scatter is larger at the root": lists(
        *([call("scatter", shape=(4, 3) if r == 2 else (3,), root=2)] for r in WORLD)
    ),
    "groups that do not overlap": lists(
        *([call("allreduce", ranks=g, reduction="SUM")] for g in ((0, 1), (0, 1)))
    ),
    "barriers of any shape": lists(*([call("barrier", shape=(0,))] for _ in WORLD)),
    "a ring that closes at a rank that comes last": lists(
        [sendrecv(3, 3)],
        [],
        [recv(3, 1)],
        [send(2, 1), sendrecv(0, 0)],
    ),
    "any source is not run": lists([recv("any")], []),
    "loops are not run": lists([recv(1, **LOOP)], [recv(0)]),
    "two communicators look alike": lists([recv(1, comm="#1")], [recv(0)]),
}
BLOCKING = {
    "both receive first": (lists([recv(1), send(1)], [recv(0), send(0)]), (0, 1)),
    "rows and columns in opposite order": (
        lists(
            [call("barrier", **TOP), call("barrier", **LEFT)],
            [call("barrier", **TOP), call("barrier", **RIGHT)],
            [call("barrier", **LEFT)],
            [call("barrier", **RIGHT)],
        )
        | {0: [call("barrier", **LEFT), call("barrier", **TOP)], 2: []},
        (0, 1, 3),
    ),
    "a chain that comes round": (
        lists(*([recv((r - 1) % 3), send((r + 1) % 3)] for r in range(3))),
        (0, 1, 2),
    ),
    "another tag": (lists([send(1, 5)], [recv(0, 6)]), (1,)),
    "one rank makes no call": (
        lists([call("barrier")], [call("barrier")], [call("barrier")], []),
        (0, 1, 2),
    ),
    "a barrier before a send": (
        lists([call("barrier", **TOP)], [recv(0), call("barrier", **TOP)]),
        (0, 1),
    ),
}
UNFIT = {
    "another type": (lists([send(1)], [recv(0, dtype="int32")]), "int32"),
    "a shorter message": (lists([send(1, shape=(3,))], [recv(0)]), "as many elements"),
    "another operator": (
        lists(*([call("allreduce", ranks=(0, 1), reduction=op)] for op in ("SUM", "MAX"))),
        "operator MAX",
    ),
    "another collective": (
        lists([call("bcast", root=0, **TOP)], [call("allgather", **TOP)]),
        "`allgather`",
    ),
    "another root": (lists(*([call("bcast", root=r, **TOP)] for r in (0, 1))), "root 1"),
    "a message that is not received": (lists([send(1)], []), "does not receive this message"),
    "no such rank": (lists([send(9)]), "`dest` must be a rank of the communicator, 0 to 3, got 9"),
}


@pytest.mark.parametrize("name", FITTING)
def test_valid_lists_fit(name: str) -> None:
    assert mismatch("step", FITTING[name]) is None


@pytest.mark.parametrize("name", BLOCKING)
def test_blocked_ranks_are_named_with_their_lines(name: str) -> None:
    calls, blocked = BLOCKING[name]
    text = mismatch("step", calls)
    assert text is not None and "forever" in text
    assert [r for r in calls if f"rank {r} is blocked in its call" in text] == list(blocked)
    assert text.count("run.py:7") == len(blocked)


@pytest.mark.parametrize("name", UNFIT)
def test_calls_that_do_not_match_are_an_error(name: str) -> None:
    calls, said = UNFIT[name]
    text = mismatch("step", calls)
    assert text is not None and said in text and "run.py:7" in text


def test_text_of_calls_is_read_back() -> None:
    calls = (send(1, 3), sendrecv(None, 2), call("reduce", root=0, reduction="SUM", comm="halo"))
    assert decode(encode(calls)) == calls


def test_partners_are_peers_and_members() -> None:
    group = {"ranks": (3, 1)}
    assert partners([send(2), recv(None), recv("any")], 0) == {2}
    assert partners([send(0, **group)], 1) == {3}  # the index is a rank of the communicator
    assert partners([call("barrier", **group)], 1) == {3}
    assert partners([sendrecv(0, 0)], 0) == set()


def test_receives_from_any_source_count_their_senders() -> None:
    calls = {0: [recv("any"), recv("any")], 1: [send(0)]}
    assert expects_unknown(calls[0]) and not expects_unknown(calls[1])
    assert not all_senders_known(calls, 0)
    assert all_senders_known({**calls, 2: [send(0)]}, 0)


# Random schedules of exchanges between ranks. Every rank makes its calls in the order in which we
# draw the exchanges, and each exchange is valid by itself, so the calls of all ranks match up.

COMMS = (WORLD, (0, 1), (2, 3), (1, 2, 3), (3, 0))


@st.composite
def schedules(draw: st.DrawFn) -> dict[int, list[Exchange]]:
    found: dict[int, list[Exchange]] = {r: [] for r in WORLD}
    for _ in range(draw(st.integers(1, 7))):
        ranks = draw(st.sampled_from(COMMS))
        kind = draw(st.sampled_from(["message", "ring", "barrier", "allreduce"]))
        if kind == "message":
            source, dest = draw(st.permutations(range(len(ranks))))[:2]
            tag = draw(st.integers(0, 1))
            found[ranks[source]].append(send(dest, tag, ranks=ranks))
            found[ranks[dest]].append(
                recv(source, draw(st.sampled_from(["any", tag])), ranks=ranks)
            )
        elif kind == "ring":
            for n, rank in enumerate(ranks):
                found[rank].append(
                    sendrecv((n - 1) % len(ranks), (n + 1) % len(ranks), ranks=ranks)
                )
        else:
            for rank in ranks:
                more = {"reduction": "SUM"} if kind == "allreduce" else {}
                found[rank].append(call(kind, ranks=ranks, **more))
    return found


@given(schedules())
def test_a_schedule_in_one_order_fits(calls: dict[int, list[Exchange]]) -> None:
    assert mismatch("step", calls) is None


@given(schedules(), st.data())
def test_swapping_two_calls_is_an_error_if_it_blocks(
    calls: dict[int, list[Exchange]], data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from([r for r in WORLD if len(calls[r]) > 1] or [0]))
    if len(calls[rank]) > 1:
        a, b = data.draw(st.permutations(range(len(calls[rank]))))[:2]
        calls[rank][a], calls[rank][b] = calls[rank][b], calls[rank][a]
    ends = terminal_states(calls)
    assert len(ends) == 1, "which rank goes first matters"
    assert (mismatch("step", calls) is not None) == (not ends.pop())


def terminal_states(calls: dict[int, list[Exchange]]) -> set[bool]:
    """Returns whether all calls have completed at the end, for every order in which ranks can
    proceed.
    """
    ends, seen, queue = set(), set(), deque([(tuple(0 for _ in WORLD), frozenset[int](), ())])
    while queue:
        state = queue.popleft()
        if state in seen:
            continue
        seen.add(state)
        after = list(moves(calls, *state))
        queue += after
        if not after:
            ends.add(all(state[0][r] == len(calls[r]) for r in WORLD))
    return ends


def moves(
    calls: dict[int, list[Exchange]],
    at: tuple[int, ...],
    sent: frozenset[int],
    mail: tuple[Any, ...],
) -> Any:
    """Yields the states reachable by one move of one rank. `mail` holds the messages in flight as
    `(comm, source, dest, tag)`.
    """
    here = {r: calls[r][at[r]] for r in WORLD if at[r] < len(calls[r])}
    for r, x in here.items():
        p = dict(x.params)
        ranks = p["ranks"]
        step = tuple(n + (k == r) for k, n in enumerate(at))
        if "dest" in p and r not in sent:
            letters = (*mail, (ranks, r, ranks[p["dest"]], p["send_tag"]))
            yield (at, sent | {r}, letters) if "source" in p else (step, sent, letters)
        elif "source" in p:
            mine = (ranks, ranks[p["source"]], r)
            n = next(
                (n for n, m in enumerate(mail) if m[:3] == mine and p["recv_tag"] in ("any", m[3])),
                None,
            )
            if n is not None:
                yield step, sent - {r}, mail[:n] + mail[n + 1 :]
        elif all(here.get(k) == x for k in ranks):
            yield tuple(n + (k in ranks) for k, n in enumerate(at)), sent, mail
