"""Tests a run in which all jobs are paused: who reports it, and what happens if no one can resume
them.
"""

import threading

import pytest

from jaxcross.runtime import paused_run
from jaxcross.runtime.paused_run import PausedRun, can_resume


@pytest.fixture
def helpers(monkeypatch):
    """The ranks with a thread that could resume a job."""
    found = set()
    monkeypatch.setattr(paused_run, "can_resume", lambda: bool(found))
    return found


def looks(run, seconds):
    return [run.look(now_s, ["a"]) for now_s in seconds]


def test_each_rank_votes_once_and_the_last_vote_ends_the_run(helpers):
    ranks = [PausedRun(rank, 2) for rank in range(2)]
    texts = [looks(run, [0, 0.2, 0.4]) for run in ranks]
    assert texts == [[None, "nobody resumes 0 0", None], [None, "nobody resumes 0 1", None]]
    for run in ranks:
        assert run.take(texts[0][1]) and not run.take_end()
        assert run.take(texts[1][1]) and run.is_over
        assert run.take_end() and not run.take_end()


def test_a_vote_counts_only_until_a_job_is_resumed(helpers):
    run = PausedRun(0, 2)
    run.take("nobody resumes 0 0")
    run.changes += 1
    run.take("nobody resumes 0 1")
    run.take("nobody resumes 1 1")
    assert not run.is_over
    run.take("nobody resumes 1 0")
    assert run.is_over


def test_a_rank_with_a_helper_does_not_vote_and_rank_0_says_that_it_waits(helpers, caplog):
    helpers.add(0)
    run = PausedRun(0, 1)
    assert looks(run, [0, 1, 2.9]) == [None] * 3 and not caplog.messages
    assert looks(run, [3, 4, 5]) == [None] * 3
    (message,) = caplog.messages
    assert message.startswith("All remaining jobs are paused: `a`. The run waits until another ")
    helpers.clear()  # the thread has ended
    assert run.look(6, ["a"]) == "nobody resumes 0 0"


def test_a_text_of_a_submitted_job_is_left_alone():
    assert not PausedRun(0, 1).take('{"name": "nobody resumes"}')


def test_a_thread_of_the_user_can_resume(monkeypatch):
    monkeypatch.setattr(paused_run.signal, "getsignal", lambda number: paused_run.signal.SIG_DFL)
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    threads = [threading.current_thread(), threading.Thread(name="jaxcross-compute")]
    assert not can_resume()
    threads.append(threading.Thread(name="controller"))
    assert can_resume()


def test_a_signal_handler_of_the_user_can_resume(monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    monkeypatch.setattr(paused_run.signal, "getsignal", lambda number: print)
    assert can_resume()
