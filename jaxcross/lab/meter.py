"""One end of a plain TCP transfer between two hosts. `jaxcross.lab.transfer` starts both ends.

Uses only the standard library, because hosts without jaxcross run it, too.

meter.py receive SECONDS BURST     prints the port on which it listens and this host's addresses,
                                   waits for a sender, and prints how many bits per second arrived
                                   after the first BURST bytes
meter.py send PORT HOST ...        sends to the first of these names and addresses that answers,
                                   until the receiver has enough, and prints the facts of the
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
"""The first `SKIP_BYTES` bytes or `SKIP_S` seconds, whichever ends first, aren't timed, because TCP
first has to ramp up its rate. If the link is shaped by a token bucket, the burst that the bucket
lets through at full speed isn't timed either.
"""
PATIENCE_S = 60.0
"""How many seconds longer than requested a transfer may take. This matters on slow links, where
even a single packet of 64 kB takes long, and where everything that is in flight has to arrive at
the end.
"""
CONNECT_S = 10.0
"""Timeout for connecting to a host, in seconds. In this time, TCP sends the first packet four
times. If none of these is answered, there's probably a firewall that drops packets.
"""
RETRY_S = 3.0
"""Timeout for each further address of a host, in seconds. It's shorter, because there may be many
addresses.
"""


def receive(seconds: float, burst: int) -> None:
    """Times one connection for `seconds`, or longer if that's needed for two packets to arrive.

    Then reads the connection to its end, so that the link is idle again.

    We count bytes when they arrive, i.e. including those that are still in the socket's buffer. If
    we only counted the bytes that we've read, the result would be wrong whenever another process
    has the core for a while: bytes pile up in the buffer, and would be counted in a later interval
    than the one in which they crossed the link.
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
            # Count the bytes first, and then take the time. Another process may get the core
            # between the two. In this order, that makes the measured time too long, and the rate
            # too low. In the other order, the time might be too short, and the rate could exceed
            # that of the link, which is impossible.
            end = time.perf_counter()
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
    """Returns the number of bytes that have arrived but haven't been read yet."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def send(hosts: list[str], port: int) -> None:
    """Sends until the other end closes its half of the connection.

    Bytes that are still in the socket's buffer when the measurement ends have to cross the link
    afterwards, which takes a long time if the link is slow. So we limit how many bytes may wait in
    the buffer, to an eighth of those already sent, or 64 KiB if that's more.
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

    If no host answers, reports why each attempt failed and ends this process.
    """
    failed: list[str] = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=RETRY_S if failed else CONNECT_S)
        except OSError as error:
            failed.append(f"{host}: {error.strerror or error}")
    raise SystemExit("; ".join(failed))


def facts_of(connection: socket.socket) -> dict[str, Any]:
    """Returns the addresses of both ends, and the network interface of this end.

    The interface is "" if no interface has this end's address.
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
    """Returns the connection's shortest round-trip time according to the kernel.

    The first packets cross an idle link, so the shortest time doesn't include any queueing.
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
