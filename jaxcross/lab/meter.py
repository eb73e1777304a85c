"""Runs one end of a plain TCP transfer between two hosts; `jaxcross.lab.transfer` starts both.

Uses only the standard library, because it also has to run on hosts without jaxcross.

meter.py receive SECONDS BURST     prints its port and this host's addresses, waits for a sender,
                                   and prints the rate (in bit/s) at which data arrived after the
                                   first BURST bytes
meter.py send PORT HOST ...        sends to the first of these names and addresses that answers
                                   until the receiver has had enough, then prints the connection's
                                   addresses, interface and round-trip time
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
"""We start timing after `SKIP_BYTES` bytes or `SKIP_S` seconds, whichever comes first, to give TCP
a chance to ramp up. If the link is shaped by a token bucket, we also skip the burst that the bucket
lets through at full speed.
"""
PATIENCE_S = 60.0
"""How many seconds a transfer may take beyond what was requested. This matters on slow links, where
even a single 64 kB packet takes a while, and where everything still in flight has to be drained at
the end.
"""
CONNECT_S = 10.0
"""Timeout for connecting to a host, in seconds. TCP sends the first packet four times within this
window. If none of them gets an answer, there's probably a firewall dropping them.
"""
RETRY_S = 3.0
"""Timeout for each additional address of a host, in seconds. This one is shorter, since a host can
have many addresses.
"""


def receive(seconds: float, burst: int) -> None:
    """Times a connection for `seconds`, or longer if two packets take longer than that to arrive.

    Afterwards, drains the connection to leave the link idle again.

    We count bytes on arrival, including any that are still sitting in the socket's buffer. Counting
    only the bytes we've read would skew the result whenever another process takes the core for a
    while: bytes would pile up in the buffer and be attributed to a later interval than the one in
    which they crossed the link.
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
    begin = time.perf_counter()
    start = begin
    end = begin
    total = 0
    arrived = 0
    skipped = 0
    try:
        while skipped in (0, arrived) or end - start < seconds:
            connection.settimeout(max(0.01, begin + seconds + PATIENCE_S - end))
            count = connection.recv_into(buffer)
            if count == 0:
                break
            total += count
            before = time.perf_counter()
            arrived = total + _unread(connection)
            # Read the byte count before the clock. If we lose the core between the two, we
            # overestimate the elapsed time, and the rate comes out a bit low. The other way round,
            # it could come out higher than the link's actual rate, which is impossible.
            end = time.perf_counter()
            if skipped == 0 and total >= burst and (total >= SKIP_BYTES or end - begin >= SKIP_S):
                skipped = arrived
                start = before
    except TimeoutError:
        skipped = 0
    if skipped in (0, arrived):
        raise SystemExit(
            f"only {total} bytes arrived in {time.perf_counter() - begin:.0f} s, which is too few "
            "to time."
        )
    connection.shutdown(socket.SHUT_WR)
    try:
        while connection.recv_into(buffer):
            pass
    except TimeoutError:
        raise SystemExit(
            f"{arrived - skipped} bytes were timed, but then the sender neither sent more nor "
            "closed the connection."
        ) from None
    print(8 * (arrived - skipped) / (end - start))


def _unread(connection: socket.socket) -> int:
    """Returns how many bytes have arrived but haven't been read yet."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def send(hosts: list[str], port: int) -> None:
    """Sends until the other end closes its half of the connection.

    Whatever is still in the socket's buffer when the measurement ends has to cross the link anyway,
    and on a slow link that takes a long time. So we cap the unsent bytes in the buffer at an eighth
    of what's already been sent (or 64 KiB, if that's more).
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
    """Connects to the first host that answers.

    If none of them does, exits with a message that says why each attempt failed.
    """
    failed: list[str] = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=RETRY_S if failed else CONNECT_S)
        except OSError as error:
            failed.append(f"{host}: {error.strerror or error}")
    raise SystemExit("; ".join(failed))


def facts_of(connection: socket.socket) -> dict[str, Any]:
    """Returns the addresses of both ends and the network interface on this end.

    The interface is "" if none of them has this end's address.
    """
    source = connection.getsockname()[0]
    target = connection.getpeername()[0]
    names = [name for _, name in socket.if_nameindex() if _address(connection, name) == source]
    return {"source": source, "target": target, "interface": names[0] if names else ""}


def _address(connection: socket.socket, interface: str) -> str:
    """Returns the IPv4 address of an interface, or "" if it has none."""
    request = struct.pack("256s", interface.encode())
    with contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(connection, _SIOCGIFADDR, request)[20:24])
    return ""


def _round_trip_us(connection: socket.socket) -> int:
    """Returns the shortest round-trip time the kernel has seen on this connection.

    The first packets travel over an idle link, so the minimum doesn't include any queueing delay.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("I", info, _MIN_RTT)[0]


_SIOCGIFADDR = 0x8915
_MIN_RTT = 148
"""The offset of `tcpi_min_rtt` in the kernel's `struct tcp_info`."""


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(float(sys.argv[2]), int(sys.argv[3]))
    else:
        send(sys.argv[3:], int(sys.argv[2]))
