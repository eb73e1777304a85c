"""Tests the memory of jobs that run together, and the memory limits of a rank."""

from pathlib import Path
from typing import Any

import pytest

from jaxcross.jobs.memory import JobMemory, as_bytes, device_limit_bytes, group_limits, needed_bytes


def _job(peak: int, boundary: int, temporary: int = 0) -> JobMemory:
    return JobMemory(peak_bytes=peak, boundary_bytes=boundary, exchange_temporary_bytes=temporary)


@pytest.mark.parametrize(
    ("jobs", "needed"),
    [
        ([], 0),
        ([_job(9, 4, 1)], 10),
        ([_job(9, 4, 1)] * 3, 18),
        # The second job's peak exceeds what it keeps by the most. The first job has the exchange
        # with the largest temporaries.
        ([_job(10, 8, 3), _job(9, 4, 1)], 8 + 9 + 3),
    ],
)
def test_one_job_is_at_its_peak_at_a_time(jobs: list[JobMemory], needed: int) -> None:
    assert needed_bytes(jobs) == needed


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("512 MiB", 2**29),
        ("1.5tb", 15 * 10**11),
        ("7", 7),
        ("64k", 64_000),
        (9, 9),
    ],
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert as_bytes(text) == count


@pytest.mark.parametrize("size", ["80 GBit", "-1GB", "", "GB", "0 MB", 0, "1e9", None, True, 1e9])
def test_what_is_no_size_is_an_error(size: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="must be"):
        as_bytes(size)


class _Accelerator:
    platform = "gpu"

    def __init__(self, stats: dict[str, int] | None) -> None:
        self._stats = stats

    def memory_stats(self) -> dict[str, int] | None:
        return self._stats


def test_an_accelerator_states_its_own_limit() -> None:
    assert device_limit_bytes(_Accelerator({"bytes_limit": 80}), ranks=4) == 80
    assert device_limit_bytes(_Accelerator({"bytes_in_use": 80}), ranks=4) is None
    assert device_limit_bytes(_Accelerator(None), ranks=4) is None


def test_a_group_around_the_process_limits_it(tmp_path: Path) -> None:
    """Version 2 of control groups. The task's group has no limit, but the job's group around it
    does.
    """
    job = tmp_path / "slurm" / "job_7"
    (job / "task_0").mkdir(parents=True)
    (job / "memory.max").write_text("4096\n")
    (job / "task_0" / "memory.max").write_text("max\n")
    assert group_limits("0::/slurm/job_7/task_0\n", tmp_path) == [4096]
    assert group_limits("0::/a/host's/path\n", tmp_path) == []
    (tmp_path / "memory.max").write_text("9000")
    assert group_limits("0::/a/host's/path\n", tmp_path) == [9000], (
        "in a container the root is the container's own"
    )


def test_the_first_version_of_groups_limits_too(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("4096\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert group_limits("5:cpu,cpuacct:/other\n4:memory:/job\n", tmp_path) == [4096]
