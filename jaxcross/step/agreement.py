"""An agreement of all ranks that they are about to make the same exchanges, before a program
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import numpy as np

from jaxcross.errors import CutError, ExchangeError
from jaxcross.program.ir import Program, hash_62
from jaxcross.program.mismatch import branch_call_mismatch, signature_mismatch, step_mismatch
from jaxcross.runtime.standalone import Standalone
from jaxcross.runtime.step_host import StepHost
from jaxcross.step.exchange_order import agree_on_order, check_order, order_hash
from jaxcross.step.unit_agreement import without_calls
from jaxcross.step.variant import Variant
from jaxcross.world import World
from jaxcross.world.control_plane import Control


def agree_once(
    variant: Variant, host: StepHost, program: Program, *, candidate: bool = False
) -> None:
    """Makes sure that all ranks are about to run `program`, unless `host` knows. Waits for all
    ranks.

    Args:
        variant: The variant.
        host: The code that runs it.
        program: One of the variant's programs.
        candidate: Whether it is only tried, in a search for the fastest cut.

    Raises:
        ExchangeError: The ranks differ; on every rank.
        CutError: The profiles of all ranks are of another step or of another number of ranks.
    """
    if program.exchanges and host.first_use(program, variant.record, candidate=candidate):
        host.agree(ExchangeAgreement.on(variant, program))
    if variant.refusal is not None:
        raise CutError(variant.refusal)


def agree_standalone(variant: Variant, host: Standalone) -> None:
    """Makes sure that all ranks are about to make the same exchanges, outside a runner. Waits for
    all ranks.

    Raises:
        ExchangeError: The ranks differ; on every rank.
    """
    program, world = variant.default, variant.world
    if variant.is_unit:
        variant.record.units.agree(host, world, program, variant.cache_key)
    elif program.exchanges:
        # Where the host takes branches, ranks may be at different calls of the step with equal
        # exchanges.
        by_call = bool(variant.traced.choices)
        function = host.function
        host.agree(
            ExchangeAgreement.on(
                variant, program, function=function, call=host.calls, by_call=by_call
            )
        )
        host.agreed()


def comparison_of_calls(variant: Variant, host: Standalone) -> Callable[[], None] | None:
    """Returns what compares, before a call exchanges, that all ranks call the same step; None if it
    takes no part.

    Ranks that have agreed on two steps with equal exchanges might call them in different orders.
    Outside a runner nothing else would find that. The comparison waits for all ranks, and raises
    `ExchangeError` on every rank.
    """
    # Calls of mpi4jax may concern only some of the ranks.
    return None if variant.is_unit else partial(_compare_calls, variant, host)


def _compare_calls(variant: Variant, host: Standalone) -> None:
    program, world = variant.default, variant.world
    if not world.exchange_owner.check_due():
        return
    # As long as the vector of an agreement, because some rank may come to one instead.
    numbers = np.array([host.number, -host.number, 0, 0], np.int64)
    with world.monitor(job=program.name, step=host.calls, segment=-1, what="agreement"):
        low, high, _, _ = world.control.allreduce_min(numbers)
        if low != -high:
            ExchangeAgreement(
                program=program,
                world=world,
                order=0,
                function=host.function,
                call=host.calls,
                cut_note=variant.cut_note,
            ).resolve()


def is_current(variant: Variant) -> bool:
    """Whether the ranks need not agree again on these argument types, if this rank exchanges as it
    did.
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
        program: What this rank is about to run.
        world: All ranks.
        order: Hash of its exchanges' labels. It takes time to compute, hence not while the exchange
            lane waits.
        function: The step's name and number, which all ranks must have in common outside a run; see
            `Standalone.function`.
        call: Number of the step's call.
        by_call: Whether it must be the same call on all ranks.
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
        # The lines after the first one hold all that the ranks must have in common.
        return f"first call of `{self.program.name}`\n{self._signature}"

    @property
    def _signature(self) -> str:
        # The note ends the line of the segments, which is compared last.
        return self.program.exchange_signature() + self.cut_note

    def in_run(self, control: Control) -> None:
        program = self.program
        agree_on_order(control, program, self.order)
        # Not while the ranks compile: a rank that fails there would not come.
        self.world.wire().create_communicators(program.exchanges, dict(program.axes))

    def standalone(self) -> None:
        """Compares all ranks by one small all-reduce; texts are gathered only where hashes differ.

        Raises:
            ExchangeError: The ranks differ; on every rank.
        """
        program, control = self.program, self.world.control
        exchanges = (
            hash_62(f"{self.function}\n{self._signature}") + self.call * self.by_call
        ) % 2**62
        hashes = np.array([exchanges, -exchanges, self.order, -self.order], np.int64)
        with self.world.monitor(job=program.name, step=self.call, segment=-1, what="agreement"):
            low, high, first, last = control.allreduce_min(
                hashes
            )  # a minimum, and a maximum with its sign changed
            if low != -high:
                self.resolve()
            elif first != -last:
                check_order(control, program)

    def resolve(self) -> None:
        """Gathers what every rank calls, once a comparison has shown that the ranks differ.

        Returns if the ranks do call the same step: a rank whose call failed before its first
        exchange agrees again in its next call, while the other ranks still wait for it in theirs.

        Raises:
            ExchangeError: The ranks differ; on every rank.
        """
        name = self.program.name
        self.world.exchange_owner.unchecked = 0  # it may differ by the call that failed
        mine = f"{self.call}\n{self.by_call:d}\n{self.function}\n{self._signature}"
        parts = [text.split("\n", 3) for text in self.world.control.allgather_text(mine)]
        if others := [rank for rank, each in enumerate(parts) if len(each) < 4]:
            # Lists of mpi4jax calls have no call number in front of them.
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
