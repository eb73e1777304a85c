"""The schedule of fragments: in which steps each is captured, exchanged and applied.

Everything is computed from a clock in the state, in integer arithmetic that the host can follow, so
the host knows what each step exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcross.exchange.validation import whole_number


class Clock(NamedTuple):
    """A step's position in the schedule.

    It doesn't contain the length of a round, because a restart may change that.

    Attributes:
        turn: The turn, int32. Turn 0 is the first one, in which nothing is pending. After that,
            turns count from 1 to `fragments`, again and again.
        place: The step within the turn, int32.
    """

    turn: jax.Array
    place: jax.Array

    @classmethod
    def begin(cls) -> Clock:
        """Returns the clock of the first step."""
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


class Turn(NamedTuple):
    """What a step does. Each field is None or the number of a slice or fragment.

    Attributes:
        slice: Slice to exchange.
        applied: Fragment whose outer step is taken.
        captured: Fragment whose pseudo-gradient is captured.
    """

    slice: int | None = None
    applied: int | None = None
    captured: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The schedule of a round.

    Attributes:
        every: Steps per round.
        fragments: Number of fragments.
        delay: Steps from a capture to its outer step.
        period: Steps per turn. At the end of a turn's last step, a fragment is captured.
    """

    every: int
    fragments: int
    delay: int
    period: int

    @classmethod
    def checked(cls, every: object, fragments: object, delay: object, what: str) -> Turns:
        """Returns the schedule, or raises a ValueError if these numbers don't make one."""
        n_every, n_fragments = (
            whole_number(every, "every", what),
            whole_number(fragments, "fragments", what),
        )
        n_delay = whole_number(delay, "delay", what, least=0)
        if n_every % n_fragments:
            raise ValueError(
                f"`every` of {what} is {n_every} and `fragments` {n_fragments}: each fragment has "
                f"an equal part of the round. Take a multiple of {n_fragments} steps, or a divisor "
                f"of {n_every}."
            )
        period = n_every // n_fragments
        if n_delay > period:
            raise ValueError(
                f"`delay` of {what} is {n_delay}, but the next fragment's turn comes after every / "
                f"fragments = {period} steps, and one is pending at a time. Take a delay of at "
                f"most {period}, or fewer fragments."
            )
        return cls(every=n_every, fragments=n_fragments, delay=n_delay, period=period)

    def kinds(self) -> list[Turn]:
        """Returns everything a step can do; `kind` is an index into this list."""
        captures = [Turn(captured=f) for f in range(self.fragments)]
        if self.delay == 0:
            return [Turn(), *captures]
        last = self.delay - 1
        # Whether a fragment's last slice is in the same step as the next capture.
        full = self.delay == self.period
        ends = [
            Turn(slice=last, applied=f, captured=(f + 1) % self.fragments if full else None)
            for f in range(self.fragments)
        ]
        return [Turn(), *(Turn(slice=n) for n in range(last)), *ends, *captures]

    def kind(self, clock: Clock) -> jax.Array:
        """Returns the index of this step's turn in `kinds`.

        If a restart has shortened the rounds, `place` may be beyond the period.
        """
        turn, place = clock
        captures = jnp.where(place >= self.period - 1, 1 + turn % self.fragments, 0)
        if self.delay == 0:
            return captures
        ends, pending = self.delay, (turn + self.fragments - 1) % self.fragments
        captures = jnp.where(captures > 0, captures - 1 + ends + self.fragments, 0)
        exchanges = jnp.where(place == self.delay - 1, ends + pending, 1 + place)
        # In the first turn nothing is pending.
        return jnp.where((turn > 0) & (place < self.delay), exchanges, captures)

    def after(self, clock: Clock) -> Clock:
        """Returns the next step's clock. Turn 0 is not repeated."""
        ends = clock.place + 1 >= self.period
        turn = jnp.where(clock.turn < self.fragments, clock.turn + 1, 1)
        return Clock(jnp.where(ends, turn, clock.turn), jnp.where(ends, 0, clock.place + 1))
