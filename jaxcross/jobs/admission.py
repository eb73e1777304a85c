"""Admission of jobs by memory: whether another job still fits, on all ranks.

Before a job runs a compiled program for the first time, it reserves ("books") the memory that the
program needs. A job can only run on all ranks or on none, so they have to make this decision
together. The ranks compute the minimum over all ranks of the memory that would be left, and either
all of them admit the job or all of them raise the same error.

Jobs often share arrays. For example, ten jobs that train adapters on one base model pass the same
base parameters to their steps. If each job counted these arrays as its own, we'd reject jobs that
do fit. So a booking isn't just a number of bytes: it also lists the arrays that other jobs may hold
too, and each of these is counted only once.

When a job ends, we remove its booking, so that other jobs can have its memory. However, the user
can still read the job's final state from `job.state`, which keeps these arrays in memory. So we
count them until they have been freed.
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
        lasting: The arrays that other jobs may hold too: for each buffer, a weak reference to the
            array and its bytes. The references are weak so that a booking doesn't keep the memory
            in use. We can't identify an array by the address of its buffer alone, because once the
            array has been freed, a new array may be allocated at the same address.
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
            memory: The program's memory. It counts an array once for each time the array occurs in
                `lasting`.
            lasting: Arrays that other jobs may hold too, and their bytes.
            without: Buffers that count as this job's own even if they occur in `lasting`.
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
        """Returns the bytes of each lasting buffer whose array hasn't been freed or donated."""
        arrays = (
            (buffer, reference(), nbytes) for buffer, (reference, nbytes) in self.lasting.items()
        )
        return {
            buffer: nbytes
            for buffer, array, nbytes in arrays
            if array is not None and not array.is_deleted()
        }


Booking: TypeAlias = Sequence[Need]  # one job's bookings: a `Need` per program


def needed_by(bookings: Sequence[Booking]) -> int:
    """Returns how many bytes of arrays the jobs need if all of them run at the same time.

    A buffer that several jobs hold is counted only once.

    Args:
        bookings: The bookings of each job.
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

    Whenever a new job books memory, the same jobs must have bookings on every rank. That's the case
    because bookings are made and removed in the same order everywhere: a booking is made in the
    exchange lane, i.e. the thread that runs all operations in which the ranks take part together,
    and it's removed when the ranks vote that the job has ended.

    The ranks' memory limits may differ. They still admit the same jobs, because the rank with the
    least free memory decides.

    Args:
        limit_bytes: The bytes that this rank may use; None if unknown.
        process_bytes: The bytes that the process needs besides JAX arrays.

    Attributes:
        limit_bytes: As above.
        most_booked_bytes: The most bytes that were booked at the same time.
    """

    def __init__(self, limit_bytes: int | None, process_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._process_bytes = process_bytes
        self.most_booked_bytes = 0
        self._booked: dict[str, Booking] = {}
        # For each job that has ended, a function that returns the state it still holds.
        self._kept: dict[str, Callable[[], PyTree]] = {}
        self._warned = False

    @classmethod
    def of(cls, world: World, limit_bytes: int | None = None) -> Self:
        """Returns an object without any bookings.

        If `limit_bytes` is None, uses what the device reports or, on CPUs, this rank's share of the
        machine's memory.
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
            need: The memory of the new program. The job's earlier bookings remain.
            remedy: What the user can do to reduce the need, as part of the error's last sentence.

        Raises:
            JobError: On every rank: some rank doesn't have enough memory.
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
                "Whether jobs fit into memory is not checked, because this device does not report "
                'how much it has. Pass it, as in `Runner(memory="80GB")`.'
            )
        self._booked[job] = wanted
        self.most_booked_bytes = max(self.most_booked_bytes, needed)

    def give_back(self, job: str, kept: Callable[[], PyTree]) -> None:
        """Removes the bookings of a job that has ended. Doesn't wait.

        From now on, we call `kept` to find out which state the job still holds, and count that.
        """
        self._booked.pop(job, None)
        self._kept[job] = kept

    def _needed(self, jobs: Sequence[Booking]) -> int:
        return self._process_bytes + needed_by(jobs)

    def _others(self, job: str) -> list[Booking]:
        return [*(booked for name, booked in self._booked.items() if name != job), *self._states()]

    def _states(self) -> list[Booking]:
        """Returns the memory that is still in use by the states of jobs that have ended."""
        return [[need] for kept in self._kept.values() if (need := Need.of_state(kept())).lasting]

    def _refusal(self, job: str, wanted: Booking, rank: int, remedy: str) -> str:
        limit = self.limit_bytes or 0
        states = self._states()
        running = [booked for name, booked in self._booked.items() if name != job]
        alone = self._needed([*states, wanted])
        needed = self._needed([*states, *running, wanted])
        missing = f"{human_bytes(needed - limit)} {'is' if needed - limit == 1 else 'are'} missing"
        lines = [
            f"it does not fit into the memory of rank {rank}: {missing}.",
            (
                f"{_together_with(len(running))} needs {human_bytes(needed)}, and the limit is "
                f"{human_bytes(limit)}."
            ),
        ]
        if running and alone > limit:
            lines.append(f"Even alone, it needs {human_bytes(alone)}, which is too much.")
        elif running:
            fitting = self._fitting(states, running, wanted)
            where = f"together with {fitting} of them" if fitting else "only alone"
            lines.append(f"It fits {where}: alone, it needs {human_bytes(alone)}.")
        held = needed_by(states)
        if held:
            lines.append(
                f"States of jobs that have ended hold {human_bytes(held)}: set their `job.state` "
                "to None."
            )
        others = "run fewer jobs at once, " if running else ""
        lines.append(
            f"To make it fit, {others}{remedy}give `Runner(memory=...)` if a rank may use more."
        )
        return " ".join(lines)

    def _fitting(
        self, states: Sequence[Booking], running: Sequence[Booking], wanted: Booking
    ) -> int:
        """Returns how many of the running jobs this job fits with, counting from the smallest."""
        smallest = sorted(running, key=lambda booking: needed_by([booking]))
        counts = range(len(running), -1, -1)
        limit = self.limit_bytes or 0
        return next(
            (n for n in counts if self._needed([*states, *smallest[:n], wanted]) <= limit), 0
        )


def _together_with(count: int) -> str:
    return f"Together with {count} other job{'s' * (count > 1)}, it" if count else "It"


def remedies(program: Program) -> str:
    """Returns what the user can do to reduce a program's memory, as the beginning of a list."""
    ways = ["make the batch smaller, "]
    if len(program.collectives) > 1:
        ways.append('leave the step uncut (`cut="whole"`), ')
    if not program.donated:
        ways.append("let the step overwrite its state (`donate_argnums` or `donate_argnames`), ")
    return "".join(ways) + "or "
