"""Reads the launcher's environment variables, and checks them against what MPI reports.

All functions are pure: the environment is passed in as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxcross.errors import ExchangeError

# Every MPI launcher sets one of these variables in all processes it starts. SLURM's variable comes
# last so that it only counts if none of the others is set: inside a SLURM job, `mpirun` starts its
# helper processes through SLURM, and in the ranks, the variable then holds the number of these
# helpers. SLURM_NTASKS wouldn't help, since it's also set in a batch script, which isn't a rank.
_SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MPI_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)

# The same for a rank's number. These only serve to name a rank before MPI has started.
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")

MPI_SETTINGS = {"OMPI_MCA_btl_tcp_flags": "send", "OMPI_MCA_mpi_yield_when_idle": "1"}
"""Settings that we start Open MPI with. For measurements, see `benchmarks/exchange_cost.py`.

By default, Open MPI sends long messages over TCP using PUT operations, in only one direction at a
time. An all-reduce then takes 1.7 times as long as with ordinary sends, which the first setting
selects. The second makes a rank that's waiting for a message yield its core instead of taking it
away from a computation. Both take precedence over Open MPI's parameter files.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRanks:
    """The number of ranks started by the launcher, and the variable that says so."""

    size: int
    variable: str


def read_launch(environ: Mapping[str, str]) -> LaunchedRanks | None:
    """Returns what the launcher's variables say, or None if no launcher started this process."""
    for name in _SIZES:
        if environ.get(name, "").isdecimal():
            return LaunchedRanks(size=int(environ[name]), variable=name)
    return None


def read_rank(environ: Mapping[str, str]) -> int | None:
    """Returns this rank's number, or None if the launcher's variables don't tell."""
    text = next((environ[name] for name in _RANKS if environ.get(name, "").isdecimal()), "")
    return int(text) if text else None


def check_launch(launch: LaunchedRanks | None, *, world_size: int, vendor: str) -> None:
    """Raises unless MPI's world has as many ranks as the launcher started.

    A mismatch usually means that MPI was set up for a different launcher. Each process then ends up
    alone in its own MPI world, and would train without exchanging anything.

    Raises:
        ExchangeError: The numbers differ. The message tells users what to do about it, depending on
            their launcher.
    """
    if launch is None or launch.size == world_size:
        return
    if launch.variable.startswith("SLURM"):
        remedy = (
            "start the ranks with `srun --mpi=pmix` or `srun --mpi=pmi2`, whichever `srun "
            "--mpi=list` offers, or with `mpirun`"
        )
    else:
        remedy = (
            f"use the `mpirun` of the same MPI that mpi4py loaded ({vendor}): `jaxcross launch -n "
            f"{launch.size} ...` finds it, and `jaxcross doctor` shows both"
        )
    raise ExchangeError(
        f"The launcher started {launch.size} ranks (`{launch.variable}={launch.size}`), but MPI "
        f"sees a world of {world_size}. Each process would train alone and nothing would be "
        f"exchanged. Remedy: {remedy}."
    )


def vendor_of(library_version: str) -> str:
    """Returns `mpich`, `openmpi`, `intel`, ... from the text of `MPI.Get_library_version()`."""
    text = library_version.lower()
    for mark, vendor in (
        ("open mpi", "openmpi"),
        ("intel", "intel"),
        ("mvapich", "mvapich"),
        ("cray", "cray"),
    ):
        if mark in text:
            return vendor
    return "mpich" if "mpich" in text else (text.split() or ["unknown"])[0]
