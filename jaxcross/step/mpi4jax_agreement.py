"""Lets the ranks agree on programs that call mpi4jax, where each rank may make different calls.

With mpi4jax, one rank may send what another receives. Different calls on different ranks are
therefore perfectly legitimate, so comparing them doesn't tell us anything. Instead, each rank
gathers the others' lists of calls and simulates them (`mpi4jax_lists`). This catches deadlocks as
well as messages that nobody receives.

When the step is called by one of a runner's jobs, all ranks take part in this agreement. It also
gives the job its own communicators, so its messages can't be mistaken for another job's. Outside a
runner, only ranks that exchange with one another take part, because the rest might not call the
step at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final
from weakref import WeakKeyDictionary

from jaxcross.errors import ExchangeError
from jaxcross.program import (
    BARRIER_REMEDY,
    Exchange,
    Program,
    hash_62,
    mpi4jax_lists,
    without_calls,
)
from jaxcross.runtime import StepHost
from jaxcross.step.exchange_agreement import agree_on_order, check_order, order_hash
from jaxcross.wire import CommKey, MpiWire, comm_key_of
from jaxcross.world import Control, World, gather, which_equal

Lists = Mapping[int, tuple[Exchange, ...]]


@dataclass(slots=True)
class Units:
    """Agreements on a step's programs that call mpi4jax, shared by all variants of the step.

    An agreement needs all ranks that exchange with one another, so a rank may only start one if the
    others are certain to do the same. That's the case when a static argument, the structure of the
    arguments or JAX's configuration changes, since these change everywhere at once.

    New shapes by themselves aren't enough to start an agreement, because a batch may be shorter on
    just one rank. If the shape of a message changes, on the other hand, the calls on both ends
    change, so both ranks start a new agreement.

    Attributes:
        latest: The latest agreement outside a runner, as a pair: everything but types that
            distinguishes the step's variants, and this rank's list of calls as text.
        of_host: Maps such pairs to the hash of all ranks' lists, for each job.
    """

    latest: tuple[object, str] | None = None
    of_host: WeakKeyDictionary[StepHost, dict[tuple[object, str], str]] = field(
        default_factory=WeakKeyDictionary
    )

    def is_current(self, world: World, program: Program, cache_key: object) -> bool:
        """Whether the latest agreement outside a runner covers this program."""
        return self.latest == (
            cache_key,
            mpi4jax_lists.comparison_text(world.wire().calls(program)),
        )

    def agree(self, host: StepHost, world: World, program: Program, cache_key: object) -> str:
        """Checks that the ranks' calls match up, unless the job has done so before.

        In a job, this waits for all ranks and returns a hash of their lists of mpi4jax calls.
        Outside a runner, it only waits for the ranks that exchange with this one, and returns an
        empty string.

        Raises:
            ExchangeError: The calls don't match up; raised on every participating rank.
        """
        calls = world.wire().calls(program)
        known = self.of_host.setdefault(host, {}) if host.in_run else {}
        mine = cache_key, mpi4jax_lists.comparison_text(calls)
        if mine not in known:
            new = (
                " with these shapes: its messages must change on all ranks at the same step"
                if known
                else ""
            )
            agreement = UnitAgreement(
                units=self,
                host=host,
                world=world,
                program=program,
                calls=calls,
                mine=mine,
                label=(
                    f"first call of `{program.name}`{new}, which calls mpi4jax ({BARRIER_REMEDY})"
                ),
                order=order_hash(program) if host.in_run and world.size > 1 else 0,
            )
            host.agree(agreement)
            known[mine] = agreement.digest
        return known[mine]

    def agree_in_run(
        self, host: StepHost, world: World, program: Program, cache_key: object
    ) -> Program:
        """Lets the ranks agree, then returns the program with the job's own communicators.

        Waits for all ranks.

        Raises:
            ExchangeError: The calls don't match up; raised on every rank.
        """
        digest = self.agree(host, world, program, cache_key)
        wire = MpiWire(world, comms=world.job_comms.for_job(host))
        return replace(program, calls=digest, traced=replace(program.traced, wire=wire))


@final
@dataclass(slots=True, kw_only=True)
class UnitAgreement:
    """The ranks' agreement on a program; implements `jaxcross.runtime.step_host.Agreement`.

    Attributes:
        units: The step's agreements.
        host: The job, or the step outside a runner.
        world: All ranks.
        program: The program that this rank is about to run.
        calls: This rank's list of calls.
        mine: Everything but types that distinguishes the step's variants, and this rank's list as
            text.
        label: Text that must be identical on all ranks.
        order: Hash of the labels of the program's exchanges. It's slow to compute, so we do that up
            front instead of keeping the exchange lane waiting.
        digest: Hash of all ranks' lists, set once the ranks have agreed in a job; otherwise "".
    """

    units: Units
    host: StepHost
    world: World
    program: Program
    calls: tuple[Exchange, ...]
    mine: tuple[object, str]
    label: str
    order: int
    digest: str = ""

    @property
    def text(self) -> str:
        return self.label

    def in_run(self, control: Control) -> None:
        """Compares all ranks' lists and creates any communicators that the job doesn't have yet.

        Raises:
            ExchangeError: The lists don't match up; raised on every rank.
        """
        comms = self.world.job_comms
        gathered = gather(control, [mpi4jax_lists.encode(self.calls), comms.in_use()])
        lists = {rank: mpi4jax_lists.decode(text) for rank, (text, _) in enumerate(gathered)}
        error_text = mpi4jax_lists.mismatch(self.program.name, lists)
        if error_text is not None:
            raise ExchangeError(error_text)
        named = [
            (rank, x) for rank, calls in lists.items() for x in calls if mpi4jax_lists.is_call(x)
        ]
        self._check_names(named)
        # Several jobs may need a communicator with the same members and name. Each gets its own, so
        # we number them. All members have to pick the same number, but what's free on one rank may
        # be taken on another. That's why the ranks gathered the numbers in use: we pick the first
        # number that's free everywhere.
        taken = {(_key(key), number) for _, busy in gathered for key, number in busy}
        own_comms = comms.for_job(self.host)
        for key in sorted({comm_key_of(x) for _, x in named} - set(own_comms)):
            ranks, label = key
            if self.world.rank not in ranks:
                continue
            number = next(n for n in range(len(taken) + 1) if (key, n) not in taken)
            what = f"{ranks} {label} {number}"
            comms.assign(self.host, key, number, partial(self.world.new_communicator, ranks, what))
        texts = [mpi4jax_lists.comparison_text(calls) for calls in lists.values()]
        if len(set(texts)) == 1:
            agree_on_order(control, self.program, self.order)
        self.digest = hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16]

    def standalone(self) -> None:
        """Compares the lists of the ranks that exchange with this one, outside a runner.

        Raises:
            ExchangeError: The lists don't match up; raised on each of those ranks.
        """
        lists = _gathered(self.world, self.program, self.calls)
        self.units.latest = self.mine
        error_text = mpi4jax_lists.mismatch(self.program.name, lists)
        if error_text is not None:
            raise ExchangeError(error_text)

    def _check_names(self, named: list[tuple[int, Exchange]]) -> None:
        for rank, call in named:
            if "#" in dict(call.params).get("comm", ""):
                raise ExchangeError(
                    f"`{self.program.name}` uses two communicators of ranks "
                    f"{dict(call.params)['ranks']} that ranks cannot tell apart, on rank {rank} at "
                    f"{call.source}. Give each communicator a different name, and use the same "
                    'names on all ranks: `comm.Set_name("halo")`.'
                )


def list_hash(world: World, program: Program) -> int:
    """Returns a 62-bit hash of this rank's list of calls."""
    return hash_62(mpi4jax_lists.comparison_text(world.wire().calls(program)))


def _gathered(world: World, program: Program, calls: tuple[Exchange, ...]) -> Lists:
    """Returns the lists of all ranks connected to this rank by exchanges, directly or indirectly.

    Waits for all of them.

    Raises:
        ExchangeError: The lists are equal, but some ranks perform the same exchange in different
            places.
    """
    rank = world.rank
    text = mpi4jax_lists.encode(calls)
    name = program.name
    everyone = list(range(world.size))
    # If the step performs a collective over all ranks, they must all be calling it, so we can
    # gather the lists with a collective too. Otherwise some ranks may not be calling the step at
    # all, so we only ask the partners named in our own calls; these ask theirs, and so on.
    if not any(_over_ranks(x, everyone) for x in calls):
        accepts = partial(_accepts, rank) if mpi4jax_lists.expects_unknown(calls) else None
        texts = world.gather_connected(
            name, text, mpi4jax_lists.partners(calls, rank), accepts=accepts
        )
        return {r: mpi4jax_lists.decode(t) for r, t in texts.items()}
    number = hash_62(mpi4jax_lists.comparison_text(calls))
    order = order_hash(program)
    with world.monitor(job=name, step=0, segment=-1, what="agreement"):
        # Another rank's program may not call mpi4jax at all. That rank runs
        # `ExchangeAgreement.standalone` instead, which starts with an all-reduce of two integers.
        # So we send two integers as well: that way, the two all-reduces match up and the ranks
        # notice the difference.
        same_calls, same_order = which_equal(world.control, [number, order])
        if same_calls and not same_order:
            check_order(world.control, program)
        if same_calls and not mpi4jax_lists.names_peers(calls):
            return dict.fromkeys(everyone, calls)
        return _decoded(name, world.control.allgather_text(text))


def _over_ranks(call: Exchange, ranks: list[int]) -> bool:
    """Whether a call is a collective over exactly these ranks."""
    params = dict(call.params)
    return sorted(params["ranks"]) == ranks and "dest" not in params and "source" not in params


def _accepts(rank: int, texts: Mapping[int, str], other: str | None) -> bool:
    """Whether to accept the list of the rank that sent `other`; see `jaxcross.world.neighbours`.

    If `other` is None, returns whether we still have to wait for a sender we don't know yet.
    """
    lists = {r: mpi4jax_lists.decode(t) for r, t in texts.items()}
    if other is None:
        return not mpi4jax_lists.all_senders_known(lists, rank)
    return mpi4jax_lists.sends_to(lists[rank], rank, mpi4jax_lists.decode(other))


def _decoded(name: str, texts: list[str]) -> Lists:
    others = [rank for rank, text in enumerate(texts) if not text.startswith("[")]
    if others:
        raise ExchangeError(without_calls(name, others))
    return {rank: mpi4jax_lists.decode(text) for rank, text in enumerate(texts)}


def _key(value: tuple[list[int], str]) -> CommKey:
    ranks, label = value
    return tuple(ranks), label
