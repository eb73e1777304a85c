"""One end of a plain TCP transfer, run on a host of a lab by `Lab.measure_rate`. Standard library only.

meter.py receive HOST SECONDS BURST     prints a port, then the bits a second that came once BURST bytes were through
meter.py send HOST PORT                 sends until the other end has enough
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import sys
import termios
import time

BLOCK = bytes(1 << 18)
SKIP_BYTES, SKIP_S = 1 << 20, 0.1
"""Not timed, whichever is over first, as TCP must get under way; nor is what the token bucket lets through at once."""
PATIENCE_S = 60.0
"""Longer than asked for a transfer may take: on a slow link a packet of 64 kB, and what is on its way at the end."""


def receive(host: str, seconds: float, burst: int) -> None:
    """Times one connection for so many seconds or two packets, then reads it to its end: the link is at rest again.

    Counts bytes as they arrive, read or not: those that wait here while another process has the core did not cross the
    link in the time that follows.
    """
    with socket.create_server((host, 0)) as server:
        server.settimeout(20)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    buffer = bytearray(len(BLOCK))
    begin = start = end = time.perf_counter()
    total = arrived = skipped = 0
    try:
        while skipped in (0, arrived) or end - start < seconds:
            connection.settimeout(max(0.01, begin + seconds + PATIENCE_S - end))
            count = connection.recv_into(buffer)
            if count == 0:
                break
            total += count
            before = time.perf_counter()
            arrived = total + _unread(connection)
            end = time.perf_counter()  # the time is at least that of the bytes, wherever this process has to wait
            if skipped == 0 and total >= burst and (total >= SKIP_BYTES or end - begin >= SKIP_S):
                skipped, start = arrived, before
    except TimeoutError:
        skipped = 0
    if skipped in (0, arrived):
        raise SystemExit(f"only {total} bytes came in {time.perf_counter() - begin:.0f} s: too few to time.")
    connection.shutdown(socket.SHUT_WR)
    try:
        while connection.recv_into(buffer):
            pass
    except TimeoutError:
        raise SystemExit(
            f"{arrived - skipped} bytes were timed, but the other end then neither sent nor closed."
        ) from None
    print(8 * (arrived - skipped) / (end - start))


def _unread(connection: socket.socket) -> int:
    """Bytes that have arrived and were not read."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def send(host: str, port: int) -> None:
    """Sends until the other end closes its half; at most an eighth of what went before then still waits here to go."""
    with socket.create_connection((host, port), timeout=20) as connection, contextlib.suppress(ConnectionError):
        connection.setblocking(False)
        sent = 0
        while not (ready := select.select([connection], [connection], [], PATIENCE_S))[0]:
            if not ready[1]:
                raise SystemExit(f"nothing could be sent for {PATIENCE_S:.0f} s.")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max(1 << 16, sent // 8))
            sent += connection.send(BLOCK)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
