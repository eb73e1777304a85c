"""Tests what the probe reads about a rank's connections."""

from jaxcross.world.probe import connections, ends_of

ROW = (
    " {n}: {own} {other} {state} 00000000:00000000 00:00000000 00000000     0        0 {socket} 1 "
    "0000 100 0 0 10 0"
)
A, B = "01004D0A:B3E1", "02004D0A:DD92"  # 10.77.0.1:46049, 10.77.0.2:56722
MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address in an IPv6 table


def row(own, other, *, state="01", socket=7):
    return ROW.format(n=0, own=own, other=other, state=state, socket=socket)


def test_established_connections_of_this_process_are_read():
    table = [
        row(A, B),
        row(A, B, socket=8),  # belongs to another process
        row(A, "00000000:0000", state="0A"),  # a listening socket
        row(MAPPED + B, MAPPED + A, socket=9),
    ]
    assert ends_of(table, {"socket:[7]", "socket:[9]", "pipe:[8]"}) == [
        ("10.77.0.1:46049", "10.77.0.2:56722"),
        ("10.77.0.2:56722", "10.77.0.1:46049"),
    ]


def test_connection_counts_if_both_ends_are_ranks():
    """A connection to the launcher has only one end in a rank, and a rank's connection to itself is
    internal.
    """
    first = [
        ("10.0.0.1:5", "10.0.0.2:6"),
        ("10.0.0.1:7", "10.0.0.9:8"),
        ("10.0.0.1:1", "10.0.0.1:2"),
    ]
    second = [("10.0.0.2:6", "10.0.0.1:5"), ("10.0.0.2:7", "10.0.0.9:8")]
    assert connections([first, second]) == [("10.0.0.1", "10.0.0.2")]
    assert connections([first, [("10.0.0.2:4", "10.0.0.1:5")]]) == []
