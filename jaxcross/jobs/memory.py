"""How much memory jobs need together on a shared device, and how much a rank may use."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)
_GROUPS = "/sys/fs/cgroup"
_MOST = 2**60
_NO_LIMIT = 2**60  # version 1 of control groups reports a huge number if there is no limit


PROCESS_BYTES = 32_000_000
"""Bytes that we assume a rank on CPUs needs besides its arrays, for MPI, threads and matrix
products. We measured 23 to 36 MB if the largest matrix has 67 MB, and about 7 MB if it has 17 MB
(`benchmarks/memory.py --booked`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """The memory of one job on one rank.

    Attributes:
        peak_bytes: Bytes in use at the peak of a step, arguments included.
        boundary_bytes: The most bytes that stay in use between two segments, while another job's
            segment may run.
        exchange_temporary_bytes: The most bytes of temporaries that any of its exchange segments
            needs.

    Raises:
        ValueError: A number is negative, too large, or not a whole number.
    """

    peak_bytes: int = 0
    boundary_bytes: int = 0
    exchange_temporary_bytes: int = 0

    def __post_init__(self) -> None:
        if not all(type(number) is int and 0 <= number < _MOST for number in astuple(self)):
            raise ValueError(
                f"the bytes of a job are whole numbers, not negative, got {self}"[:200]
            )

    @classmethod
    def largest(cls, several: Sequence[JobMemory]) -> Self:
        """Returns the maximum of each field, for a job that runs several programs in turn."""
        return cls(
            **{
                field.name: max(getattr(each, field.name) for each in several)
                for field in fields(cls)
            }
        )

    def with_resting(self, nbytes: int) -> JobMemory:
        """Returns the memory of the job if it keeps `nbytes` more bytes in use all the time."""
        return replace(
            self, peak_bytes=self.peak_bytes + nbytes, boundary_bytes=self.boundary_bytes + nbytes
        )

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Reads the dict that `dataclasses.asdict` made of a `JobMemory`.

        Raises:
            ValueError: `data` is something else.
        """
        if not isinstance(data, dict) or data.keys() != {field.name for field in fields(cls)}:
            raise ValueError(
                f"the memory of a job has {', '.join(field.name for field in fields(cls))}"
            )
        return cls(**data)


def needed_bytes(jobs: Sequence[JobMemory]) -> int:
    """Returns the bytes that these jobs need together on one rank; 0 for no jobs."""
    if not jobs:
        return 0
    return int(needed_by_groups(np.array([astuple(job) for job in jobs]).T))


def needed_by_groups(memory: npt.NDArray[Any]) -> Any:
    """Returns the bytes that each of several groups of jobs needs on a rank.

    The device computes one segment at a time. So only one job is at its peak, while each of the
    others holds what it keeps between two segments. The exchange lane runs at the same time and
    adds the temporaries of one exchange.

    Args:
        memory: The fields of `JobMemory` along the first axis, the jobs of a group along the last
            axis, and any number of axes in between. Zeros stand for an empty place in a group.
    """
    peak, boundary, temporary = memory
    return (peak - boundary).max(-1) + boundary.sum(-1) + temporary.max(-1)


def as_bytes(size: int | str) -> int:
    """Returns the number of bytes that a text such as `80GB` or `512 MiB` states.

    Returns numbers unchanged.

    Raises:
        TypeError: `size` is neither a text nor a whole number.
        ValueError: The text isn't a size, or the size isn't above 0.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(
            f'must be a whole number of bytes, or a text such as "80GB", got {size!r:.60}'
        )
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        if found is None:
            raise ValueError(
                'must be a number of bytes with a unit, such as "80GB" or "512 MiB", got '
                f"{size!r:.60}"
            )
        unit = found[2].lower()
        size = round(float(found[1]) * {**_UNITS, **_BINARY_UNITS}[unit])
    if size <= 0:
        raise ValueError(f"must be above 0 bytes, got {size}")
    return size


def memory_limit(memory: int | str | None) -> int | None:
    """Returns the argument `memory` in bytes; None if it sets no limit.

    Raises:
        TypeError: `memory` is neither a whole number nor a text.
        ValueError: The text isn't a size, or the size isn't above 0.
    """
    if memory is None:
        return None
    try:
        return as_bytes(memory)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`memory` {error}.") from None


def device_limit_bytes(device: Any, ranks: int) -> int | None:
    """Returns the bytes of arrays that a rank may hold; None if unknown. Does not communicate.

    This is the device's own limit. On CPUs it is this rank's share of the machine's memory, or of
    its control group's limit if that is lower.

    Args:
        device: The rank's JAX device.
        ranks: Number of ranks on its host.
    """
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    limits = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError):  # not Linux
        limits += group_limits(Path("/proc/self/cgroup").read_text(), Path(_GROUPS))
    return min(limits) // ranks if limits else None


def group_limits(groups: str, root: Path) -> list[int]:
    """Returns the memory limits of a process's control groups and all their parents.

    Supports both versions of control groups.

    Args:
        groups: Content of `/proc/self/cgroup`.
        root: Where control groups are mounted.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (
            (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        )
        folder = top / path.lstrip("/")
        # In a container, the path may be the host's, which isn't mounted. The loop then still
        # reaches the root, which holds the container's limit.
        for place in (folder, *folder.parents):
            if place.is_relative_to(top):
                with suppress(OSError, ValueError):  # no such file, or one without a limit: "max"
                    limits.append(int((place / name).read_text()))
    return [limit for limit in limits if limit < _NO_LIMIT]
