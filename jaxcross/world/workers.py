"""Worker processes that a rank starts, e.g. to load data. They must not take part in MPI.

With the start methods `spawn` and `forkserver`, `multiprocessing` imports the script again in every
worker, including its call to `initialize()`. With `fork`, a worker inherits the rank's
communicators. MPI supports neither: a worker that tried to join would either bring down the run, or
fail and be restarted by its pool, forever. So each worker gets a world that reports its rank's
number and size, but raises on any attempt to communicate.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, final

from jaxcross import _jax_compat as compat
from jaxcross.errors import ExchangeError
from jaxcross.health import AbortReason, ProcessId, abort_everywhere, process_state, this_process
from jaxcross.world.world import World

VARIABLE = "JAXCROSS_RANK"
"""Environment variable that `initialize()` uses to mark the processes started by this rank.

It holds a JSON object with the rank's process, the numbers for the worker's world, and the pipe on
which the rank listens to its workers.
"""

_NUMBERS = (
    "rank",
    "size",
    "local_rank",
    "local_size",
    "vendor",
    "over",
    "pool_size",
    "heartbeat_timeout_s",
)
_TALKING = (
    "control",
    "flight",
    "exchanger",
    "_base",
    "_watchdog",
    "_neighbours",
)  # the fields of a world that can communicate
_PACKAGE = str(Path(__file__).parents[1])
_REMEDY = (
    "Workers must not train: put the code that trains under `if __name__ == '__main__':`. "
    "`jaxcross.initialize()` may stay at the top of the script; in a worker, it returns the rank's "
    "numbers without starting MPI. "
    "See docs/howto/data.md#use-worker-processes."
)


def mark(world: World) -> None:
    """Marks all processes that this rank starts or forks from now on as its workers."""
    listener = _listen(world)
    process = this_process()
    numbers = {name: getattr(world, name) for name in _NUMBERS}
    reached = {
        "process": asdict(process),
        "listener": listener,
        "stall_timeout_s": world.stall_timeout_s,
    }
    os.environ[VARIABLE] = json.dumps({**reached, **numbers})
    os.register_at_fork(after_in_child=lambda: _disarm(world, process))


def world_of_worker(environ: Mapping[str, str], make_world: Callable[..., World]) -> World | None:
    """Returns a worker process's world, or None if this process isn't a worker.

    The returned world reports the same `rank`, `size` etc. as the rank that started the worker, but
    any attempt to communicate through it raises an error. Does not start MPI.

    Args:
        environ: This process's environment.
        make_world: Makes a `World`, given the fields that depend on the process.

    Raises:
        ExchangeError: This process was started by a rank, but not through `multiprocessing`, and it
            has inherited the rank's launcher variables. MPI would fail in it.
    """
    text = environ.get(VARIABLE)
    if text is not None and _is_worker():
        mine = json.loads(text)
        if not compat.backends_started():
            import jax

            jax.config.update("jax_platforms", "cpu")  # the accelerator belongs to the rank
        refusal: Any = Refusal(
            mine["rank"], ProcessId(**mine["process"]), mine["listener"], mine["stall_timeout_s"]
        )
        return make_world(
            **dict.fromkeys(_TALKING, refusal), **{name: mine[name] for name in _NUMBERS}
        )
    if _is_subprocess(environ, text):
        raise ExchangeError(
            "`jaxcross.initialize()` was called in a process that a rank has started. This process "
            "has the rank's launcher variables but is not a rank, so MPI would fail. If it only "
            "needs `world.rank` and `world.size`, pass them as arguments. If it should train on "
            "its own, start it without the environment variables whose names begin with `PMI`, "
            "`PMIX` or `OMPI_`."
        )
    return None


@final
class Refusal:
    """Stands in for every object in a worker's world that could communicate. Any use of it raises.

    Args:
        rank: The rank that started the worker.
        process: That rank's process.
        listener: A file descriptor in the rank's process, for the pipe that the worker can write to
            (see `mark`), or -1 if there's none.
        timeout_s: The rank's `stall_timeout_s`, which workers may read.
    """

    def __init__(self, rank: int, process: ProcessId, listener: int, timeout_s: float) -> None:
        self._rank = rank
        self._process = process
        self._listener = listener
        self.timeout_s = timeout_s

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        what = (
            f"a worker process of rank {self._rank} reached {_users_line()}, which exchanges with "
            "other ranks"
        )
        if _imports_script() and self._notify(what):
            # This worker fails while it's still importing the script. If we merely raised an error,
            # its `multiprocessing` pool would replace it with a new worker, which would fail in the
            # same way, and so on forever. So have the rank terminate the whole run and report the
            # reason.
            raise SystemExit(1)
        raise ExchangeError(f"{what[0].upper()}{what[1:]}. {_REMEDY}")

    def _notify(self, what: str) -> bool:
        """Asks the rank to terminate all ranks. Returns whether it will do so or already has.

        Another worker may have asked first, in which case the rank's process may be gone.
        """
        if self._listener < 0:
            return False
        try:
            with open(f"/proc/{self._process.pid}/fd/{self._listener}", "wb", buffering=0) as pipe:
                pipe.write(f"{what}\n".encode())
        except OSError:
            return process_state(self._process, this_process()) == "gone"
        return True


def _listen(world: World) -> int:
    """Starts a thread that terminates all ranks as soon as a worker asks for it.

    Returns the descriptor of a pipe that workers can write to through `/proc`, or -1 if there's no
    `/proc`.
    """
    if not Path("/proc/self/fd").exists():
        return -1
    reader, writer = os.pipe()

    def wait() -> None:
        # One message is enough, because it ends the run.
        what = os.read(reader, 4096).decode(errors="replace").partition("\n")[0]
        abort_everywhere(
            f"jaxcross: {what}; all {world.size} ranks end. `multiprocessing` imports the script "
            f"again in every worker, unless it forks. {_REMEDY}",
            AbortReason(
                text=f"{what}: put the code that trains under `if __name__ == '__main__':`"
            ),
            world._watchdog.notify,
        )

    threading.Thread(target=wait, name="jaxcross-workers", daemon=True).start()
    return writer


def _disarm(world: World, process: ProcessId) -> None:
    """Turns a rank's world into a worker's world, in a forked child process.

    The object itself is changed, because the script and its steps already hold references to it.
    """
    refusal = Refusal(world.rank, process, -1, world.stall_timeout_s)
    atexit.unregister(world._watchdog.stop)
    for name in _TALKING:
        object.__setattr__(world, name, refusal)


def _is_worker() -> bool:
    """Whether `multiprocessing` started this process.

    We don't import `multiprocessing` to find out, because the import opens sockets.
    """
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and (module.parent_process() is not None or _imports_script())


def _imports_script() -> bool:
    """Whether `multiprocessing` is still importing the script in this worker, before any task.

    `multiprocessing` itself performs the same check.
    """
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and getattr(module.current_process(), "_inheriting", False)


def _is_subprocess(environ: Mapping[str, str], text: str | None) -> bool:
    """Whether this process was started by a rank without being a rank itself.

    MPICH opens a pipe for each rank, which a rank's subprocesses don't inherit.
    """
    descriptor = environ.get("PMI_FD", "")
    if descriptor.isdecimal():
        try:
            os.fstat(int(descriptor))
        except OSError:
            return True
    launched = any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    return launched and text is not None and json.loads(text)["process"]["pid"] == os.getppid()


def _users_line() -> str:
    """Returns the line and file from which the user's code called jaxcross."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (_PACKAGE, contextlib.__file__)
    ):
        frame = frame.f_back
    return f"line {frame.f_lineno} of `{frame.f_code.co_filename}`"
