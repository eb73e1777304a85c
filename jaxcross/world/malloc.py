"""Memory of a rank: kept once it was had, in large pages where the kernel gives them to those who
ask.
"""

from __future__ import annotations

from collections.abc import Mapping

# Large pages; never a mapping of its own, nothing back to the kernel (64 GiB: never); one heap, the
# only one without a limit on the size of what it holds.
_TUNABLES = (
    "glibc.malloc.hugetlb=1:"
    "glibc.malloc.mmap_max=0:"
    "glibc.malloc.trim_threshold=68719476736:"
    "glibc.malloc.arena_max=1"
)


def advice(environ: Mapping[str, str], *, libc: str, accelerators: int) -> str | None:
    """Returns a notice for a user whose ranks compute on CPUs without these settings. Pure.

    Args:
        environ: Of the process.
        libc: Name of its C library.
        accelerators: How many the node has.
    """
    if accelerators or libc != "glibc" or environ.get("GLIBC_TUNABLES"):
        return None
    return (
        "Steps on CPUs take their memory from the kernel each time, a quarter of ResNet-50's time "
        "on a virtual machine. Start ranks by `jaxcross launch`, which has it kept, or with "
        f"GLIBC_TUNABLES={_TUNABLES}"
    )


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with which glibc keeps memory of the kernel; none if the user has tuned it.
    Pure.

    XLA takes a step's buffers from malloc and gives them back, and glibc gives large ones back to
    the kernel, which clears them again: 146,000 pages of 4 kB in each ResNet-50 step (batch 4), or
    600 of 2 MB, and several times that where two jobs and their exchanges take turns. On a virtual
    machine that is up to a third of the step. Kept, two pages a step are left. It is read when a
    process starts, so only who starts it can set it. Other C libraries ignore it.
    """
    return {} if environ.get("GLIBC_TUNABLES") else {"GLIBC_TUNABLES": _TUNABLES}
