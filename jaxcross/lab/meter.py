"""One end of a plain TCP transfer, run on a host of a lab by `Lab.measure_rate`. Standard library only.

meter.py receive HOST                 prints a port, then the bits a second that came
meter.py send HOST PORT SECONDS
"""

from __future__ import annotations

import socket
import sys
import time

BLOCK = bytes(1 << 18)
SKIP_BYTES = 1 << 20
"""The first bytes pass at full speed, as far as the token bucket lets bursts through; they are not timed."""


def receive(host: str) -> None:
    """Reads one connection to its end."""
    with socket.create_server((host, 0)) as server:
        server.settimeout(20)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    connection.settimeout(20)
    buffer = bytearray(len(BLOCK))
    total = timed = 0
    start = end = time.perf_counter()
    while count := connection.recv_into(buffer):
        end = time.perf_counter()
        total += count
        if total - count < SKIP_BYTES:
            start = end
        else:
            timed += count
    if timed == 0 or end == start:
        raise SystemExit(f"only {total} bytes came: too few to time. Measure for longer.")
    print(8 * timed / (end - start))


def send(host: str, port: int, seconds: float) -> None:
    """Sends for so many seconds."""
    with socket.create_connection((host, port), timeout=20) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(BLOCK)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
