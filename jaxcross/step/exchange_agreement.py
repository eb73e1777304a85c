"""Makes sure, before a program runs, that all ranks are about to make the same exchanges.

MPI matches collectives by their order alone. If one rank's third exchange is a gradient and another
rank's third exchange is a loss, the ranks deadlock, or silently mix the two values if these happen
to have the same shape. So before a program runs, the ranks compare its signature: a list of the
kind, shape and type of each exchange.

Equal signatures aren't enough. If a step averages two arrays of the same shape and type, and one
rank does so in a different order than the others, all signatures are still equal. To tell such
exchanges apart, the ranks also compare a label for each exchange, computed from where its operand
comes from and what uses its result (`jaxcross.program.exchange_labels`).
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
)
from jaxcross.runtime import Standalone, StepHost
from jaxcross.wire import group_of, make_rank_grid
from jaxcross.world import Control, World, all_equal, which_equal

if TYPE_CHECKING:
    from jaxcross.step.variant import Variant


def agree_once(
    variant: Variant, host: StepHost, program: Program, *, candidate: bool = False
) -> None:
    """Makes sure that all ranks are about to run `program`, unless they've already agreed on it.

    Waits for all ranks if they still have to agree.

    Args:
        variant: The variant.
        host: The job or standalone step that runs the variant.
        program: One of the variant's programs.
        candidate: Whether the program is only being timed in a search for the fastest cut.

    Raises:
        ExchangeError: The ranks' exchanges differ; raised on every rank.
        CutError: The profiles given as `cut` are of a different step or number of ranks; raised on
            every rank.
    """
    if program.exchanges and host.first_use(program, variant.record, candidate=candidate):
        host.agree(ExchangeAgreement.on(variant, program))
    if variant.refusal is not None:
        raise CutError(variant.refusal)


def agree_standalone(variant: Variant, host: Standalone) -> None:
    """Makes sure, outside a runner, that all ranks are about to make the same exchanges.

    Waits for all ranks.

    Raises:
        ExchangeError: The ranks' exchanges differ; raised on every rank.
    """
    program = variant.default
    world = variant.world
    if variant.is_unit:
        variant.record.units.agree(host, world, program, variant.cache_key)
    elif program.exchanges:
        # If the host decides which branch of a `cond` runs, the exchanges can be different in every
        # call, so the ranks compare them in every call. They also compare the number of the call,
        # because equal exchanges don't show that all ranks are at the same call.
        by_call = bool(variant.traced.choices)
        function = host.function
        host.agree(
            ExchangeAgreement.on(
                variant, program, function=function, call=host.calls, by_call=by_call
            )
        )
        host.agreed()


def comparison_of_calls(variant: Variant, host: Standalone) -> Callable[[], None] | None:
    """Returns a check that all ranks are calling the same step, to be run before the exchanges.

    Suppose that a script has two steps whose exchanges look alike. After the ranks have agreed on
    both steps, one rank might call them in a different order than the others, and the two steps'
    values would be mixed. Outside a runner, nothing else would detect that.

    The check waits for all ranks. If they're calling different steps, it raises `ExchangeError` on
    every rank. A step that calls mpi4jax isn't checked, so we return None for it.
    """
    # mpi4jax calls may involve only some of the ranks, and the others wouldn't run the check.
    return None if variant.is_unit else partial(_compare_calls, variant, host)


def _compare_calls(variant: Variant, host: Standalone) -> None:
    program = variant.default
    world = variant.world
    if not world.exchange_owner.check_due():
        return
    # This rank only checks that all ranks call the same step. Another rank may be comparing the
    # exchanges of a new step instead (`ExchangeAgreement.standalone`), which begins with an
    # all-reduce of two numbers. So we send two numbers as well. The two all-reduces then match up,
    # and the ranks find out that they differ.
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
    """Whether the ranks' latest agreement covers this variant, whose signature hasn't changed.

    Always true unless the step calls mpi4jax.
    """
    units = variant.record.units
    return not variant.is_unit or units.is_current(
        variant.world, variant.default, variant.cache_key
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeAgreement:
    """An agreement on one program; implements `jaxcross.runtime.step_host.Agreement`.

    Attributes:
        program: The program that this rank is about to run.
        world: All ranks.
        order: Hash of the labels of the program's exchanges. Computing it takes time, so we do that
            in advance rather than while the exchange lane waits for it.
        function: Name and number of the step (`Standalone.function`). Outside a run, these must be
            the same on all ranks.
        call: Number of the step's call.
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
        """Returns an agreement on one of a variant's programs."""
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
        # All lines but the first must be the same on all ranks.
        return f"first call of `{self.program.name}`\n{self._signature}"

    @property
    def _signature(self) -> str:
        # The signature ends with the line about segments, which is compared last. We append the
        # note to this line.
        return self.program.exchange_signature() + self.cut_note

    def in_run(self, control: Control) -> None:
        program = self.program
        agree_on_order(control, program, self.order)
        # Creating an MPI communicator is a collective call, i.e. it waits until all members have
        # made it. We make it here rather than during compilation, because a rank that fails to
        # compile would never make it, and the other ranks would wait for it forever.
        self.world.wire().create_communicators(program.exchanges, dict(program.axes))

    def standalone(self) -> None:
        """Compares hashes on all ranks by one small all-reduce. Gathers texts only if they differ.

        Waits for all ranks.

        Raises:
            ExchangeError: The ranks' exchanges differ; raised on every rank.
        """
        program = self.program
        control = self.world.control
        exchanges = (
            hash_62(f"{self.function}\n{self._signature}") + self.call * self.by_call
        ) % 2**62
        with self.world.monitor(job=program.name, step=self.call, segment=-1, what="agreement"):
            same_exchanges, same_order = which_equal(control, [exchanges, self.order])
            if not same_exchanges:
                self.resolve()
            elif not same_order:
                check_order(control, program)

    def resolve(self) -> None:
        """Gathers what each rank is about to run, after a comparison has shown a difference.

        If the ranks seem to be at different steps, that isn't always an error. Suppose that a call
        fails on one rank before its first exchange. This rank's next call starts a new agreement,
        while the other ranks are still waiting for it in the failed call. If it turns out that all
        ranks are calling the same step, this returns normally.

        Raises:
            ExchangeError: The ranks differ; raised on every rank.
        """
        name = self.program.name
        self.world.exchange_owner.unchecked = 0  # ranks may differ after a failed call
        mine = f"{self.call}\n{self.by_call:d}\n{self.function}\n{self._signature}"
        parts = [text.split("\n", 3) for text in self.world.control.allgather_text(mine)]
        others = [rank for rank, each in enumerate(parts) if len(each) < 4]
        if others:
            # These ranks sent a list of mpi4jax calls, which doesn't consist of four lines.
            raise ExchangeError(without_calls(name, others))
        calls, by_call, functions, signatures = zip(*parts, strict=True)
        at = [f"call {number}" for number in calls]
        if len(set(functions)) > 1:
            steps = [f"{function}, {call}" for function, call in zip(functions, at, strict=True)]
            meant = " Functions that are meant to be one step need the same name on all ranks."
            raise ExchangeError(step_mismatch("the script", steps) + meant * (set(calls) == {"1"}))
        if len(set(signatures)) > 1:
            raise ExchangeError(signature_mismatch(name, signatures))
        if "1" in by_call and len(set(calls)) > 1:
            raise ExchangeError(branch_call_mismatch(name, at))


def order_hash(program: Program) -> int:
    """Returns a 62-bit hash of the labels of a program's exchanges, in their order.

    If two ranks' hashes differ, that isn't necessarily an error. For example, if the batch on one
    rank is shorter than on the others, this rank's labels may differ even though its exchanges are
    the same. So in that case, `check_order` compares the labels themselves. Does not wait or
    communicate.
    """
    return hash_62(label_text(order_of(program)))


def agree_on_order(control: Control, program: Program, own: int) -> None:
    """Makes sure that ranks with equal signatures make the same exchanges in the same order.

    Waits for all ranks.

    Args:
        control: Communicates with all ranks.
        program: The program that this rank is about to run.
        own: The program's `order_hash`, which the caller computes in advance because it takes time.

    Raises:
        ExchangeError: The orders differ; raised on every rank.
    """
    if not all_equal(control, own):
        check_order(control, program)


def check_order(control: Control, program: Program) -> None:
    """Compares the labels themselves, after `agree_on_order` has found that their hashes differ.

    Gathers 192 bytes per exchanged array from each rank. Waits for all ranks.

    Raises:
        ExchangeError: Two ranks make the same exchange in different places; raised on every rank.
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
        descriptions = control.allgather_text("\n        ".join(mine))
        raise ExchangeError(order_mismatch(program.name, (one, other), descriptions))
