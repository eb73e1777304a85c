"""An uncaught exception terminates all ranks, unless no rank waits or someone is at a prompt."""

import sys
import threading
from types import SimpleNamespace

import pytest

from jaxcross.errors import JobError
from jaxcross.health import abort
from jaxcross.health.abort import ExceptionHooks, Terminated


class AbortedError(Exception):
    """Raised instead of terminating all ranks."""


@pytest.fixture
def shown(monkeypatch):
    """Returns what Python's own hooks have shown."""
    found = []

    def end(message, reason, notify):
        raise AbortedError(message)

    monkeypatch.setattr(abort, "abort_everywhere", end)
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: found.append(kind))
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args.exc_type))
    return found


def uncaught(hooks, error):
    hooks._on_exception(type(error), error, None)


def uncaught_in_thread(hooks, name):
    error = NameError("name 'wrold' is not defined")
    args = (NameError, error, None, threading.Thread(name=name))
    hooks._on_thread_exception(threading.ExceptHookArgs(args))


def test_an_exception_ends_all_ranks(shown):
    with pytest.raises(AbortedError, match="rank 0 failed with NameError; all 2 ranks end"):
        uncaught(ExceptionHooks(0, 2), NameError("x"))
    with pytest.raises(AbortedError, match="rank 0 failed with NameError; all 2 ranks end"):
        uncaught_in_thread(ExceptionHooks(0, 2), "mine")


def test_an_exception_of_the_only_rank_is_python_s_own_and_is_recorded(shown):
    hooks, reasons = ExceptionHooks(0, 1), []
    hooks.notify = reasons.append
    uncaught(hooks, NameError("x"))
    uncaught_in_thread(hooks, "mine")
    assert shown == [NameError] * 2
    assert [reason.text for reason in reasons] == ["rank 0 failed with NameError: x"]


def test_only_an_exception_that_is_not_mpi_s_is_the_script_s(monkeypatch, shown):
    """A restarted run would raise the script's own exception again, but can reach a lost rank."""
    mpi = SimpleNamespace(Exception=type("Exception", (RuntimeError,), {}))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    hooks, reasons = ExceptionHooks(0, 1), []
    hooks.notify = reasons.append
    for error in (Exception("no MPI here"), mpi.Exception("MPI_ERR_OTHER")):
        uncaught(hooks, error)
    assert [reason.script_raised for reason in reasons] == [True, False]


@pytest.mark.parametrize("size", [1, 2])
def test_a_typo_at_the_prompt_does_not_end_the_session(monkeypatch, shown, size):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    hooks = ExceptionHooks(0, size)
    for error in (NameError("x"), KeyboardInterrupt()):
        uncaught(hooks, error)
    uncaught_in_thread(hooks, "mine")
    assert shown == [NameError, KeyboardInterrupt, NameError]
    with pytest.raises(AbortedError, match="SIGTERM"):
        uncaught(hooks, Terminated())


def test_a_lane_that_breaks_always_ends_all(shown):
    with pytest.raises(AbortedError):
        uncaught_in_thread(ExceptionHooks(0, 1), "jaxcross-exchange")


def test_the_cause_of_a_job_s_failure_is_not_shown_twice(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = JobError("Job `a` failed")
    error.__cause__, error.cause_rank = ValueError("a bad example"), 0  # printed when the job left
    uncaught(ExceptionHooks(0, 1), error)
    assert capsys.readouterr().err == "jaxcross.errors.JobError: Job `a` failed\n"
    uncaught(ExceptionHooks(0, 1), JobError("Job `b` failed"))
    assert capsys.readouterr().err == "jaxcross.errors.JobError: Job `b` failed\n"
