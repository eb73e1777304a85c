"""Tests that the time limit for starting MPI works even if the waiting process holds the GIL."""

import math
import signal
import subprocess
import sys

import pytest

from jaxcross.world.start_limit import limit_text, limited_start

BLOCKED = """
import ctypes, os
from jaxcross.world.start_limit import limited_start
with limited_start(2, 0.1, {"PMI_RANK": "0"}):
    ctypes.PyDLL(None).sleep(1000)
"""


def test_a_rank_that_is_blocked_in_the_start_ends_with_a_message():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == limit_text(0, 2, 0.1) + "\n"


@pytest.mark.parametrize("limit_s", [1000, math.inf])
def test_a_start_in_time_leaves_no_process_behind(monkeypatch, limit_s):
    started = []

    class Kept(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    with limited_start(2, limit_s, {}):
        assert started[0].poll() is None
    assert started[0].returncode == 0
    with limited_start(1, 0, {}):  # a single rank waits for nobody
        assert len(started) == 1


def test_the_message_says_what_to_check():
    text = limit_text(3, 4, 300)
    assert text.startswith(
        "jaxcross: rank 3 of 4 has waited 300 s in the start of MPI; all ranks end. "
    )
    for word in (
        "firewall",
        "`getent hosts NAME`",
        "`UCX_NET_DEVICES=eth0`",
        "`FI_TCP_IFACE=eth0`",
        "`initialize(stall_timeout_s=...)`",
    ):
        assert word in text
    assert limit_text(None, 4, 2.5).startswith("jaxcross: a rank of 4 has waited 2.5 s ")
