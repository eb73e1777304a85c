"""Settings of glibc's malloc for a rank, so that freed memory is kept and uses large pages."""

from __future__ import annotations

from collections.abc import Mapping

# In this order: use large pages, if the kernel gives them on request; never use a separate mapping
# for an allocation; never return memory to the kernel (64 GiB stands for never); and use one heap,
# since the main heap is the only one whose size isn't limited.
_TUNABLES = (
    "glibc.malloc.hugetlb=1:"
    "glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=68719476736:"
    "glibc.malloc.arena_max=1"
)


def advice(environ: Mapping[str, str], *, libc: str, accelerators: int) -> str | None:
    """Returns a notice for users whose ranks compute on CPUs without these settings. Pure.

    Args:
        environ: The environment of the process.
        libc: The name of its C library.
        accelerators: Number of accelerators of the node.
    """
    if accelerators or libc != "glibc" or environ.get("GLIBC_TUNABLES"):
        return None
    return (
        "Steps on CPUs take their memory from the kernel each time, a quarter of ResNet-50's time "
        "on a virtual machine. Start ranks by `jaxcross launch`, which has it kept, or with "
        f"GLIBC_TUNABLES={_TUNABLES}"
    )


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which glibc keeps its memory; none if the user has tuned it. Pure.

    XLA allocates a step's buffers with malloc and frees them afterwards. glibc returns large
    buffers to the kernel, which has to clear the pages when they are allocated again. In each
    ResNet-50 step (batch 4), this affects 146,000 pages of 4 kB, or 600 pages of 2 MB, and several
    times as many if two jobs and their exchanges alternate. On a virtual machine, that takes up to
    a third of the step. If glibc keeps the memory, only two pages per step remain.

    glibc reads the variable when a process starts, so only the parent that starts the process can
    set it. Other C libraries ignore the variable.
    """
    return {} if environ.get("GLIBC_TUNABLES") else {"GLIBC_TUNABLES": _TUNABLES}
