"""Communicators of a job's own in place of those that its mpi4jax calls name.

Other calls on the user's communicator, by another job or outside of any step, then cannot meet a
step's messages. A communicator is kept when its job has left, and the next job on the same ranks
gets it: MPI has some thousands only, and executables hold their handles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

Key = tuple[tuple[int, ...], str]
"""Members in their order, and the name of the user's communicator."""


@dataclass(slots=True)
class _Lent:
    comm: Any
    job: ref[Any]


@dataclass(slots=True)
class JobComms:
    """The communicators of each job on this rank. Only the exchange lane writes; threads of jobs
    read.
    """

    _lent: dict[tuple[Key, int], _Lent] = field(default_factory=dict)

    def for_job(self, job: Any) -> dict[Key, Any]:
        """Returns the communicators of a job."""
        return {key: lent.comm for (key, _), lent in self._lent.copy().items() if lent.job() is job}

    def in_use(self) -> list[tuple[Key, int]]:
        """Returns the communicators of jobs that have not left on this rank."""
        return [
            place
            for place, lent in self._lent.copy().items()
            if (job := lent.job()) and not job.done.is_set()
        ]

    def assign(self, job: Any, key: Key, number: int, make: Callable[[], Any]) -> None:
        """Gives a job the communicator `number` of those with this key, which is made if there is
        none.
        """
        lent = self._lent.get((key, number))
        self._lent[key, number] = _Lent(make() if lent is None else lent.comm, ref(job))
