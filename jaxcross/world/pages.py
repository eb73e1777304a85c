"""Memory pages of a rank: large ones where the kernel gives them to those who ask."""

from __future__ import annotations

from collections.abc import Mapping


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which glibc asks for transparent huge pages; none where the user has tuned it. Pure.

    XLA takes a step's buffers from malloc and gives them back. With pages of 4 kB the kernel clears 146,000 of them in
    each ResNet-50 step (batch 4), which is a seventh of its time on one core: 1.55 s, and 1.34 s with huge pages. It is
    read when a process starts, so only who starts it can set it. Other C libraries ignore it.
    """
    return {} if environ.get("GLIBC_TUNABLES") else {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
