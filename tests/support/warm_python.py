"""Warm processes: a Python that has imported JAX already, one fork away.

A test over MPI runs a small program on two to four ranks. Importing JAX, Flax, Orbax and the
package takes each rank 2 to 3 s of CPU time, which was more than half of what most of these tests
cost. We tried to keep the ranks: one `mpirun` per pytest worker whose processes receive one case
after another. It needs every case to leave its process as it found it, but `jaxcross.initialize` is
made for a process that ends with its run: it installs exception hooks, signal handlers and exit
handlers, starts a watchdog, and sizes XLA's thread pool, once. And half of the cases end badly on
purpose.

So we share the imports and nothing else. Each test session has one process, the server, that
imports everything that ranks usually import. It starts neither a JAX backend nor MPI nor threads of
our own. For each rank, `mpirun` starts a small client instead of Python. The client sends its
arguments, environment, folder and open files to the server, which forks. The child takes these over
and runs the program from its first line. To the program, this looks like a fresh process: it
creates its own backend, calls `MPI_Init` itself, and has its own exit handlers. Nothing has to be
cleaned up after a case, nothing can leak into the next one, and a crash affects no other process.

In a warm process, `sys.executable` is the client as well. So if a test starts a benchmark or a
command with `COMMAND`, and that program starts ranks, the ranks are also warm processes.

Some programs can't run in a fork, and get an ordinary interpreter instead. That's the case if they
need different values of variables that Python, NumPy or JAX read on import (`JAX_ENABLE_X64`,
`PYTHONHASHSEED`, `MALLOC_...`), options of Python (`-I`), a lab's network, fewer CPUs, or a rank as
their parent, or if the server is gone. `XLA_FLAGS` and `NPROC` work as usual, because they are only
read when the backend starts. The location of the cache of compiled programs is set in JAX's
configuration after the fork. `GLIBC_TUNABLES`, which keeps a rank from returning memory to the
kernel, is ignored, because it only affects how fast a rank is.

There are two differences to a real process. First, all forks share the salt of Python's `hash`, so
all ranks iterate over their sets in the same order, which could hide a bug. With
`JAXCROSS_TESTS_COLD=1`, no process is warm; `.ci/more` runs Open MPI's part with this setting.
Second, a rank is a child of the server rather than of the launcher. The launcher's child is the
client, which forwards signals and exit codes. Tests of how a rank starts, receives a signal or dies
call `mpirun(..., warm=False)`.

    python -m tests.support.warm_python SOCKET EXECUTABLE      # serves until its standard input is
                                            closed
"""

from __future__ import annotations

import contextlib
import gc
import logging
import marshal
import multiprocessing
import os
import random
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.warm_client import TAKEN_OVER, VARIABLE, fixed, received

CLIENT = Path(__file__).with_name("warm_client.py")
COMMAND = [sys.executable, "-IS", str(CLIENT)]
"""Stands for `sys.executable` on a command line."""

_IMPORTS = (
    "jaxcross.testing",
    "jaxcross.world.start",
    "jaxcross.world.workers",
    "jaxcross.wire.mpi_wire",
    "jaxcross.jobs.runner",
    "jaxcross.step.step",
    "jaxcross.exchange",
    "jaxcross.tensor",
    "jaxcross.server",
    "jaxcross.checkpoint.arrays",
    "jaxcross.checkpoint.checkpointer",
    "jaxcross.data",
    "jaxcross.sweeps",
    "jaxcross.plan",
    "jaxcross.report",
    "flax.linen",
    "flax.nnx",
    "flax.training.train_state",
    "optax",
    "jax.numpy",
    "numpy",
    "rich.console",
)
_PATIENCE_S = 20.0  # a client that is stopped while it connects must not block the others


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Serves warm processes to this process's children. The first one waits for the imports."""
    with tempfile.TemporaryDirectory(prefix="jaxcross-warm-") as folder:
        address = str(Path(folder, "socket"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(64)
        environ = dict(os.environ)
        root = str(Path(__file__).parents[2])
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
        executable = Path(folder, "python")
        executable.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
        executable.chmod(0o755)
        with listener:
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(executable)],
                stdin=subprocess.PIPE,
                env=environ,
                cwd=root,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        os.environ[VARIABLE] = address
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)
            server.stdin.close()  # type: ignore[union-attr]
            server.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a client sent: the program's arguments, environment, folder and open files.

    Attributes:
        there: The files' numbers in the client, which the program needs.
        here: Their numbers in this process.
    """

    arguments: list[str]
    environ: dict[str, str]
    folder: str
    there: list[int]
    here: list[int]


class _Server:
    """Forks a child for each client, forwards the client's signals, and reports the exit code."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._hello = marshal.dumps(fixed())
        self._environ = dict(os.environ)
        self._children: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())

    def serve(self) -> _Request | None:
        """Serves until standard input is closed, then returns None.

        In a forked child, returns the request to run.
        """
        for source in (self._listener, self._woken, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)
        try:
            while True:
                for source in [key.fileobj for key, _ in self._selector.select()]:
                    if source is sys.stdin:
                        return None
                    if source is self._listener:
                        request = self._fork()
                        if request is not None:
                            return request
                    elif source is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                        self._report_ended()
                    elif source in self._children:  # otherwise its child ended during this round
                        self._pass_on(source)  # type: ignore[arg-type]
        finally:  # a child has no children here
            for pid in self._children.values():
                _signal(pid, signal.SIGKILL)

    def _fork(self) -> _Request | None:
        """Accepts a client and forks a child for it. Returns the request in the child."""
        connection, _ = self._listener.accept()
        request = self._received(connection)
        if request is None:
            connection.close()
            return None
        if "jax" not in sys.modules:
            _import_all()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            self._selector.close()  # the client's files may need its number
            for other in (self._listener, self._woken, self._wake, connection, *self._children):
                other.close()
            self._children.clear()
            _become(request, self._environ)
            return request
        with contextlib.suppress(OSError):  # both do this, because either may run first
            os.setpgid(pid, pid)
        for file in request.here:
            os.close(file)
        self._children[connection] = pid
        self._selector.register(connection, selectors.EVENT_READ)
        return None

    def _received(self, connection: socket.socket) -> _Request | None:
        """Returns a client's request.

        Returns None if the client runs the program itself, or dies before it has sent everything.
        """
        here: list[int] = []
        connection.settimeout(_PATIENCE_S)
        try:
            connection.sendall(len(self._hello).to_bytes(4, "little") + self._hello)
            head, here, _, _ = socket.recv_fds(connection, 4, 8)
            data = received(connection, int.from_bytes(head, "little")) if len(head) == 4 else b""
            arguments, environ, folder, there = marshal.loads(data)
        except (OSError, EOFError):
            for file in here:
                os.close(file)
            return None
        connection.settimeout(None)
        return _Request(arguments=arguments, environ=environ, folder=folder, there=there, here=here)

    def _pass_on(self, client: socket.socket) -> None:
        """Forwards a client's signals to its child, and kills the child if the client is gone."""
        try:
            numbers = client.recv(16)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            _signal(self._children[client], number)
        if not numbers:
            self._selector.unregister(client)

    def _report_ended(self) -> None:
        for client, pid in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._children[client]
            with contextlib.suppress(KeyError):  # the client may have disconnected before
                self._selector.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            client.close()


def _signal(pid: int, number: int) -> None:
    """Sends a signal to a child. SIGKILL goes to the child's own children as well."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def _import_all() -> None:
    for name in _IMPORTS:
        with contextlib.suppress(
            Exception
        ):  # an extra that isn't installed, or a bug, which the program will run into as well
            __import__(name)
    # Some of these modules print a warning when they're imported, which installs a handler.
    logging.root.handlers.clear()
    gc.collect()
    gc.freeze()  # otherwise a child's garbage collection would touch, and so copy, all shared pages


def _become(request: _Request, started_with: Mapping[str, str]) -> None:
    """Takes over a client's files, environment and folder, in a child."""
    high = [
        os.dup2(file, 200 + n, inheritable=False) for n, file in enumerate(request.here)
    ]  # to numbers that no other file needs
    for file in request.here:
        os.close(file)
    for file, number in zip(high, request.there, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    of_server = started_with.get("PYTHONPATH", "").split(os.pathsep)
    of_client = request.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in sys.path[1:] if path not in of_server]
    sys.path[1:] = [*filter(None, of_client), *rest]
    set_by_imports = {name: value for name, value in os.environ.items() if name not in started_with}
    os.environ.clear()
    os.environ.update({**set_by_imports, **request.environ})
    os.chdir(request.folder)
    beside = Path(sys.executable).parent
    if shutil.which(
        "mpirun", path=str(beside)
    ):  # `find_mpirun` looks in the folder of `sys.executable` first
        os.environ["PATH"] = os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)])
    multiprocessing.set_executable(
        sys.executable
    )  # its children inherit open files that only this process has
    sys.executable = sys.argv[2]
    for name in TAKEN_OVER:
        if name in request.environ:
            _configure_jax(name.lower(), request.environ[name])
    random.seed()
    import numpy as np

    np.random.seed()


def _configure_jax(name: str, text: str) -> None:
    import jax

    kind = type(jax.config.values[name])
    jax.config.update(name, text if kind is type(None) else kind(text))


def _run(arguments: list[str]) -> None:
    """Runs a program as `python ARGUMENTS` would, in this process's `__main__`."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None)
    if kind == "-c":
        sys.argv, sys.path[0], code = ["-c", *rest[1:]], "", compile(rest[0], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).resolve().parent)
        main.__dict__.update(__file__=kind, __cached__=None)
        code = compile(Path(kind).read_bytes(), kind, "exec")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _main() -> None:
    request = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        _run(request.arguments)


if __name__ == "__main__":
    _main()
