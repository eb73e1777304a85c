"""Settings that make glibc's malloc hold on to freed memory and use large pages."""

from __future__ import annotations

from collections.abc import Mapping

# In order: use large pages if the kernel offers them on request; never give an allocation its own
# mapping; never return memory to the kernel (the threshold of 64 GiB is never reached); use a
# single heap, because only the main heap can grow without limit.
_TUNABLES = (
    "glibc.malloc.hugetlb=1:"
    "glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=68719476736:"
    "glibc.malloc.arena_max=1"
)


def advice(environ: Mapping[str, str], *, libc: str, accelerators: int) -> str | None:
    """Returns advice for users whose ranks compute on CPUs without these settings, or None. Pure.

    Args:
        environ: This process's environment.
        libc: Name of this process's C library.
        accelerators: Number of accelerators on this node.
    """
    if accelerators or libc != "glibc" or environ.get("GLIBC_TUNABLES"):
        return None
    return (
        "On CPUs, glibc returns a step's memory to the kernel, and the next step has to get it "
        "back, which takes a quarter of ResNet-50's time on a virtual machine. To keep the memory, "
        "start the ranks with `jaxcross launch`, or set "
        f"GLIBC_TUNABLES={_TUNABLES}"
    )


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that make glibc hold on to its memory. Pure.

    Empty if the user has already tuned glibc themselves.

    XLA allocates a step's buffers with malloc and frees them after the step. glibc hands large
    buffers back to the kernel, so when the next step allocates them again, the kernel has to clear
    every page. For ResNet-50 with a batch of 4, that's 146,000 pages of 4 kB per step (or 600 pages
    of 2 MB), and several times as many when two jobs and their exchanges take turns. On a virtual
    machine, this accounts for up to a third of the step. If glibc holds on to the memory, only two
    pages per step remain.

    A process can't set this variable for itself because glibc only reads it on startup, so the
    parent process has to set it. Other C libraries ignore it.
    """
    return {} if environ.get("GLIBC_TUNABLES") else {"GLIBC_TUNABLES": _TUNABLES}
