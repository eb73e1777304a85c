"""The stacks of all threads, which a stuck rank takes of itself."""

import gc
import sys
import threading

import pytest

from jaxcross.health.tracebacks import stacks


@pytest.fixture(autouse=True)
def collecting():
    yield
    gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_taken(collects, monkeypatch):
    """A collection there would let threads run that wait for the lock being held."""
    seen, take = [], sys._current_frames

    def frames():
        seen.append(gc.isenabled())
        return take()

    monkeypatch.setattr(sys, "_current_frames", frames)
    (gc.enable if collects else gc.disable)()
    text = stacks()
    assert seen == [False] and gc.isenabled() == collects
    assert (
        text.startswith(f"thread '{threading.main_thread().name}':\n") and "test_stacks.py" in text
    )
