"""Starts the world: MPI, XLA's thread pool, the device, and the hooks that terminate all ranks."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from jaxcross import _jax_compat as compat
from jaxcross._endings import ExitKind
from jaxcross._files import TIME, start_time
from jaxcross._versions import mpi4jax_fault, mpi4jax_remedy
from jaxcross.errors import ExchangeError, clause
from jaxcross.health import (
    INTERRUPTED,
    AbortReason,
    ExceptionHooks,
    FlightRecorder,
    SigtermHandler,
    Watchdog,
    abort_everywhere,
    end_processes,
    install_interrupt,
    is_interactive,
    print_error,
    process,
)
from jaxcross.program import ExecutableCache
from jaxcross.wire import MpiWire, WireLibrary
from jaxcross.world import malloc, wire_choice, xla_pool
from jaxcross.world.control_plane import MpiControl
from jaxcross.world.exchange_owner import ExchangeOwner, check_interval
from jaxcross.world.launch_env import (
    MPI_SETTINGS,
    LaunchedRanks,
    check_launch,
    read_launch,
    vendor_of,
)
from jaxcross.world.neighbours import Neighbours
from jaxcross.world.start_limit import limited_start
from jaxcross.world.start_notice import StartNotice, no_progress_wanted
from jaxcross.world.workers import mark, world_of_worker
from jaxcross.world.world import World

_log = logging.getLogger(__name__)

# This process's MPI world, once `initialize` has created it. There's only ever one, since MPI
# starts only once per process. It's a global because scripts decorate their steps before calling
# `initialize`, so a step can't look up the world until it's called.
_CURRENT: list[World] = []
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "JAX_CUDA_VISIBLE_DEVICES",
)


def initialize(
    *,
    stall_timeout_s: float = 300.0,
    heartbeat_timeout_s: float = 30.0,
    wire: WireLibrary | None = None,
) -> World:
    """Joins the MPI world. Waits for all ranks. Call this before creating the first JAX array.

    From then on, all ranks end together: if any of them has an uncaught exception, dies or stops
    responding, all ranks are terminated, and each prints an error naming the failed rank. In an
    interactive session (Python's prompt or a notebook), uncaught exceptions don't terminate
    anything. SIGTERM works like Ctrl-C, with exit code 143.

    There are three environment variables:

    - `JAXCROSS_EVENTS` names a folder in which each rank records its activities to a file, for
      `jaxcross doctor --post-mortem`.
    - `JAXCROSS_TIME` is the text that replaces `{time}` in the names of folders that a run writes
      to. `jaxcross launch` sets it. If it isn't set, the time when the ranks have joined is used.
      All ranks then get rank 0's value, so you can use the variable to name files of your own.
    - `JAXCROSS_CHECK_CALLS` makes checks less frequent. Whenever you call a step outside a run, the
      ranks first check that they are all calling the same step; set this to n to do so only on
      every n-th call. If the variable differs between ranks, the largest value wins.

    Ranks that share a node each take their own accelerator. XLA's CPU thread pool gets enough
    threads that an exchange waiting for other ranks can't block computation. Without a launcher,
    the world has a single rank. Calling `initialize` again returns the same world, as long as it
    doesn't request different settings.

    Worker processes started by a rank (e.g. by `multiprocessing` or Grain) aren't part of the MPI
    world. There, `initialize` returns immediately, without joining the other ranks. The world it
    returns reports the same `rank`, `size` etc. as the parent process, so code that only reads
    these works as usual, but any attempt to communicate raises `ExchangeError`.

    Args:
        stall_timeout_s: If a rank waits for other ranks for longer than this many seconds, the wait
            is reported and all ranks are aborted. This also applies to the start of MPI.
        heartbeat_timeout_s: If a rank sends no heartbeat for longer than this many seconds, it's
            reported and all ranks are aborted. 0 disables this. Ranks send about one heartbeat per
            second, from a separate thread that isn't held up by long computations.
        wire: The library for the exchanges: `mpi4jax`, which exchanges inside XLA executables, or
            `mpi4py`, which exchanges between them. Must be the same on all ranks. Defaults to the
            environment variable `JAXCROSS_WIRE`. If that isn't set either, mpi4jax is used, unless
            there's an accelerator or mpi4jax isn't installed; rank 0 then logs why it's mpi4py
            instead.

    Raises:
        ExchangeError: MPI or the wire can't be used, ranks have different wires, MPI only sees some
            of the ranks that were started, JAX was started too early, or this process is a rank's
            subprocess but not a `multiprocessing` worker.
        ValueError: An argument or environment variable is invalid, or an argument differs from the
            first call's.
    """
    _check_arguments(stall_timeout_s, heartbeat_timeout_s)
    over = wire_choice.chosen(wire, os.environ)
    if _CURRENT:
        started = _CURRENT[0]
        wanted = (stall_timeout_s, heartbeat_timeout_s)
        if wanted not in (
            (300.0, 30.0),
            (started.stall_timeout_s, started.heartbeat_timeout_s),
        ):
            raise ValueError(
                "jaxcross is initialised already, with "
                f"`stall_timeout_s={started.stall_timeout_s}` and "
                f"`heartbeat_timeout_s={started.heartbeat_timeout_s}`, which cannot change to "
                f"{stall_timeout_s} and {heartbeat_timeout_s} any more. Pass them to the first "
                "call of `initialize`."
            )
        if wire not in (None, started.over):
            raise ValueError(
                f"jaxcross is initialised already, with `wire={started.over!r}`, which cannot "
                f"change to {wire!r} any more. Pass it to the first call of `initialize`."
            )
        return started
    worker = world_of_worker(os.environ, _make_world)
    if worker is not None:
        _CURRENT.append(worker)
        return worker
    launch = read_launch(os.environ)
    # If another handler is already installed, this is a rank of `jaxcross launch`, which prints the
    # message itself.
    own_handler = install_interrupt()
    try:
        return _start(launch, stall_timeout_s, heartbeat_timeout_s, over)
    except KeyboardInterrupt:
        if launch is None:
            raise
        if own_handler:
            print_error("jaxcross: stopped before the start.")
        end_processes(INTERRUPTED)


def _start(
    launch: LaunchedRanks | None,
    stall_timeout_s: float,
    heartbeat_timeout_s: float,
    over: WireLibrary | None,
) -> World:
    """Starts MPI, joins the other ranks and returns the world. Waits for all ranks."""
    with limited_start(1 if launch is None else launch.size, stall_timeout_s, os.environ):
        mpi = load_mpi()
    if mpi.Is_finalized():
        raise ExchangeError(
            "MPI was finalized in this process (`MPI.Finalize()`), and cannot start again. Call "
            "`jaxcross.initialize()` before that, and leave finalizing to mpi4py, which does it at "
            "exit."
        )
    world = mpi.COMM_WORLD
    vendor = vendor_of(mpi.Get_library_version())
    rank = world.Get_rank()
    size = world.Get_size()
    check_launch(launch, world_size=size, vendor=vendor)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ExchangeError(
            "MPI does not allow calls from several threads (`MPI_THREAD_MULTIPLE`), but jaxcross "
            "calls it from the threads of the exchange lane and the watchdog. Use an MPI that is "
            "built with this support, and leave `mpi4py.rc.thread_level` at 'multiple'."
        )
    hooks = ExceptionHooks(rank, size)
    hooks.install()
    with _in_time(rank, size, stall_timeout_s):
        joined = _join(
            mpi,
            hooks,
            vendor=vendor,
            stall_timeout_s=stall_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            over=over,
        )
    _CURRENT.append(joined)
    mark(joined)
    unwanted = is_interactive() or no_progress_wanted(os.environ)  # a user may think for a while
    if rank == 0 and launch is not None and not unwanted:
        StartNotice(size, joined.flight.work_begun).start()
    return joined


def _check_arguments(stall_timeout_s: Any, heartbeat_timeout_s: Any) -> None:
    never = "0 or more, 0 for never"
    for name, value, wanted in (
        ("stall_timeout_s", stall_timeout_s, "more than 0"),
        ("heartbeat_timeout_s", heartbeat_timeout_s, never),
    ):
        seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else -1.0
        if not (seconds > 0 or (seconds == 0 and wanted == never)):  # NaN fails both comparisons
            raise ValueError(f"`{name}` must be a number of seconds, {wanted}, got {value!r}.")


@contextmanager
def _in_time(rank: int, size: int, limit_s: float) -> Iterator[None]:
    """Returns a context that terminates all ranks if it isn't exited in time.

    This covers startup until there's a watchdog. Unlike the watchdog, it can't tell which rank is
    missing.
    """
    reason = f"rank {rank} has waited {limit_s:g} s for all ranks to call `jaxcross.initialize()`"
    message = (
        f"jaxcross: {reason}; all {size} ranks end. Either the script of some rank ended before "
        "this call or hangs (in a lock, a file system?), or ranks can't reach each other, which "
        "`jaxcross doctor --hosts A,B` checks. If the start takes longer, raise "
        "`initialize(stall_timeout_s=...)`."
    )
    timer = threading.Timer(
        min(limit_s, threading.TIMEOUT_MAX),
        abort_everywhere,
        args=(message, AbortReason(text=reason, kind=ExitKind.REPORTED)),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _join(
    mpi: Any,
    hooks: ExceptionHooks,
    *,
    vendor: str,
    stall_timeout_s: float,
    heartbeat_timeout_s: float,
    over: WireLibrary | None,
) -> World:
    """Returns the world as seen from this rank. Waits for all ranks."""
    world = mpi.COMM_WORLD
    rank = world.Get_rank()
    size = world.Get_size()
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank = node.Get_rank()
    local_size = node.Get_size()
    settings_of_node = node.allgather(
        {name: os.environ[name] for name in _VISIBLE if os.environ.get(name)}
    )
    node.Free()
    # All ranks use the same number of threads, even if some nodes have more cores than others. How
    # XLA splits up a computation depends on the size of its thread pool and affects the last bits
    # of the result, so with unequal pools, replicated values would no longer be bitwise identical.
    own_cores = xla_pool.cores()
    cores = world.allreduce(own_cores, op=mpi.MAX)
    size_of_pool = _prepare_pool(cores, own_cores)
    accelerators = _accelerators()
    wire = _load_wire(world, over, accelerators)
    _take_device(settings_of_node, local_rank=local_rank, accelerators=accelerators)
    if rank == 0 and size > 1:  # `libc_ver` reads the interpreter's executable
        advice = malloc.advice(os.environ, libc=platform.libc_ver()[0], accelerators=accelerators)
        if advice is not None:
            _log.warning(advice)

    # Names of folders may contain this time, so all ranks use rank 0's.
    os.environ[TIME] = world.bcast(os.environ.get(TIME) or start_time())
    processes = world.allgather(process.this_process())
    flight = _flight_recorder(processes, rank, os.environ.get("JAXCROSS_EVENTS", ""))
    sigterm = SigtermHandler(flight)
    sigterm.install()
    watchdog = Watchdog(
        world.Dup(),
        timeout_s=stall_timeout_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        flight=flight,
        processes=processes,
        sigterm=sigterm,
    )
    watchdog.start()
    hooks.notify = watchdog.notify
    hooks.failed_alike = watchdog.failed_alike
    hooks.report = watchdog.report
    atexit.register(watchdog.stop)
    control = MpiControl(world.Dup(), mpi.MIN)
    base = world.Dup()
    return _make_world(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        vendor=vendor,
        over=wire,
        pool_size=size_of_pool,
        heartbeat_timeout_s=heartbeat_timeout_s,
        control=control,
        flight=flight,
        _base=base,
        _neighbours=Neighbours(base),
        estimate_request=os.environ.get("JAXCROSS_ESTIMATE", ""),
        # Outside a run, the ranks compare on every n-th call which step they're calling. That
        # comparison is a collective, so all ranks need the same n, even if their environments
        # disagree.
        exchange_owner=ExchangeOwner(world.allreduce(check_interval(os.environ), op=mpi.MAX)),
        _watchdog=watchdog,
    )


def current_world() -> World:
    """Returns the world that `initialize` created in this process. Does not communicate.

    In a worker process, the returned world reports the rank's numbers but can't communicate.

    Raises:
        RuntimeError: `initialize` hasn't been called.
    """
    if not _CURRENT:
        worker = world_of_worker(os.environ, _make_world)
        if worker is None:
            raise RuntimeError(
                "jaxcross is not initialised: call `world = jaxcross.initialize()` at the start of "
                "the script, before the first step and the first JAX array."
            )
        _CURRENT.append(worker)
    return _CURRENT[0]


def _make_world(**fields: Any) -> World:
    """Returns a world with these fields, plus the wire and executables from higher layers."""
    return World(executables=ExecutableCache(), make_wire=MpiWire, unpickle=current_world, **fields)


def load_mpi() -> Any:
    """Returns mpi4py's MPI module, starting MPI unless the script has already done so.

    First sets all variables in `MPI_SETTINGS` that the environment doesn't set yet.

    Raises:
        ExchangeError: No MPI library can be loaded.
    """
    if "mpi4py.MPI" not in sys.modules:
        for name, value in MPI_SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ExchangeError(
            f"MPI cannot be loaded: {clause(str(error))}. Install one (`pip install mpich`), or "
            "load your cluster's MPI module; `jaxcross doctor` shows what is found."
        ) from error
    return MPI


def _load_wire(world: Any, over: WireLibrary | None, accelerators: int) -> WireLibrary:
    """Loads the library for the exchanges and returns its name. Waits for all ranks."""
    found, why = (over, "") if over is not None else wire_choice.default(accelerators, os.environ)
    if found == "mpi4jax":
        load_mpi4jax()
    wires, reasons = zip(*world.allgather((found, why)), strict=True)
    wire_choice.check_equal(wires, reasons)
    if why and world.Get_rank() == 0:
        _log.info("Exchanges go over mpi4py: %s.", why)
    return found


def load_mpi4jax() -> Any:
    """Returns mpi4jax after registering its functions with XLA.

    Raises:
        ExchangeError: mpi4jax isn't installed, or was built for a different MPI or a newer jaxlib
            than those loaded here.
    """
    try:
        with warnings.catch_warnings():
            # mpi4jax warns about any JAX version newer than those it was tested with. Hide this
            # from users: the version range in our own package metadata already states what works.
            warnings.filterwarnings("ignore", message=r"\s*The latest supported JAX version")
            import mpi4jax
        compat.register_host_calls()  # otherwise, creating the first array would fail
    except (ImportError, RuntimeError) as error:
        jaxlib = importlib.metadata.version("jaxlib")
        raise ExchangeError(
            f"{mpi4jax_fault(str(error), jaxlib)}\n{mpi4jax_remedy(jaxlib)}"
        ) from error
    return mpi4jax


def _prepare_pool(cores: int, own_cores: int) -> int:
    settings = xla_pool.plan_pool(
        xla_pool.needed(cores),
        started=compat.backends_started(),
        core_count=own_cores,
        environ=os.environ,
    )
    os.environ.update(settings)
    return xla_pool.effective(os.environ, own_cores)


def _flight_recorder(processes: list[process.ProcessId], rank: int, folder: str) -> FlightRecorder:
    flight = FlightRecorder(processes, rank)
    if folder:
        try:
            flight.record_to(folder)
        except (OSError, ValueError) as error:  # this may only affect our rank, so keep training
            _log.warning(
                "rank %d does not record its events in `%s`, but training continues: %s. Set "
                "`JAXCROSS_EVENTS` to a folder that it can write to.",
                rank,
                folder,
                error,
            )
    return flight


def _accelerators() -> int:
    """Returns the number of NVIDIA devices on this node, without starting CUDA."""
    return len([p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()])


def _take_device(
    settings: Sequence[Mapping[str, str]], *, local_rank: int, accelerators: int
) -> None:
    choice = device_of(settings, local_rank=local_rank, accelerators=accelerators)
    if local_rank == 0 and not any(settings) and 0 < accelerators < len(settings):
        _log.warning(
            "%d ranks of this node share %d accelerator%s. Start one rank per accelerator, unless "
            "this is intended.",
            len(settings),
            accelerators,
            "s" * (accelerators > 1),
        )
    if choice is not None and not compat.backends_started():
        import jax

        jax.config.update("jax_cuda_visible_devices", str(choice))


def device_of(
    settings: Sequence[Mapping[str, str]], *, local_rank: int, accelerators: int
) -> int | None:
    """Returns the index of the accelerator a rank should use, or None to change nothing. Pure.

    The index counts only the accelerators visible to the rank. A rank that's alone on its node
    keeps all of them. If a batch system has made the same accelerators visible to all ranks through
    `CUDA_VISIBLE_DEVICES`, each rank picks a different one. If that variable differs between ranks,
    or another variable of this kind is set, the accelerators have already been assigned, so we
    leave everything alone.

    Args:
        settings: For each rank on the node, the environment variables that restrict which
            accelerators it can see.
        local_rank: This rank's number on the node.
        accelerators: Number of accelerators on this node.
    """
    own = settings[local_rank]
    if own:
        if list(own) != ["CUDA_VISIBLE_DEVICES"] or any(other != own for other in settings):
            return None
        accelerators = len(
            [device for device in own["CUDA_VISIBLE_DEVICES"].split(",") if device.strip()]
        )
    if len(settings) == 1 or accelerators < 2:
        return None
    return local_rank % accelerators
