"""A job's own communicators, which replace the user's communicators in its mpi4jax calls.

Without them, the user's communicator could be used at the same time by another job, or outside of
any step, and those messages could match a step's messages. A job's communicators are kept when the
job leaves, and the next job on the same ranks reuses them: MPI only has a few thousand
communicators, and compiled executables contain their handles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

Key = tuple[tuple[int, ...], str]
"""Members in order, and the name of the user's communicator."""


@dataclass(slots=True)
class _Lent:
    comm: Any
    job: ref[Any]


@dataclass(slots=True)
class JobComms:
    """The communicators of each job on this rank.

    Only the exchange lane writes. The jobs' threads read.
    """

    _lent: dict[tuple[Key, int], _Lent] = field(default_factory=dict)

    def for_job(self, job: Any) -> dict[Key, Any]:
        """Returns the communicators of a job."""
        return {key: lent.comm for (key, _), lent in self._lent.copy().items() if lent.job() is job}

    def in_use(self) -> list[tuple[Key, int]]:
        """Returns the communicators of the jobs that haven't left on this rank."""
        return [
            place
            for place, lent in self._lent.copy().items()
            if (job := lent.job()) and not job.done.is_set()
        ]

    def assign(self, job: Any, key: Key, number: int, make: Callable[[], Any]) -> None:
        """Gives a job communicator `number` of those with this key, made by `make` if necessary."""
        lent = self._lent.get((key, number))
        self._lent[key, number] = _Lent(make() if lent is None else lent.comm, ref(job))
