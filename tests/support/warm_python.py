"""Warm processes: a Python that has imported JAX already, one fork away.

A test over MPI runs a small program on two to four ranks. Importing JAX, Flax, Orbax and the package takes each rank 2
to 3 s of CPU time, which was more than half of what most of these tests cost. We tried to keep the ranks: one `mpirun`
per pytest worker whose processes receive one case after another. It needs every case to leave its process as it found
it, but `jaxcross.initialize` is made for a process that ends with its run: it installs exception hooks, signal handlers
and exit handlers, starts a watchdog, and sizes XLA's thread pool, once. And half of the cases end badly on purpose.

So the imports are shared and nothing else is. One process per test session, the server, imports what ranks import and
stops there: no JAX backend, no MPI, no threads of our own. `mpirun` starts a client instead of Python for each rank;
the client sends its arguments, environment, folder and open files to the server, which forks; the child takes these
over and runs the program from its first line. To the program it's a fresh process: its own backend, `MPI_Init`, exit
handlers and death. There is nothing to clean up or to leak, and a crash takes nobody else along.

In a warm process `sys.executable` starts a warm process as well. So if a test starts a benchmark or a command by
`COMMAND`, the ranks that this one starts are warm, too, and it needs to know nothing of it.

What a fork can't provide gets an ordinary interpreter: other variables that Python, NumPy or JAX read when they're
imported (`JAX_ENABLE_X64`, `PYTHONHASHSEED`, `MALLOC_...`), options of Python (`-I`), the network of a lab, fewer CPUs,
a rank as parent, a server that is gone. `XLA_FLAGS` and `NPROC` are read when the backend starts, so they work as
usual, and JAX is told where its cache of compiled programs is. `GLIBC_TUNABLES`, which keeps a rank's memory from going
back to the kernel, is ignored: it changes a rank's speed, but no result. Tests of the start, the end, signals and
`jaxcross launch` don't come here, since they're about real processes and their parents.

    python -m tests.support.warm_python SOCKET EXECUTABLE      # serves until its standard input is closed
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.warm_client import TAKEN_OVER, VARIABLE, fixed

CLIENT = Path(__file__).with_name("warm_client.py")
COMMAND = [sys.executable, "-IS", str(CLIENT)]
"""Stands for `sys.executable` on a command line."""

_IMPORTS = (
    "jaxcross.testing", "jaxcross.world.start", "jaxcross.world.workers", "jaxcross.wire.mpi_wire",
    "jaxcross.jobs.runner", "jaxcross.step.crossover", "jaxcross.exchange", "jaxcross.tensor",
    "jaxcross.server", "jaxcross.checkpoint.arrays", "jaxcross.checkpoint.checkpointer", "jaxcross.data",
    "jaxcross.sweeps", "jaxcross.plan", "jaxcross.report", "flax.linen", "flax.nnx",
    "flax.training.train_state", "optax", "jax.numpy", "numpy", "rich.console",
)  # fmt: skip
_COVERAGE = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Serves warm processes to this process's children. The first of them waits for the imports."""
    with tempfile.TemporaryDirectory(prefix="jaxcross-warm-") as folder:
        address = str(Path(folder, "socket"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(64)
        environ = {name: value for name, value in os.environ.items() if name not in _COVERAGE}
        root = str(Path(__file__).parents[2])
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
        executable = Path(folder, "python")
        executable.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
        executable.chmod(0o755)
        with listener:
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), str(executable)],
                stdin=subprocess.PIPE, env=environ, cwd=root, pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip
        os.environ[VARIABLE] = address
        try:
            yield
        finally:
            os.environ.pop(VARIABLE, None)
            server.stdin.close()  # type: ignore[union-attr]
            server.wait()


def _serve(listener: socket.socket) -> tuple[list[str], dict[str, str], str] | None:
    """Forks a child for each client until standard input is closed. Returns None then, and the request in a child."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    clients: dict[socket.socket, int] = {}
    ready = False
    hello = marshal.dumps(fixed())
    with selectors.DefaultSelector() as selector:
        for source in (listener, woken, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source: Any = key.fileobj
                if source is sys.stdin:
                    for pid in clients.values():
                        _signal(pid, signal.SIGKILL)
                    return None
                if source is woken:
                    with contextlib.suppress(BlockingIOError):
                        woken.recv(4096)
                    _tell_ended(clients, selector)
                elif source is listener:
                    connection, _ = listener.accept()
                    connection.sendall(len(hello).to_bytes(4, "little") + hello)
                    if (received := _request(connection)) is None:
                        connection.close()
                        continue
                    if not ready:
                        _import_all()
                        ready = True
                    request, here = received
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        selector.close()  # its number may be one that the client's files need
                        for other in (listener, woken, wake, connection, *clients):
                            other.close()
                        return _become(request, here)
                    os.setpgid(pid, pid)
                    for file in here:
                        os.close(file)
                    clients[connection] = pid
                    selector.register(connection, selectors.EVENT_READ)
                else:
                    try:
                        numbers = source.recv(16)
                    except ConnectionError:
                        numbers = b""
                    if source in clients:
                        for number in numbers or [signal.SIGKILL]:
                            _signal(clients[source], number)
                    if not numbers:
                        selector.unregister(source)


def _request(connection: socket.socket) -> tuple[tuple[Any, ...], list[int]] | None:
    """Returns what a client wants and its open files as they're numbered here, or None if it has thought better."""
    head, here, _, _ = socket.recv_fds(connection, 4, 8)
    if len(head) < 4:
        return None
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            return None
        data += more
    return marshal.loads(data), here


def _tell_ended(clients: dict[socket.socket, int], selector: selectors.BaseSelector) -> None:
    for connection, pid in list(clients.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        del clients[connection]
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
        connection.close()


def _signal(pid: int, number: int) -> None:
    """Sends a signal to a child, and SIGKILL to its own children as well."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def _import_all() -> None:
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            __import__(name)
    logging.root.handlers.clear()  # some of them print a warning while they're imported, which installs one
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, all that is shared


def _become(request: tuple[Any, ...], here: Sequence[int]) -> tuple[list[str], dict[str, str], str]:
    """Takes over a client's files, environment and folder, in a child."""
    arguments, environ, folder, there = request
    high = [os.dup2(file, 200 + n, inheritable=False) for n, file in enumerate(here)]  # out of each other's way
    for file in here:
        os.close(file)
    for file, number in zip(high, there, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1 : 1 + len(own)] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    beside = Path(sys.executable).parent
    if shutil.which("mpirun", path=str(beside)):  # `find_mpirun` looks next to `sys.executable` first
        os.environ["PATH"] = os.pathsep.join([str(beside), os.environ.get("PATH", os.defpath)])
    multiprocessing.set_executable(sys.executable)  # its children inherit open files that only this process knows
    sys.executable = sys.argv[2]
    for name in TAKEN_OVER:
        if name in environ:
            _tell_jax(name.lower(), environ[name])
    random.seed()
    import numpy as np

    np.random.seed()
    return arguments, environ, folder


def _tell_jax(name: str, text: str) -> None:
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
    listener = socket.socket(fileno=int(sys.argv[1]))
    request = _serve(listener)
    if request is None:
        return
    if any(name in os.environ for name in _COVERAGE):
        import coverage

        coverage.process_startup()
    _run(request[0])


if __name__ == "__main__":
    _main()
