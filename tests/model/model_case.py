"""The input of a model (`Case`), and what its ranks exchange at a slot (`Arrival`, `meet`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import Policy, RoundRobin
from jaxcross.interleave.simulator import Action, Add, Await

Script = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The case to explore.

    Attributes:
        scripts: `scripts[rank][job]` holds the actions of the simulator. Durations are ignored,
            because a model has no clock. A job ends if its `Batch` is refused. In `fails` of a
            `Call`, an exchange can be marked as having non-finite values on this rank, along with
            what the job does about them: `skip`, `raise` or `eject`.
        policy: Decides whose turn it is.
        depth: Number of compute segments that may be on the device at once.
        outside: Per rank, what arrives from outside its jobs: an interrupt, a request, an `Add`, or
            a `TextSubmitted` with the name of one of `submitted`. The order is fixed, but each can
            arrive at any time. A request to stop or pause may also never arrive.
        submitted: Names and scripts of jobs that every rank adds when it receives their name.
        together: Whether the jobs start jointly.
        slow: Jobs that a rank may excuse from the joint start at any moment. A job that waits for
            another job is excused in any case.
        opening: How many votes may wait for every job's first step. Production code allows more,
            but here they would only add states.
        make: Creates the interleaver. Pass a faulty one to show that the check can fail.
    """

    scripts: tuple[tuple[Script, ...], ...]
    policy: Policy = field(default_factory=RoundRobin)
    depth: int = 2
    outside: tuple[tuple[m.Event | Add, ...], ...] = ()
    submitted: tuple[tuple[str, Script], ...] = ()
    together: bool = False
    slow: tuple[int, ...] = ()
    opening: int = 1
    make: Callable[[int, Policy, int], Interleaver] = Interleaver

    @property
    def strictly_together(self) -> bool:
        """Whether, of several jobs, none may make a step before each has called a step or ended.

        True if the case contains nothing that could excuse a job from the joint start.
        """
        actions = {
            type(action) for scripts in self.scripts for script in scripts for action in script
        }
        sequential = len(self.policy.running((0, 1))) == 1
        alone = (
            sequential
            or self.slow
            or any(self.outside)
            or actions & {Add, Await}
            or len(self.scripts[0]) == 1
        )
        # If ranks run different scripts, a job may fail before it has called a step.
        alone = alone or len({repr(scripts) for scripts in self.scripts}) > 1
        return self.together and not alone


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank has arrived at a slot of the exchange lane. Its other threads continue meanwhile.

    Attributes:
        slot: Identifies the slot.
        said: What the rank contributes to the slot. For a vote, that's its ballot, the jobs that
            have failed on it, and the jobs in which it found non-finite values. For a comparison,
            it's a text; for an exchange, whether it sends zeros.
        shared: The part of its state that should be identical on all ranks.
    """

    slot: tuple[Any, ...]
    said: Any
    shared: Any


def meet(arrivals: Sequence[Arrival]) -> Any:
    """Returns what every rank receives from the slot that all of them have reached.

    Raises:
        InternalError: The ranks are at different slots, or their shared state differs.
    """
    if len({arrival.slot for arrival in arrivals}) > 1:
        raise InternalError(
            f"ranks meet in different slots: {[arrival.slot for arrival in arrivals]}"
        )
    if len({arrival.shared for arrival in arrivals}) > 1:
        raise InternalError(f"ranks count differently: {[arrival.shared for arrival in arrivals]}")
    said = [arrival.said for arrival in arrivals]
    if arrivals[0].slot[0] == "vote":
        ballots = np.stack([np.frombuffer(ballot, np.int64) for ballot, _, _ in said])
        failed, infinite = (
            frozenset[int]().union(*sets) for sets in list(zip(*said, strict=True))[1:]
        )
        return ballots.min(axis=0).tobytes(), failed, infinite
    # In a real run the texts are in rank order. No model depends on that order, so we sort them.
    return tuple(sorted(said)) if arrivals[0].slot[0] in ("compare", "gather") else None
