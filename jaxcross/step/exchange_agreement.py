"""Checks that all ranks are about to perform the same exchanges before a program runs.

MPI matches up collectives purely by their order. If one rank's third exchange is a gradient and
another rank's third exchange is a loss, the ranks deadlock, or worse, silently mix up the two
values if they happen to have the same shape. So before a program runs, the ranks compare its
signature: a list with the kind, shape and type of each exchange.

Comparing signatures isn't enough, though. Suppose that a step averages two arrays of the same shape
and type, and one rank does so in the opposite order. The signatures are still equal. To catch this,
the ranks also compare a label for each exchange, derived from where its operand comes from and how
its result is used (`jaxcross.program.exchange_labels`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, final

from jaxcross.errors import CutError, ExchangeError
from jaxcross.program import (
    Program,
    branch_call_mismatch,
    describe,
    find_swapped,
    hash_62,
    label_text,
    order_mismatch,
    order_of,
    signature_mismatch,
    step_mismatch,
    without_calls,
    without_sources,
)
from jaxcross.runtime import Standalone, StepHost
from jaxcross.wire import group_of, make_rank_grid
from jaxcross.world import Control, World, all_equal, which_equal

if TYPE_CHECKING:
    from jaxcross.step.variant import Variant


def agree_once(
    variant: Variant, host: StepHost, program: Program, *, candidate: bool = False
) -> None:
    """Checks that all ranks are about to run `program`, unless they've already agreed on it.

    Waits for all ranks if they still have to agree.

    Args:
        variant: The variant.
        host: The job or standalone step that runs the variant.
        program: One of the variant's programs.
        candidate: Whether we're only timing the program while searching for the fastest cut.

    Raises:
        ExchangeError: The ranks' exchanges differ; raised on every rank.
        CutError: The profiles given as `cut` belong to a different step or number of ranks; raised
            on every rank.
    """
    if program.exchanges and host.first_use(program, variant.record, candidate=candidate):
        host.agree(ExchangeAgreement.on(variant, program))
    if variant.refusal is not None:
        raise CutError(variant.refusal)


def agree_standalone(variant: Variant, host: Standalone) -> None:
    """Outside a runner, checks that all ranks are about to perform the same exchanges.

    Waits for all ranks.

    Raises:
        ExchangeError: The ranks' exchanges differ; raised on every rank.
    """
    program = variant.default
    world = variant.world
    if variant.is_unit:
        variant.record.units.agree(host, world, program, variant.cache_key)
    elif program.exchanges:
        # If the host decides which branch of a `cond` to run, the exchanges can differ from call to
        # call, so the ranks compare them every time. They compare the call's number too, because
        # equal exchanges don't prove that everyone is in the same call.
        by_call = bool(variant.traced.choices)
        function = host.function
        host.agree(
            ExchangeAgreement.on(
                variant, program, function=function, call=host.calls, by_call=by_call
            )
        )
        host.agreed()


def comparison_of_calls(variant: Variant, host: Standalone) -> Callable[[], None] | None:
    """Returns a check, to run before the exchanges, that all ranks are calling the same step.

    Suppose a script has two steps with lookalike exchanges, and the ranks have agreed on both. If
    one rank then calls them in a different order than the others, the two steps' values get mixed
    up. Outside a runner, nothing else would catch this.

    The check waits for all ranks and raises `ExchangeError` on each of them if they aren't calling
    the same step. Steps that call mpi4jax aren't checked; for these, we return None.
    """
    # mpi4jax calls may involve only some of the ranks, and the others wouldn't take part in the
    # check.
    return None if variant.is_unit else partial(_compare_calls, variant, host)


def _compare_calls(variant: Variant, host: Standalone) -> None:
    program = variant.default
    world = variant.world
    if not world.exchange_owner.check_due():
        return
    # This rank only wants to check that everyone is calling the same step. But another rank may be
    # agreeing on a new step (`ExchangeAgreement.standalone`), which starts with an all-reduce of
    # two integers. So we send two integers as well: that way, the two all-reduces match up and the
    # ranks notice the difference.
    numbers = [host.number, 0]
    with world.monitor(job=program.name, step=host.calls, segment=-1, what="agreement"):
        if not which_equal(world.control, numbers)[0]:
            ExchangeAgreement(
                program=program,
                world=world,
                order=0,
                function=host.function,
                call=host.calls,
                cut_note=variant.cut_note,
            ).resolve()


def is_current(variant: Variant) -> bool:
    """Whether the ranks' latest agreement covers this variant, given that its signature is
    unchanged.

    Always true unless the step calls mpi4jax.
    """
    units = variant.record.units
    return not variant.is_unit or units.is_current(
        variant.world, variant.default, variant.cache_key
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeAgreement:
    """The ranks' agreement on a program; implements `jaxcross.runtime.step_host.Agreement`.

    Attributes:
        program: The program that this rank is about to run.
        world: All ranks.
        order: Hash of the labels of the program's exchanges. It's slow to compute, so we do that up
            front instead of keeping the exchange lane waiting.
        function: Name and number of the step (`Standalone.function`). Outside a run, these must be
            the same on all ranks.
        call: Number of the call.
        by_call: Whether all ranks must be in the same call.
        cut_note: See `Variant.cut_note`.
    """

    program: Program
    world: World
    order: int
    function: str = ""
    call: int = 0
    by_call: bool = False
    cut_note: str = ""

    @classmethod
    def on(
        cls,
        variant: Variant,
        program: Program,
        *,
        function: str = "",
        call: int = 0,
        by_call: bool = False,
    ) -> Self:
        """Creates an agreement on one of a variant's programs."""
        world = variant.world
        note = variant.cut_note
        order = order_hash(program) if world.size > 1 else 0
        return cls(
            program=program,
            world=world,
            order=order,
            function=function,
            call=call,
            by_call=by_call,
            cut_note=note,
        )

    @property
    def label(self) -> str:
        # Every line except the first must be identical on all ranks.
        return f"first call of `{self.program.name}`\n{self._signature()}"

    @property
    def text(self) -> str:
        return f"first call of `{self.program.name}`\n{self._signature(sources=True)}"

    def _signature(self, *, sources: bool = False) -> str:
        # The last line of the signature is about segments and gets compared last. Add the note
        # there.
        return self.program.exchange_signature(sources=sources) + self.cut_note

    def in_run(self, control: Control) -> None:
        program = self.program
        agree_on_order(control, program, self.order)
        # Creating an MPI communicator is collective, i.e. it blocks until all members have joined
        # in. We do it here and not during compilation, because a rank that fails to compile would
        # never get there and the others would wait for it forever.
        self.world.wire().create_communicators(program.exchanges, dict(program.axes))

    def standalone(self) -> None:
        """Compares hashes in one small all-reduce. Only gathers the texts if the hashes differ.

        Waits for all ranks.

        Raises:
            ExchangeError: The ranks' exchanges differ; raised on every rank.
        """
        program = self.program
        control = self.world.control
        exchanges = (
            hash_62(f"{self.function}\n{self._signature()}") + self.call * self.by_call
        ) % 2**62
        with self.world.monitor(job=program.name, step=self.call, segment=-1, what="agreement"):
            same_exchanges, same_order = which_equal(control, [exchanges, self.order])
            if not same_exchanges:
                self.resolve()
            elif not same_order:
                check_order(control, program)

    def resolve(self) -> None:
        """Once the hashes differ, gathers what each rank is about to run to find out why.

        Ranks that seem to be at different steps aren't always in error. Suppose that a call fails
        on one rank before its first exchange. That rank starts a new agreement in its next call,
        while the others are still waiting for it in the failed call. If it turns out that all ranks
        are calling the same step after all, we return normally.

        Raises:
            ExchangeError: The ranks differ; raised on every rank.
        """
        name = self.program.name
        self.world.exchange_owner.unchecked = 0  # can differ between ranks after a failed call
        mine = f"{self.call}\n{self.by_call:d}\n{self.function}\n{self._signature(sources=True)}"
        parts = [text.split("\n", 3) for text in self.world.control.allgather_text(mine)]
        others = [rank for rank, each in enumerate(parts) if len(each) < 4]
        if others:
            # These ranks sent a list of mpi4jax calls instead of our four lines.
            raise ExchangeError(without_calls(name, others))
        calls, by_call, functions, signatures = zip(*parts, strict=True)
        at = [f"call {number}" for number in calls]
        if len(set(functions)) > 1:
            steps = [f"{function}, {call}" for function, call in zip(functions, at, strict=True)]
            meant = " Functions that are meant to be the same step need the same name on all ranks."
            raise ExchangeError(step_mismatch("the script", steps) + meant * (set(calls) == {"1"}))
        if len(set(without_sources(signatures))) > 1:
            raise ExchangeError(signature_mismatch(name, signatures))
        if "1" in by_call and len(set(calls)) > 1:
            raise ExchangeError(branch_call_mismatch(name, at))


def order_hash(program: Program) -> int:
    """Returns a 62-bit hash of the labels of a program's exchanges, in order.

    Different hashes don't necessarily mean that something is wrong. For example, if one rank has a
    shorter batch, its labels may differ even though its exchanges are the same. That's why
    `check_order` then compares the labels themselves. Does not wait or communicate.
    """
    return hash_62(label_text(order_of(program)))


def agree_on_order(control: Control, program: Program, own: int) -> None:
    """Checks that ranks with equal signatures perform the same exchanges in the same order.

    Waits for all ranks.

    Args:
        control: Communicates with all ranks.
        program: The program that this rank is about to run.
        own: The program's `order_hash`, which the caller computes up front because it's slow.

    Raises:
        ExchangeError: The orders differ; raised on every rank.
    """
    if not all_equal(control, own):
        check_order(control, program)


def check_order(control: Control, program: Program) -> None:
    """Compares the labels themselves after `agree_on_order` has found different hashes.

    Gathers 192 bytes per exchanged array from each rank. Waits for all ranks.

    Raises:
        ExchangeError: Two ranks perform the same exchange in different places; raised on every
            rank.
    """
    order = order_of(program)

    @functools.cache
    def peers(place: int, rank: int) -> frozenset[int]:
        exchange = order[place].labelled.exchange
        if not exchange.axes:
            return frozenset(dict(exchange.params)["ranks"])  # ranks in the user's communicator
        mesh = make_rank_grid(dict(program.axes), rank=rank, size=control.size)
        return frozenset(mesh.group(*group_of(exchange, mesh)))

    found = find_swapped(control.allgather_text(label_text(order)), peers)
    if found is not None:
        (one, here), (other, there) = found
        mine = [describe(program.traced, order[place]) for place in sorted((here, there))]
        descriptions = control.allgather_text("\n        ".join(mine))
        raise ExchangeError(order_mismatch(program.name, (one, other), descriptions))
