"""What a model is given, and where its ranks meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import Policy, RoundRobin
from jaxcross.interleave.script import Action, Add, Await

Script = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be explored.

    Attributes:
        scripts: `scripts[rank][job]`, the actions of the simulator; their seconds mean nothing
            here. A job whose `Batch` is refused ends. `fails` of a `Step` may say of an exchange
            that its values are not finite on this rank, and what its job does about it: `skip`,
            `raise` or `eject`.
        policy: Whose turn it is.
        depth: Compute segments on the device at once.
        outside: What comes to each rank from outside its jobs, in that order and at any time: an
            interrupt, a wish (to stop or to rest perhaps never), an `Add`, a `TextSubmitted` with
            the name of one of `submitted`.
        submitted: Scripts of jobs that are added on every rank when it hears their name.
        together: Whether the jobs start together.
        slow: Jobs that a rank may excuse from that at any moment; one that waits for another job,
            it does excuse.
        opening: Votes that may wait for every job's first step. Fewer than in life, where they only
            add states.
        make: The interleaver; a wrong one shows that the check can fail.
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
        """Whether no job of several may make a step before all have called one or are over: nothing
        excuses any.
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
        alone = (
            alone or len({repr(scripts) for scripts in self.scripts}) > 1
        )  # a job may fail before it has come
        return self.together and not alone


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank stands at a slot of the exchange lane. Its threads go on meanwhile.

    Attributes:
        slot: Which.
        said: What it gives to it: its ballot and which jobs have failed or made infinite values on
            it; a text; whether an exchange is made with zeros.
        shared: What it believes all ranks to agree on.
    """

    slot: tuple[Any, ...]
    said: Any
    shared: Any


def meet(arrivals: Sequence[Arrival]) -> Any:
    """What every rank takes from the slot at which all of them stand.

    Raises:
        InternalError: They stand at different ones, or believe different things.
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
    # In life the texts are in the order of the ranks, which nobody asks for here.
    return tuple(sorted(said)) if arrivals[0].slot[0] in ("compare", "gather") else None
