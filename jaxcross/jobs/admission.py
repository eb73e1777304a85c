"""Admission control: decides whether another job still fits into memory, on all ranks.

Before a job runs a compiled program for the first time, it reserves ("books") the memory that the
program needs. A job can't run on some ranks and not on others, so the decision has to be
collective. Each rank works out how much memory would be left, an all-reduce finds the minimum, and
then either every rank admits the job or every rank raises the same error.

Jobs often share arrays. Ten jobs that train adapters on top of the same base model, for example,
all pass the same base parameters to their steps, and charging each job for its own copy would turn
away jobs that do fit. That's why a reservation is more than a number of bytes: it also lists the
arrays that might be shared with other jobs, so that we can count each of them just once.

When a job ends, we release its reservation so that other jobs can use the memory. The job's final
state may stay alive, though, because the user can still read it through `job.state`. We keep
counting those arrays until they've actually been freed.
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
    """How much memory a job's program needs on one rank.

    Attributes:
        memory: The program's total memory, including all arrays.
        lasting: The arrays that might be shared with other jobs: maps each buffer to a weak
            reference to its array and the size in bytes. The reference is weak because a
            reservation shouldn't keep the memory alive. The buffer's address alone wouldn't be
            enough to identify an array, since the allocator may reuse the address as soon as the
            array is freed.
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
        """Computes the need of a program.

        Args:
            memory: The program's memory. An array that occurs several times in `lasting` must be
                counted that many times here.
            lasting: Arrays that might be shared with other jobs, with their sizes in bytes.
            without: Buffers to treat as private to this job even if they occur in `lasting`.
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
        """Returns the need of a job that has ended but whose state is still held."""
        arrays = [(array, array.nbytes) for array in arrays_by_buffer(state).values()]
        nbytes = sum(nbytes for _, nbytes in arrays)
        return cls.of(JobMemory(peak_bytes=nbytes, boundary_bytes=nbytes), arrays)

    def present(self) -> dict[Hashable, int]:
        """Returns the size of each lasting buffer whose array hasn't been freed or donated."""
        arrays = (
            (buffer, reference(), nbytes) for buffer, (reference, nbytes) in self.lasting.items()
        )
        return {
            buffer: nbytes
            for buffer, array, nbytes in arrays
            if array is not None and not array.is_deleted()
        }


Booking: TypeAlias = Sequence[Need]  # one job's reservations: a `Need` per program


def needed_by(bookings: Sequence[Booking]) -> int:
    """Returns how many bytes of arrays the jobs need when they all run at the same time.

    A buffer that's shared by several jobs is counted only once.

    Args:
        bookings: Each job's reservations.
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
    """Tracks the memory reserved by a run's jobs on one rank.

    Whenever a new reservation is made, the same jobs must hold reservations on every rank. To
    guarantee that, reservations are made and released in the same order everywhere: they're made in
    the exchange lane (the thread that runs all collective operations), and released when the ranks
    vote that the job has ended.

    Memory limits may differ between ranks. All ranks still admit the same jobs, because the rank
    with the least free memory decides.

    Args:
        limit_bytes: How many bytes this rank may use; None if unknown.
        process_bytes: How many bytes the process needs on top of its JAX arrays.

    Attributes:
        limit_bytes: As above.
        most_booked_bytes: The peak number of bytes reserved at the same time.
    """

    def __init__(self, limit_bytes: int | None, process_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._process_bytes = process_bytes
        self.most_booked_bytes = 0
        self._booked: dict[str, Booking] = {}
        # For each job that has ended, a function that returns the state it's still holding.
        self._kept: dict[str, Callable[[], PyTree]] = {}
        self._warned = False

    @classmethod
    def of(cls, world: World, limit_bytes: int | None = None) -> Self:
        """Creates an instance without any reservations.

        If `limit_bytes` is None, we use the limit reported by the device or, on CPUs, this rank's
        share of the machine's memory.
        """
        device = jax.local_devices()[0]
        if limit_bytes is None:
            limit_bytes = device_limit_bytes(device, world.local_size)
        return cls(limit_bytes, PROCESS_BYTES if device.platform == "cpu" else 0)

    def admit(self, control: Control, job: str, need: Need, *, remedy: str = "") -> None:
        """Reserves memory for a job's next program if all ranks have enough. Waits for all ranks.

        Args:
            control: Used to communicate with the other ranks.
            job: The job's name.
            need: The memory of the new program. It's added to the job's existing reservations.
            remedy: What the user can do to reduce the need, phrased so that it fits into the last
                sentence of the error message.

        Raises:
            JobError: On every rank: some rank is short of memory.
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
                "how much memory it has. To have it checked, pass the amount, as in "
                '`Runner(memory="80GB")`.'
            )
        self._booked[job] = wanted
        self.most_booked_bytes = max(self.most_booked_bytes, needed)

    def give_back(self, job: str, kept: Callable[[], PyTree]) -> None:
        """Releases the reservations of a job that has ended. Doesn't wait.

        From then on, we call `kept` to find out which state the job is still holding, and count
        only that.
        """
        self._booked.pop(job, None)
        self._kept[job] = kept

    def _needed(self, jobs: Sequence[Booking]) -> int:
        return self._process_bytes + needed_by(jobs)

    def _others(self, job: str) -> list[Booking]:
        return [*(booked for name, booked in self._booked.items() if name != job), *self._states()]

    def _states(self) -> list[Booking]:
        """Returns the memory that's still taken up by the states of jobs that have ended."""
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
        """Returns how many of the running jobs this job fits with, starting with the smallest."""
        smallest = sorted(running, key=lambda booking: needed_by([booking]))
        counts = range(len(running), -1, -1)
        limit = self.limit_bytes or 0
        return next(
            (n for n in counts if self._needed([*states, *smallest[:n], wanted]) <= limit), 0
        )


def _together_with(count: int) -> str:
    return f"Together with {count} other job{'s' * (count > 1)}, it" if count else "It"


def remedies(program: Program) -> str:
    """Returns advice on how to reduce a program's memory, as the beginning of a list."""
    ways = ["make the batch smaller, "]
    if len(program.collectives) > 1:
        ways.append('leave the step uncut (`cut="whole"`), ')
    if not program.donated:
        ways.append("let the step overwrite its state (`donate_argnums` or `donate_argnames`), ")
    return "".join(ways) + "or "
