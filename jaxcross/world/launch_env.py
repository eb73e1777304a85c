"""The launcher's variables for this process, compared with what MPI reports.

Pure: the environment is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxcross.errors import ExchangeError

# Launchers that start MPI ranks set one of these variables in each process. SLURM's variable only
# counts if none of the MPI launchers' variables is set: under `mpirun` inside a SLURM job, it
# counts mpirun's own helper processes. We can't use SLURM_NTASKS, because a batch script has it,
# too.
_SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MPI_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)

MPI_SETTINGS = {"OMPI_MCA_btl_tcp_flags": "send", "OMPI_MCA_mpi_yield_when_idle": "1"}
"""Settings with which we start Open MPI; see `benchmarks/exchange_cost.py` for the measurements.

By default, Open MPI transfers long messages over TCP with PUT operations, in one direction at a
time, and an all-reduce takes 1.7 times as long as with plain sends. The second setting is needed
because a waiting rank would otherwise take the core away from computation. These settings take
precedence over Open MPI's parameter files.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRanks:
    """The number of ranks that the launcher announced, and the variable that it is from."""

    size: int
    variable: str


def read_launch(environ: Mapping[str, str]) -> LaunchedRanks | None:
    """Reads the launcher's variables. Returns None if no launcher started this process."""
    for name in _SIZES:
        if environ.get(name, "").isdecimal():
            return LaunchedRanks(size=int(environ[name]), variable=name)
    return None


def check_launch(launch: LaunchedRanks | None, *, world_size: int, vendor: str) -> None:
    """Refuses a world whose size isn't the number of launched processes.

    This typically means that N processes have been launched, and each of them believes it's alone.

    Raises:
        ExchangeError: The sizes differ. The text has the remedy for the launcher that was used.
    """
    if launch is None or launch.size == world_size:
        return
    if launch.variable.startswith("SLURM"):
        remedy = (
            "start with `srun --mpi=pmix` (or `--mpi=pmi2`), as `srun --mpi=list` offers, or with "
            "`mpirun`"
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
    """Returns `mpich`, `openmpi`, `intel`, ... given the text of `MPI.Get_library_version()`."""
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
