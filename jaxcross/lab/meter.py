"""One end of a plain TCP transfer between two hosts, started by `jaxcross.lab.transfer`.

Uses only the standard library.

meter.py receive SECONDS BURST     prints a port and this host's addresses, then the bits per
                                   second that arrived after the first BURST bytes
meter.py send PORT HOST ...        sends to the first of these names and addresses that answers
                                   until the other end has enough, then prints the facts of the
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
"""The first `SKIP_BYTES` or `SKIP_S` seconds, whichever ends first, aren't timed.

That's because TCP has to ramp up first. Bytes that the token bucket lets through at full speed
aren't timed either.
"""
PATIENCE_S = 60.0
"""How many seconds longer than requested a transfer may take.

On a slow link, it has to wait for a packet of 64 kB and, at the end, for what is in flight.
"""
CONNECT_S = 10.0
"""Timeout for connecting to a host, in seconds.

It's long enough for TCP to send the first packet four times. A firewall that drops packets answers
none of them.
"""
RETRY_S = 3.0
"""The timeout for each further address of a host. There may be many of these."""


def receive(seconds: float, burst: int) -> None:
    """Times one connection for `seconds`, or longer if that's needed for two packets to arrive.

    Then reads the connection to its end, so that the link is idle again.

    Counts bytes when they arrive, whether or not they have been read. Otherwise bytes that pile up
    here while another process has the core would be counted in a later interval, although they
    crossed the link earlier.
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
            # Take the time after the count. So wherever this process loses the core, the time is
            # never too short for the bytes counted.
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
    """Returns how many bytes have arrived but haven't been read."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]


def send(hosts: list[str], port: int) -> None:
    """Sends until the other end closes its half of the connection.

    At that point, the bytes still waiting here to be sent are at most an eighth of those sent
    before, or 64 KiB if that's more.
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

    If none does, ends this process and reports why each one failed.
    """
    failed: list[str] = []
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=RETRY_S if failed else CONNECT_S)
        except OSError as error:
            failed.append(f"{host}: {error.strerror or error}")
    raise SystemExit("; ".join(failed))


def facts_of(connection: socket.socket) -> dict[str, Any]:
    """Returns the addresses of both ends, and the interface that has this end's address.

    The interface is "" if none has it.
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

    The link is idle when the first packets cross it, so queueing doesn't inflate this time.
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
