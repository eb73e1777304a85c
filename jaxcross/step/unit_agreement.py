"""How ranks agree on programs that call mpi4jax, whose calls may differ by rank.

Each rank's list of calls is run against the others'. Outside a runner only ranks that exchange with one another take
part; in a job all ranks do, and the calls get communicators of the job's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from jaxcross.errors import ExchangeError
from jaxcross.jobs import context as job_context
from jaxcross.program import rank_lists
from jaxcross.program.ir import Exchange, Program, hash_62
from jaxcross.step.exchange_order import agree_on_order, check_order, order_hash
from jaxcross.wire import MpiWire
from jaxcross.wire.calls import key_of
from jaxcross.wire.job_comms import Key
from jaxcross.world import World
from jaxcross.world.control_plane import Control

# Whether a program is one of these follows from its calls, on each rank by itself.
_REMEDY = "a rank without calls needs one to take its turns: `mpi4jax.barrier(comm=MPI.COMM_SELF)`"
Lists = Mapping[int, tuple[Exchange, ...]]


@dataclass(slots=True)
class Units:
    """What was agreed of a step's programs that call mpi4jax. Shared by all variants of a step.

    A rank agrees again where its own list changes, or what the step was called with except for shapes, such as a static
    argument: that changes on all ranks. Not where shapes alone change, as a batch may be shorter on one rank. Messages
    of other shapes change at both ends, so that all ranks that exchange with one another come.

    Attributes:
        latest: What was agreed last outside a runner: what else than types the step was called with, and this rank's
            list.
        of_job: By job, the hash of all lists for each of these.
    """

    latest: tuple[Any, str] | None = None
    of_job: WeakKeyDictionary[job_context.JobContext, dict[tuple[Any, str], str]] = field(
        default_factory=WeakKeyDictionary
    )

    def is_current(self, world: World, program: Program, asked: Any) -> bool:
        """Whether the latest agreement outside a runner holds for this program."""
        return self.latest == (asked, rank_lists.comparison_text(world.wire().calls(program)))

    def agree_alone(self, world: World, program: Program, asked: Any) -> None:
        """Makes sure that the calls fit together, outside a runner. Waits for the ranks that exchange with this one.

        Raises:
            ExchangeError: They do not; on each of those ranks.
        """
        calls = world.wire().calls(program)
        lists = _gathered(world, program, calls)
        self.latest = asked, rank_lists.comparison_text(calls)
        if (why := rank_lists.mismatch(program.name, lists)) is not None:
            raise ExchangeError(why)

    def agree_in(self, job: job_context.JobContext, world: World, program: Program, asked: Any) -> Program:
        """The program over the job's own communicators, once all ranks have agreed. Waits for all ranks.

        Raises:
            ExchangeError: The calls do not fit together; on every rank.
        """
        calls = world.wire().calls(program)
        agreed = self.of_job.setdefault(job, {})
        mine = asked, rank_lists.comparison_text(calls)
        digest = agreed.get(mine)
        if digest is None:
            new = " with these shapes: its messages must change on all ranks at the same step" if agreed else ""
            label = f"first call of `{program.name}`{new}, which calls mpi4jax ({_REMEDY})"
            order = order_hash(program) if world.size > 1 else 0  # not while the exchange lane waits for it
            digest = agreed[mine] = job.together(label, partial(_agree, job, world, program, calls, order))
        wire = MpiWire(world, comms=world.job_comms.for_job(job))
        return replace(program, calls=digest, traced=replace(program.traced, wire=wire))


def list_hash(world: World, program: Program) -> int:
    """This rank's list of calls as a number of 62 bits."""
    return hash_62(rank_lists.comparison_text(world.wire().calls(program)))


def _gathered(world: World, program: Program, calls: tuple[Exchange, ...]) -> Lists:
    """The lists of all ranks that exchange with this one, directly or through others. Waits for them.

    Raises:
        ExchangeError: All ranks have the same list, but in it the same exchange at different places.
    """
    rank, text, name = world.rank, rank_lists.encode(calls), program.name
    everyone = tuple(range(world.size))
    if not any(sorted(dict(x.params)["ranks"]) == list(everyone) and "dest" not in dict(x.params)
               and "source" not in dict(x.params) for x in calls):  # fmt: skip
        accepts = partial(_accepts, rank) if rank_lists.expects_unknown(calls) else None
        texts = world.gather_connected(name, text, rank_lists.partners(calls, rank), accepts=accepts)
        return {r: rank_lists.decode(t) for r, t in texts.items()}
    number, order = hash_62(rank_lists.comparison_text(calls)), order_hash(program)
    with world.watching(job=name, step=0, segment=-1, what="agreement"):
        # As long as the vector of `agree_alone`: a rank without calls may be there.
        low, high, first, last = world.control.allreduce_min(np.array([number, -number, order, -order], np.int64))
        if low == -high and first != -last:
            check_order(world.control, program)
        if low == -high and not rank_lists.names_peers(calls):
            return dict.fromkeys(everyone, calls)
        return _decoded(name, world.control.allgather_text(text))


def _accepts(rank: int, texts: Mapping[int, str], other: str | None) -> bool:
    """See `jaxcross.world.neighbours`."""
    lists = {r: rank_lists.decode(t) for r, t in texts.items()}
    if other is None:
        return not rank_lists.all_senders_known(lists, rank)
    return rank_lists.sends_to(lists[rank], rank, rank_lists.decode(other))


def _decoded(name: str, texts: list[str]) -> Lists:
    if others := [rank for rank, text in enumerate(texts) if not text.startswith("[")]:
        raise ExchangeError(without_calls(name, others))
    return {rank: rank_lists.decode(text) for rank, text in enumerate(texts)}


def without_calls(name: str, ranks: list[int]) -> str:
    """The message for ranks that call a step without any call of mpi4jax, while others make some."""
    return (
        f"`{name}` calls mpi4jax on some ranks, but not on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}:"
        f" {_REMEDY}."
    )


def _agree(
    job: job_context.JobContext,
    world: World,
    program: Program,
    calls: tuple[Exchange, ...],
    order: int,
    control: Control,
) -> str:
    """Compares all ranks' lists and makes the communicators that the job lacks. Waits for all ranks. Returns a hash."""
    job.check_alike(control)
    name = program.name
    own = json.dumps([rank_lists.encode(calls), world.job_comms.in_use()])
    told = [json.loads(text) for text in control.allgather_text(own)]
    lists = {rank: rank_lists.decode(text) for rank, (text, _) in enumerate(told)}
    if (why := rank_lists.mismatch(name, lists)) is not None:
        raise ExchangeError(why)
    named = [(rank, x) for rank, theirs in lists.items() for x in theirs if rank_lists.is_call(x)]
    if alike := next(((r, x) for r, x in named if "#" in dict(x.params).get("comm", "")), None):
        rank, call = alike
        raise ExchangeError(
            f"`{name}` uses two communicators of ranks {dict(call.params)['ranks']} that ranks cannot tell apart, on"
            f' rank {rank} at {call.source}. Give each a name, the same on all ranks: `comm.Set_name("halo")`.'
        )
    taken = {(_key(key), number) for _, busy in told for key, number in busy}
    own_comms = world.job_comms.for_job(job)
    for key in sorted({key_of(x) for _, x in named} - set(own_comms)):
        ranks, label = key
        if world.rank not in ranks:
            continue
        number = next(n for n in range(len(taken) + 1) if (key, n) not in taken)
        what = f"{ranks} {label} {number}"
        world.job_comms.assign(job, key, number, partial(world.new_communicator, ranks, what))
    texts = [rank_lists.comparison_text(theirs) for theirs in lists.values()]
    if len(set(texts)) == 1:
        agree_on_order(control, program, order)
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16]


def _key(value: Any) -> Key:
    ranks, label = value
    return tuple(ranks), label
