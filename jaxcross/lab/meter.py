"""One end of a plain TCP transfer between two hosts, started by `jaxcross.lab.transfer`. Standard
library only.

meter.py receive SECONDS BURST     prints a port and this host's addresses, then the bits a second
                                   that came once BURST bytes were through
meter.py send PORT HOST ...        sends to the first of these names and addresses that answers
                                   until the other end has enough, then prints what it knows of the
                                   connection
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import socket
import struct
import sys
import termios
import time
from typing import Any

BLOCK = bytes(1 << 18)
SKIP_BYTES = 1 << 20
SKIP_S = 0.1
"""Not timed, whichever is over first, as TCP must get under way; nor is what the token bucket lets
through at once.
"""
PATIENCE_S = 60.0
"""Longer than asked for a transfer may take: on a slow link a packet of 64 kB, and what is on its
way at the end.
"""
CONNECT_S = 10.0
"""Within this time the first packet is sent four times; a firewall that drops packets answers none
of them.
"""
RETRY_S = 3.0
"""The same for each further address of a host, of which there may be many."""


def receive(seconds: float, burst: int) -> None:
    """Times one connection for so many seconds or two packets, then reads it to its end: the link
    is at rest again.

    Counts bytes as they arrive, read or not: those that wait here while another process has the
    core did not cross the link in the time that follows.
    """
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE_S)
        addresses = [_address(server, name) for _, name in socket.if_nameindex()]
        print(
            server.getsockname()[1],
            *(text for text in addresses if text and not text.startswith("127.")),
            flush=True,
        )
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
            end = (
                time.perf_counter()
            )  # the time is at least that of the bytes, wherever this process has to wait
            if skipped == 0 and total >= burst and (total >= SKIP_BYTES or end - begin >= SKIP_S):
                skipped = arrived
                start = before
    except TimeoutError:
        skipped = 0
    if skipped in (0, arrived):
        raise SystemExit(
            f"only {total} bytes came in {time.perf_counter() - begin:.0f} s: too few to time."
        )
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


def send(hosts: list[str], port: int) -> None:
    """Sends until the other end closes its half; at most an eighth of what went before then still
    waits here to go.
    """
    with _connected(hosts, port) as connection:
        facts = facts_of(connection)
        with contextlib.suppress(ConnectionError):
            connection.setblocking(False)
            sent = 0
            while not (ready := select.select([connection], [connection], [], PATIENCE_S))[0]:
                if not ready[1]:
                    raise SystemExit(f"nothing could be sent for {PATIENCE_S:.0f} s.")
                connection.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max(1 << 16, sent // 8)
                )
                sent += connection.send(BLOCK)
        print(json.dumps({**facts, "round_trip_us": _round_trip_us(connection)}))


def _connected(hosts: list[str], port: int) -> socket.socket:
    """Connects to the first of the hosts that answers; ends this process with what each failed of
    if none does.
    """
    failed: list[str] = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=RETRY_S if failed else CONNECT_S)
        except OSError as error:
            failed.append(f"{host}: {error.strerror or error}")
    raise SystemExit("; ".join(failed))


def facts_of(connection: socket.socket) -> dict[str, Any]:
    """Returns the addresses of both ends, and the name of the interface that has this end's ("" if
    none has).
    """
    source = connection.getsockname()[0]
    target = connection.getpeername()[0]
    names = [name for _, name in socket.if_nameindex() if _address(connection, name) == source]
    return {"source": source, "target": target, "interface": names[0] if names else ""}


def _address(connection: socket.socket, interface: str) -> str:
    """Returns the IPv4 address of an interface, "" if it has none."""
    request = struct.pack("256s", interface.encode())
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(connection, _SIOCGIFADDR, request)[20:24])
    return ""


def _round_trip_us(connection: socket.socket) -> int:
    """Returns the shortest round trip that the kernel has seen on a connection: packets of an idle
    link come first.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("I", info, _MIN_RTT)[0]


_SIOCGIFADDR = 0x8915
_MIN_RTT = 148
"""Where the kernel's `struct tcp_info` has `tcpi_min_rtt`."""


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(float(sys.argv[2]), int(sys.argv[3]))
    else:
        send(sys.argv[3:], int(sys.argv[2]))
