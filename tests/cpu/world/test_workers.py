"""A worker process that reaches an exchange terminates its rank, or terminates along with it."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

from jaxcross.errors import ExchangeError
from jaxcross.health.process import ProcessId, process_state, this_process
from jaxcross.world import workers
from jaxcross.world.workers import Refusal
from jaxcross.world.world import World

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="ranks are reached by way of /proc"
)


@pytest.fixture
def importing(monkeypatch):
    """Simulates a `spawn` process that is importing the script."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)


@contextmanager
def another() -> Iterator[tuple[subprocess.Popen[bytes], ProcessId]]:
    """Yields a process and its identity."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        yield process, replace(this_process(), pid=process.pid, started=started)
    finally:
        process.kill()
        process.communicate()


def test_a_worker_that_is_late_ends_without_a_word(importing, capsys):
    with another() as (process, place):
        process.communicate(b"\n")
        assert process_state(place, this_process()) == "gone"
        with pytest.raises(SystemExit):
            _ = Refusal(0, place, 5, 60).allgather_text
    assert capsys.readouterr() == ("", "")


def test_worker_that_cannot_reach_its_rank_says_so(importing):
    with (
        another() as (_, place),
        pytest.raises(ExchangeError, match="^A worker process of rank 0 reached line "),
    ):
        _ = Refusal(0, place, 999, 60).allgather_text


def test_a_worker_is_given_every_field_that_a_world_needs():
    needed = {
        field.name for field in fields(World) if MISSING is field.default is field.default_factory
    }
    given = {
        *workers._NUMBERS,
        *workers._TALKING,
        "executables",
        "make_wire",
        "unpickle",
    }  # the last by `_make_world`
    assert needed <= given
