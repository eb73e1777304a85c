"""Stands in for `python`: `python -IS warm_client.py ARGUMENTS` runs what `python ARGUMENTS` would, in a warm process.

The head of `warm_python.py` tells the story. This half is what a launcher starts, once per rank, so it imports next to
nothing: it hands its arguments, environment, folder and open files to the server, passes signals on, and ends as the
program ends. A program that needs an interpreter of its own gets one.
"""

import marshal
import os
import signal
import socket
import sys

VARIABLE = "JAXCROSS_TESTS_WARM_PYTHON"
"""Names the server's socket, for the clients."""

FIXED = ("JAX_", "PYTHON", "LD_PRELOAD", "MALLOC_", "OPENBLAS_", "OMP_", "MKL_", "NPY_")
"""Prefixes of variables that Python, NumPy, JAX or the C library reads once, when it starts."""


def fixed(environ):
    """Returns the variables that a running process can't take over."""
    return {name: value for name, value in environ.items() if name.startswith(FIXED) and name != "PYTHONPATH"}


def main():
    connection = _connect()
    if connection is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    files = [0, 1, 2]
    if os.environ.get("PMI_FD", "").isdecimal():  # the way to MPICH's launcher
        files.append(int(os.environ["PMI_FD"]))
    request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), files))
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], files)
    connection.sendall(request)
    for passed_on in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(passed_on, lambda number, _: connection.sendall(bytes([number])))
    for file in files:  # else a reader at the other end waits for this process, too
        if file != 2:
            os.close(file)
    status = int.from_bytes(_received(connection, 4), "little", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _connect():
    """Returns a connection to the server, or None if this program needs an interpreter of its own."""
    address = os.environ.get(VARIABLE)
    if address is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        size = int.from_bytes(_received(connection, 4), "little")
        same = marshal.loads(_received(connection, size)) == fixed(os.environ)
    except OSError:
        return None
    return connection if same else None


def _received(connection, size):
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("the server of warm processes is gone")
        data += more
    return data


if __name__ == "__main__":
    main()
