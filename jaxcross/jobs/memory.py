"""Computes how much memory jobs need on a shared device, and how much a rank may use."""

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
_NO_LIMIT = 2**60  # without a limit, cgroups v1 reports a huge number


PROCESS_BYTES = 32_000_000
"""Estimated memory, in bytes, that a rank on CPUs needs on top of its arrays: for MPI, threads, and
the buffers of matrix products. We measured 23 to 36 MB when the largest matrix had 67 MB, and about
7 MB when it had 17 MB (`benchmarks/memory.py --booked`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """One job's memory on one rank.

    Attributes:
        peak_bytes: The peak number of bytes in use during a step, including the step's arguments.
        boundary_bytes: The most bytes that stay in use between two of a step's segments, where
            segments of other jobs may run.
        exchange_temporary_bytes: The most bytes of temporary arrays that any collective segment
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
                "the memory of a job must be whole numbers of bytes from 0 to 2**60 - 1, got "
                f"{self!r:.130}"
            )

    @classmethod
    def largest(cls, several: Sequence[JobMemory]) -> Self:
        """Returns the maximum of each field, for a job that alternates between programs."""
        return cls(
            **{
                field.name: max(getattr(each, field.name) for each in several)
                for field in fields(cls)
            }
        )

    def with_resting(self, nbytes: int) -> JobMemory:
        """Returns the memory needed if the job also holds another `nbytes` all the time."""
        return replace(
            self, peak_bytes=self.peak_bytes + nbytes, boundary_bytes=self.boundary_bytes + nbytes
        )

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Creates a `JobMemory` from the result of `dataclasses.asdict`.

        Raises:
            ValueError: `data` isn't such a dict.
        """
        if not isinstance(data, dict) or data.keys() != {field.name for field in fields(cls)}:
            raise ValueError(
                f"the memory of a job must be a dict with exactly the keys "
                f"{', '.join(field.name for field in fields(cls))}, got {data!r:.60}"
            )
        return cls(**data)


def needed_bytes(jobs: Sequence[JobMemory]) -> int:
    """Returns how many bytes these jobs need in total on one rank (0 if there are none)."""
    if not jobs:
        return 0
    return int(needed_by_groups(np.array([astuple(job) for job in jobs]).T))


def needed_by_groups(memory: npt.NDArray[Any]) -> Any:
    """Returns how many bytes each of several groups of jobs needs on a rank.

    Adding up the jobs' peaks would greatly overestimate the memory they need at any given time. The
    device computes one segment at a time, so only one job can be at its peak. All the others are
    between two segments and only hold on to the values they need there. On top of that, the
    exchange lane may be running one exchange, which needs its temporary arrays. The result is the
    sum of these three, assuming the worst case for which job is at its peak and which exchange is
    running.

    Args:
        memory: An array of shape (3, ..., jobs). The first axis corresponds to the fields of
            `JobMemory`, in order; the axes in between are the groups. Pad smaller groups with
            zeros.
    """
    peak, boundary, temporary = memory
    return (peak - boundary).max(-1) + boundary.sum(-1) + temporary.max(-1)


def as_bytes(size: int | str) -> int:
    """Parses a size such as `80GB` or `512 MiB`, and returns it in bytes.

    Numbers are returned unchanged.

    Raises:
        TypeError: `size` is neither a string nor a whole number.
        ValueError: The string isn't a size, or the size isn't positive.
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
    """Returns the argument `memory` in bytes, or None if it's None.

    Raises:
        TypeError: `memory` is neither a whole number nor a string.
        ValueError: The string isn't a size, or the size isn't positive.
    """
    if memory is None:
        return None
    try:
        return as_bytes(memory)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`memory` {error}.") from None


def device_limit_bytes(device: Any, ranks: int) -> int | None:
    """Returns how many bytes of arrays a rank may hold; None if unknown. Doesn't communicate.

    Accelerators report their own limit. On CPUs, the ranks on a host get an equal share of its
    memory. If the process's control group has a lower limit, as is common in containers, they share
    that instead.

    Args:
        device: The rank's JAX device.
        ranks: The number of ranks on the same host.
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
    """Returns the memory limits of a process's control groups, including all parent groups.

    Supports control groups v1 and v2.

    Args:
        groups: The content of `/proc/self/cgroup`.
        root: The folder where control groups are mounted.
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
        # Look for limits in the group's own folder and in all of its parents, even if some of these
        # don't exist. In a container, `/proc/self/cgroup` may contain a path that exists only on
        # the host; by going all the way up to the root of the mount, we still find the container's
        # limit.
        for place in (folder, *folder.parents):
            if place.is_relative_to(top):
                with suppress(OSError, ValueError):  # there's no such file, or it says "max"
                    limits.append(int((place / name).read_text()))
    return [limit for limit in limits if limit < _NO_LIMIT]
