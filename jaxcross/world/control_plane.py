"""Small agreements between all ranks, on a separate communicator.

`Control` offers just the two operations that votes and checks need: an elementwise minimum, and
gathering texts. It uses a separate communicator because otherwise, MPI could match a vote's message
with an exchange's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np


class Control(Protocol):
    """Small messages between all ranks. `JobContext.run_on_all_ranks` passes this to your function.

    Every call waits for all ranks. Only one thread may use it at a time.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        """Returns the elementwise minimum over ranks of an int64 array.

        The array must have the same length on all ranks.
        """
        ...

    def allgather_text(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in rank order."""
        ...


RunOnAllRanks: TypeAlias = Callable[[str, Callable[[Control], Any]], Any]
"""`(label, work)` -> `work(control)`, run on all ranks while nothing else exchanges.

Within a job, it runs in the same slot of every rank's exchange lane.
"""


class MpiControl:
    """A `Control` backed by an MPI communicator that nothing else may use."""

    __slots__ = ("_comm", "_min", "rank", "size")

    def __init__(self, comm: Any, minimum: Any) -> None:
        self._comm = comm
        self._min = minimum
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        sent = np.ascontiguousarray(values, dtype=np.int64)
        received = np.empty_like(sent)
        self._comm.Allreduce(sent, received, op=self._min)
        return received

    def allgather_text(self, text: str) -> list[str]:
        return self._comm.allgather(text)


def gather(control: Control, value: object) -> list[Any]:
    """Returns all ranks' values, in rank order. Waits for all ranks.

    Values travel as JSON, so tuples arrive as lists.
    """
    text = json.dumps(value)
    return [
        json.loads(each) for each in (control.allgather_text(text) if control.size > 1 else [text])
    ]


def all_equal(control: Control, number: int) -> bool:
    """Whether all ranks pass the same number, which must be below 2**62. Waits for all ranks.

    The result is identical on all ranks.
    """
    return which_equal(control, [number])[0]


def which_equal(control: Control, numbers: Sequence[int]) -> list[bool]:
    """Returns which of these numbers are the same on all ranks. Waits for all ranks.

    All ranks must pass equally long sequences, with every number below 2**62. The result is
    identical on all ranks.
    """
    mine = np.array([(number, -number) for number in numbers], np.int64)
    # The minimum of the negated numbers is their negated maximum.
    low, high = control.allreduce_min(mine.reshape(-1)).reshape(-1, 2).T
    return (low == -high).tolist()


def any_rank(control: Control, flag: object) -> bool:
    """Whether `flag` is true on at least one rank. Identical on all ranks. Waits for all ranks."""
    return control.allreduce_min(np.array([-bool(flag)], np.int64)).item() < 0
