"""Makes sure, before a program runs, that all ranks are about to make the same exchanges.

MPI matches exchanges by their order alone. If ranks exchanged different things, they'd deadlock or
silently mix their values.

Equal signatures don't guarantee the same order: two exchanges of the same kind, shape and type look
alike. Their labels (`jaxcross.program.exchange_labels`) distinguish them.
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
    """Makes sure that all ranks are about to run `program`, unless the host knows that already.

    Waits for all ranks.

    Args:
        variant: The variant.
        host: The code that runs it.
        program: One of the variant's programs.
        candidate: Whether the program is only tried, in a search for the fastest cut.

    Raises:
        ExchangeError: The ranks differ; raised on every rank.
        CutError: On all ranks, the profiles are of a different step or number of ranks.
    """
    if program.exchanges and host.first_use(program, variant.record, candidate=candidate):
        host.agree(ExchangeAgreement.on(variant, program))
    if variant.refusal is not None:
        raise CutError(variant.refusal)


def agree_standalone(variant: Variant, host: Standalone) -> None:
    """Makes sure, outside a runner, that all ranks are about to make the same exchanges.

    Waits for all ranks.

    Raises:
        ExchangeError: The ranks differ; raised on every rank.
    """
    program, world = variant.default, variant.world
    if variant.is_unit:
        variant.record.units.agree(host, world, program, variant.cache_key)
    elif program.exchanges:
        # If the host decides branches, ranks may be at different calls of the step although their
        # exchanges are equal.
        by_call = bool(variant.traced.choices)
        function = host.function
        host.agree(
            ExchangeAgreement.on(
                variant, program, function=function, call=host.calls, by_call=by_call
            )
        )
        host.agreed()


def comparison_of_calls(variant: Variant, host: Standalone) -> Callable[[], None] | None:
    """Returns a check that all ranks call the same step, to be made before a call exchanges.

    Returns None for a step that calls mpi4jax, which isn't checked. Ranks that have agreed on two
    steps with equal exchanges might call them in different orders, and outside a runner nothing
    else would detect that. The check waits for all ranks, and raises `ExchangeError` on every rank.
    """
    # mpi4jax calls may involve only some of the ranks, so the others wouldn't take part.
    return None if variant.is_unit else partial(_compare_calls, variant, host)


def _compare_calls(variant: Variant, host: Standalone) -> None:
    program, world = variant.default, variant.world
    if not world.exchange_owner.check_due():
        return
    # As long as an agreement's vector, because another rank may be in an agreement instead. The two
    # all-reduces then match up.
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
    """Whether the latest agreement still holds, given that the exchanges' signature hasn't changed.

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
        order: Hash of its exchanges' labels. It takes time to compute, so it's computed up front
            rather than while the exchange lane waits.
        function: Name and number of the step, which must be equal on all ranks outside a run; see
            `Standalone.function`.
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
        """Returns the agreement on a program of a variant."""
        world, note = variant.world, variant.cut_note
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
        # The lines after the first one contain everything that the ranks must have in common.
        return f"first call of `{self.program.name}`\n{self._signature}"

    @property
    def _signature(self) -> str:
        # The note is at the end of the line about segments, which is compared last.
        return self.program.exchange_signature() + self.cut_note

    def in_run(self, control: Control) -> None:
        program = self.program
        agree_on_order(control, program, self.order)
        # Here rather than during compilation, because a rank that fails to compile wouldn't take
        # part.
        self.world.wire().create_communicators(program.exchanges, dict(program.axes))

    def standalone(self) -> None:
        """Compares all ranks by one small all-reduce. Texts are gathered only if hashes differ.

        Raises:
            ExchangeError: The ranks differ; raised on every rank.
        """
        program, control = self.program, self.world.control
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
        """Gathers what every rank calls, once a comparison has shown that the ranks differ.

        Returns if the ranks turn out to call the same step. That happens if a rank's call failed
        before its first exchange: the rank agrees again in its next call, while the other ranks are
        still waiting for it in theirs.

        Raises:
            ExchangeError: The ranks differ; raised on every rank.
        """
        name = self.program.name
        self.world.exchange_owner.unchecked = 0  # ranks may differ after a failed call
        mine = f"{self.call}\n{self.by_call:d}\n{self.function}\n{self._signature}"
        parts = [text.split("\n", 3) for text in self.world.control.allgather_text(mine)]
        if others := [rank for rank, each in enumerate(parts) if len(each) < 4]:
            # A list of mpi4jax calls doesn't start with a call number.
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
