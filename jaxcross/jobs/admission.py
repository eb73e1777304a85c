"""Admission of jobs by memory: whether another job still fits, on all ranks.

Before a job runs a program for the first time, it books the memory that the program needs. The
ranks compute the minimum of what each of them has left, so either every rank admits the job or
every rank refuses it with the same error.

Memory that several jobs share, e.g. the base model under adapters, must count once. So a booking
isn't just a number of bytes: it also lists the buffers that other jobs may hold too. When a job
ends, it gives its booking back. Only its latest state still counts, until those arrays are gone,
because `job.state` keeps them alive.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, final

import jax
import numpy as np

from jaxcross._pytree import PyTree, arrays_by_buffer, buffer_of
from jaxcross.errors import JobError
from jaxcross.jobs.memory import PROCESS_BYTES, JobMemory, device_limit_bytes, needed_bytes
from jaxcross.program import Program, human_bytes
from jaxcross.world import Control, World, gather

_NO_LIMIT = int(np.iinfo(np.int64).max)
_log = logging.getLogger("jaxcross")


@final
@dataclass(frozen=True, slots=True)
class Need:
    """What a job's program needs on one rank.

    Attributes:
        memory: The program's memory, including all arrays.
        lasting: Those of the arrays that other jobs may hold too: weak references and bytes by
            buffer. The references are weak so that admission doesn't keep memory in use, and needed
            because an address alone says nothing once its array is gone: the next array may be put
            there.
    """

    memory: JobMemory
    lasting: Mapping[Hashable, tuple[weakref.ref[jax.Array], int]]

    @classmethod
    def of(
        cls,
        memory: JobMemory,
        lasting: Iterable[tuple[jax.Array, int]],
        *,
        without: Collection[Hashable] = (),
    ) -> Self:
        """Returns the need of a program.

        Args:
            memory: The program's memory, in which an array counts as often as it occurs in
                `lasting`.
            lasting: Arrays that other jobs may hold too, and their bytes.
            without: Buffers that belong to this job alone, even if they're in `lasting`.
        """
        found: dict[Hashable, tuple[weakref.ref[jax.Array], int]] = {}
        repeated = 0
        for array, nbytes in lasting:
            buffer = buffer_of(array)
            if buffer in found:
                repeated += nbytes
            elif buffer not in without:
                found[buffer] = weakref.ref(array), nbytes
        return cls(memory.with_resting(-repeated), found)

    @classmethod
    def of_state(cls, state: PyTree) -> Self:
        """Returns the need of a job that has ended and whose state is kept."""
        arrays = [(array, array.nbytes) for array in arrays_by_buffer(state).values()]
        nbytes = sum(nbytes for _, nbytes in arrays)
        return cls.of(JobMemory(peak_bytes=nbytes, boundary_bytes=nbytes), arrays)

    def present(self) -> dict[Hashable, int]:
        """Returns the bytes of those lasting arrays that still exist, by buffer."""
        arrays = (
            (buffer, reference(), nbytes) for buffer, (reference, nbytes) in self.lasting.items()
        )
        return {
            buffer: nbytes
            for buffer, array, nbytes in arrays
            if array is not None and not array.is_deleted()
        }


Booking: TypeAlias = Sequence[Need]  # what one job has booked: a `Need` per program


def needed_by(bookings: Sequence[Booking]) -> int:
    """Returns how many bytes of arrays jobs need when they run alongside each other.

    A buffer that several jobs hold counts once.

    Args:
        bookings: What each job has booked.
    """
    present = [[need.present() for need in booking] for booking in bookings]
    holders = Counter(
        buffer for programs in present for buffer in frozenset[Hashable]().union(*programs)
    )
    shared = {
        buffer: nbytes
        for programs in present
        for buffers in programs
        for buffer, nbytes in buffers.items()
        if holders[buffer] > 1
    }
    own = [
        JobMemory.largest(
            [
                need.memory.with_resting(
                    -sum(nbytes for buffer, nbytes in buffers.items() if buffer in shared)
                )
                for need, buffers in zip(booking, programs, strict=True)
            ]
        )
        for booking, programs in zip(bookings, present, strict=True)
    ]
    return needed_bytes(own) + sum(shared.values())


@final
class MemoryAdmission:
    """The memory that the jobs of a run have booked on one rank.

    Jobs book memory on the exchange lane and give it back when a vote ends them. All ranks do both
    in the same order, so they admit the same jobs even if their limits differ.

    Args:
        limit_bytes: The bytes that this rank may use; None if unknown.
        process_bytes: The bytes that the process needs in addition to arrays.

    Attributes:
        limit_bytes: As above.
        most_booked_bytes: The most bytes that were booked at the same time.
    """

    def __init__(self, limit_bytes: int | None, process_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._process_bytes = process_bytes
        self.most_booked_bytes = 0
        self._booked: dict[str, Booking] = {}
        # Returns the state that a job still holds after its end.
        self._kept: dict[str, Callable[[], PyTree]] = {}
        self._warned = False

    @classmethod
    def of(cls, world: World, limit_bytes: int | None = None) -> Self:
        """Returns an admission with nothing booked yet.

        Without a limit, the limit is that of the device or of the machine.
        """
        device = jax.local_devices()[0]
        if limit_bytes is None:
            limit_bytes = device_limit_bytes(device, world.local_size)
        return cls(limit_bytes, PROCESS_BYTES if device.platform == "cpu" else 0)

    def admit(self, control: Control, job: str, need: Need, *, remedy: str = "") -> None:
        """Books memory for a job's next program, if all ranks have enough. Waits for all ranks.

        Args:
            control: Communicates with the other ranks.
            job: The job's name.
            need: What the program needs, in addition to what the job has booked already.
            remedy: What would reduce the need, as the end of a sentence.

        Raises:
            JobError: On every rank: it doesn't fit on some rank.
        """
        wanted = [*self._booked.get(job, ()), need]
        needed = self._needed([*self._others(job), wanted])
        left = _NO_LIMIT if self.limit_bytes is None else self.limit_bytes - needed
        least = int(control.allreduce_min(np.array([left], np.int64))[0])
        if least < 0:
            texts = gather(control, [left, self._refusal(job, wanted, control.rank, remedy)])
            raise JobError(min(texts, key=lambda text: text[0])[1])
        if least == _NO_LIMIT and control.rank == 0 and not self._warned:
            self._warned = True
            _log.warning(
                "Whether jobs fit into memory is not checked: this device does not say how much it "
                'has. Give it, as by `Runner(memory="80GB")`.'
            )
        self._booked[job] = wanted
        self.most_booked_bytes = max(self.most_booked_bytes, needed)

    def give_back(self, job: str, kept: Callable[[], PyTree]) -> None:
        """Ends a job's booking, except for its latest state. Doesn't wait.

        `kept` returns that state from now on.
        """
        self._booked.pop(job, None)
        self._kept[job] = kept

    def _needed(self, jobs: Sequence[Booking]) -> int:
        return self._process_bytes + needed_by(jobs)

    def _others(self, job: str) -> list[Booking]:
        return [*(booked for name, booked in self._booked.items() if name != job), *self._states()]

    def _states(self) -> list[Booking]:
        """Returns what the states of ended jobs still hold."""
        return [[need] for kept in self._kept.values() if (need := Need.of_state(kept())).lasting]

    def _refusal(self, job: str, wanted: Booking, rank: int, remedy: str) -> str:
        limit, states = self.limit_bytes or 0, self._states()
        running = [booked for name, booked in self._booked.items() if name != job]
        alone, needed = self._needed([*states, wanted]), self._needed([*states, *running, wanted])
        missing = f"{human_bytes(needed - limit)} {'is' if needed - limit == 1 else 'are'} missing"
        lines = [
            f"it does not fit into the memory of rank {rank}: {missing}.",
            (
                f"{_next_to(len(running))} needs {human_bytes(needed)}, and the limit is "
                f"{human_bytes(limit)}."
            ),
        ]
        if running and alone > limit:
            lines.append(f"Alone it needs {human_bytes(alone)}, which is too much as well.")
        elif running:
            fitting = self._fitting(states, running, wanted)
            where = f"next to {fitting} of them" if fitting else "alone only"
            lines.append(f"It fits {where}: alone it needs {human_bytes(alone)}.")
        if held := needed_by(states):
            lines.append(
                f"States of jobs that are over hold {human_bytes(held)}: set their `job.state` to "
                "None."
            )
        others = "run fewer jobs at once, " if running else ""
        lines.append(
            f"To make it fit, {others}{remedy}give `Runner(memory=...)` if a rank may use more."
        )
        return " ".join(lines)

    def _fitting(
        self, states: Sequence[Booking], running: Sequence[Booking], wanted: Booking
    ) -> int:
        """Returns how many running jobs this job fits alongside, counting from the smallest."""
        smallest = sorted(running, key=lambda booking: needed_by([booking]))
        counts = range(len(running), -1, -1)
        limit = self.limit_bytes or 0
        return next(
            (n for n in counts if self._needed([*states, *smallest[:n], wanted]) <= limit), 0
        )


def _next_to(count: int) -> str:
    return f"Next to {count} other job{'s' * (count > 1)} it" if count else "It"


def remedies(program: Program) -> str:
    """Returns what would reduce a program's memory, as the beginning of a list."""
    ways = ["make the batch smaller, "]
    if len(program.collectives) > 1:
        ways.append('leave the step uncut (`cut="whole"`), ')
    if not program.donated:
        ways.append("let the step overwrite its state (`donate_argnums` or `donate_argnames`), ")
    return "".join(ways) + "or "
