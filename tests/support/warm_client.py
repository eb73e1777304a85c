"""A substitute for `python`: `python -IS warm_client.py ARGUMENTS` runs what `python ARGUMENTS`
would, in a warm process.

The head of `warm_python.py` explains why. A launcher starts this client once per rank, so the
client imports almost nothing. It sends its arguments, environment, folder and open files to the
server, forwards signals, and exits the way the program exits. A program that can't run in a fork
gets its own interpreter.
"""

import marshal
import os
import signal
import socket
import sys

VARIABLE = "JAXCROSS_TESTS_WARM_PYTHON"
"""Names the server's socket, for the clients."""

_FIXED = ("JAX_", "PYTHON", "LD_PRELOAD", "MALLOC_", "OPENBLAS_", "OMP_", "MKL_", "NPY_")
"""Prefixes of variables that Python, NumPy, JAX or the C library reads once, when it starts."""

TAKEN_OVER = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)
"""Variables with such a prefix whose values JAX can also be given after its import."""


def fixed():
    """Returns what a fork can't take over: variables, namespaces (a lab's) and CPUs."""
    own = {name: value for name, value in os.environ.items() if name.startswith(_FIXED)}
    for name in ("PYTHONPATH", *TAKEN_OVER):
        own.pop(name, None)
    if sys.platform == "linux":
        own["cpus"] = str(sorted(os.sched_getaffinity(0)))
        own |= {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in os.listdir("/proc/self/ns")}
    return own


def main():
    connection = _connect()
    if connection is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    files = [0, 1, 2]
    if os.environ.get("PMI_FD", "").isdecimal():  # the connection to MPICH's launcher
        files.append(int(os.environ["PMI_FD"]))
    request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), files))
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], files)
    connection.sendall(request)
    for passed_on in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(passed_on, lambda number, _: connection.sendall(bytes([number])))
    for file in files:  # otherwise a reader at the other end would wait for this process, too
        if file != 2:
            os.close(file)
    status = int.from_bytes(received(connection, 4), "little", signed=True)
    if status < 0:
        if -status != signal.SIGKILL:  # SIGKILL's effect can't be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _connect():
    """Returns a connection to the server, or None if this program needs its own interpreter."""
    address = os.environ.get(VARIABLE)
    options = [word for word in sys.argv[1:2] if word.startswith("-") and word not in ("-c", "-m")]
    if (
        address is None or options or "JAXCROSS_RANK" in os.environ
    ):  # a rank's child finds its rank by `os.getppid()`
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        size = int.from_bytes(received(connection, 4), "little")
        same = marshal.loads(received(connection, size)) == fixed()
    except OSError:
        return None
    return connection if same else None


def received(connection, size):
    """Returns `size` bytes. Raises ConnectionError if the other end closes before that."""
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("the other end of a warm process is gone")
        data += more
    return data


if __name__ == "__main__":
    main()
