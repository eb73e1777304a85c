"""A transfer between two hosts: what it reports about them, and how it ends if it fails."""

import sys
from functools import partial

import pytest

from jaxcross.lab import Lab, available
from jaxcross.lab.transfer import measure_transfer

REASON = available()


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_transfer_names_both_ends():
    """If the sender can't resolve a host's name, it uses the address, unless `by_name` is set."""
    with Lab(hosts=2) as lab:
        send = partial(
            measure_transfer,
            partial(lab.wrap_host, 0),
            partial(lab.wrap_host, 1),
            python=sys.executable,
            seconds=0.1,
        )
        with pytest.raises(OSError, match="^nobody: .*[Nn]ame"):
            send("nobody")
        done = send("nobody", by_name=False)
    assert (done.source, done.target, done.interface) == ("10.77.0.1", "10.77.0.2", "eth0")
    assert done.bits_per_s > 0 and 0 < done.round_trip_us < 10_000_000


def test_host_that_says_nothing_ends_the_transfer(monkeypatch):
    """Its children, which hold its output open, are ended as well."""
    monkeypatch.setattr("jaxcross.lab.transfer.PATIENCE_S", 0.1)
    monkeypatch.setattr("jaxcross.lab.transfer.START_S", 0)
    with pytest.raises(OSError, match="no answer in time"):
        measure_transfer(
            list,
            lambda command: ["sh", "-c", "sleep 1000; exit"],
            "h",
            python=sys.executable,
            seconds=0,
        )


def test_host_that_cannot_run_the_program_is_quoted():
    with pytest.raises(OSError, match="not found"):
        measure_transfer(
            list,
            lambda command: ["sh", "-c", "no-such-agent"],
            "h",
            python=sys.executable,
            seconds=0,
        )
