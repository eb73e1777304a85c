"""Small agreements between all ranks, on a communicator of their own.

Votes and checks only need two operations, an elementwise minimum and a gathering of texts, so
`Control` has nothing else. Because nothing else uses the communicator, these messages can't be
mixed up with exchanges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np


class Control(Protocol):
    """Small messages between all ranks. `JobContext.run_on_all_ranks` passes it to your function.

    Every call waits for every rank. Only one thread may use it.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        """Returns the elementwise minimum over ranks of an int64 array.

        The array must have the same length on every rank.
        """
        ...

    def allgather_text(self, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        ...


RunOnAllRanks: TypeAlias = Callable[[str, Callable[[Control], Any]], Any]
"""`(label, work)` -> `work(control)`, run on all ranks while nothing else exchanges.

In a job, that's in the same slot of every rank's exchange lane.
"""


class MpiControl:
    """`Control` over a communicator that nothing else uses."""

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
    """Returns every rank's value, by rank. Waits for all ranks.

    Values are sent as JSON, so tuples arrive as lists.
    """
    text = json.dumps(value)
    return [
        json.loads(each) for each in (control.allgather_text(text) if control.size > 1 else [text])
    ]


def all_equal(control: Control, number: int) -> bool:
    """Whether all ranks pass the same number, which must be below 2**62. Waits for all ranks.

    The result is identical across ranks.
    """
    return which_equal(control, [number])[0]


def which_equal(control: Control, numbers: Sequence[int]) -> list[bool]:
    """Returns for each number whether all ranks pass the same. Waits for all ranks.

    The result is identical across ranks. Each rank passes as many numbers, all below 2**62.
    """
    mine = np.array([(number, -number) for number in numbers], np.int64)
    # The minimum of the negated numbers is the negated maximum.
    low, high = control.allreduce_min(mine.reshape(-1)).reshape(-1, 2).T
    return (low == -high).tolist()


def any_rank(control: Control, flag: object) -> bool:
    """Whether `flag` is true on any rank. Waits for all ranks, and is identical across them."""
    return control.allreduce_min(np.array([-bool(flag)], np.int64)).item() < 0
