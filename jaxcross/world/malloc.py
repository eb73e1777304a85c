"""Settings that make glibc's malloc keep freed memory and use large pages."""

from __future__ import annotations

from collections.abc import Mapping

# What the settings mean, in this order: Use large pages if the kernel offers them on request. Don't
# give any allocation a mapping of its own. Never return memory to the kernel (the threshold of 64
# GiB is never reached). Use a single heap, because only the main heap can grow without limit.
_TUNABLES = (
    "glibc.malloc.hugetlb=1:"
    "glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=68719476736:"
    "glibc.malloc.arena_max=1"
)


def advice(environ: Mapping[str, str], *, libc: str, accelerators: int) -> str | None:
    """Returns advice for users whose ranks compute on CPUs without these settings, or None. Pure.

    Args:
        environ: The environment of the process.
        libc: The name of its C library.
        accelerators: Number of accelerators of the node.
    """
    if accelerators or libc != "glibc" or environ.get("GLIBC_TUNABLES"):
        return None
    return (
        "On CPUs, each step gets its memory from the kernel again, which takes a quarter of "
        "ResNet-50's time on a virtual machine. To keep the memory, start the ranks by `jaxcross "
        "launch`, or with "
        f"GLIBC_TUNABLES={_TUNABLES}"
    )


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables with which glibc keeps its memory. Pure.

    Empty if the user has already tuned glibc.

    XLA allocates the buffers of a step with malloc, and frees them after the step. glibc gives
    large buffers back to the kernel, and when they are allocated again in the next step, the kernel
    has to clear all of their pages. For ResNet-50 with a batch of 4, that's 146,000 pages of 4 kB
    per step, or 600 pages of 2 MB, and several times as many if two jobs and their exchanges
    alternate. On a virtual machine, this takes up to a third of the step. If glibc keeps the
    memory, only two pages per step remain.

    A process can't set this variable for itself, because glibc only reads it when the process
    starts. So the parent process has to set it. Other C libraries ignore the variable.
    """
    return {} if environ.get("GLIBC_TUNABLES") else {"GLIBC_TUNABLES": _TUNABLES}
