"""The exchange thread's time slices."""

import ctypes
import os
import platform
import sys
import threading

import pytest

from jaxcross.world import sched_slice


def in_a_thread(work):
    """Returns the result of `work()` in a new thread, whose scheduling ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in sched_slice._SETATTR, reason="not Linux"
)
def test_kernel_accepts_slices_and_changes_only_those():
    def work():
        before = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
        took = sched_slice.ask_for_short_slices()
        read = sched_slice._Attributes()
        number = {"x86_64": 315, "aarch64": 275}[platform.machine()]  # sched_getattr(2)
        size = ctypes.sizeof(read)
        assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(read), size, 0) == 0
        return (
            before,
            took,
            (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
            read.runtime,
        )

    before, took, after, slice_ns = in_a_thread(work)
    assert took
    assert after == before
    assert slice_ns in (sched_slice._SLICE_NS, 0)  # 0 on a kernel before 6.12


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux")
def test_explicitly_scheduled_thread_is_left_alone():
    def work():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return sched_slice.ask_for_short_slices(), os.sched_getscheduler(0)

    assert in_a_thread(work) == (False, os.SCHED_BATCH)


def test_other_machines_do_without(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "a machine")
    assert in_a_thread(sched_slice.ask_for_short_slices) is False
