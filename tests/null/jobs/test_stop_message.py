"""Tests what a stopped run reports as saved."""

from jaxcross._endings import JobStatus
from jaxcross.jobs.stop_message import MAX_JOBS_SHOWN, StoppedJob, stop_message


def test_each_job_is_named_with_its_step_and_folder():
    jobs = [
        StoppedJob(name="a", status=JobStatus.STOPPED, step=120, begun=True, saved=120),
        StoppedJob(name="b", status=JobStatus.ENDED, step=40, begun=True, saved=40),
        # A trial of a sweep, whose checkpoints may be deleted.
        StoppedJob(name="i", status=JobStatus.ENDED, step=40),
        StoppedJob(name="c", status=JobStatus.STOPPED, step=120, begun=True, saved=100),
        StoppedJob(name="d", status=JobStatus.STOPPED, step=0, begun=True),
        StoppedJob(name="e", status=JobStatus.FAILED, step=7, begun=True),
        StoppedJob(name="f", status=JobStatus.STOPPED, step=0),
        StoppedJob(name="g", status=JobStatus.FAILED, step=7, begun=True, saved=6),
    ]
    assert stop_message(jobs, "runs/ck").splitlines() == [
        "jaxcross: the run has stopped.",
        "Job `a`: saved at step 120 in runs/ck.",
        "Job `c`: saved at step 100, 20 before its last in runs/ck.",
        "Job `d`: nothing is saved since it has made no step.",
        "Job `f`: had not begun. Its earlier checkpoints are kept.",
        "Job `b`: ended, and saved at step 40 in runs/ck.",
        "Job `i`: had ended before the stop.",
        "Job `e`: nothing is saved of its 7 steps.",
        "Job `g`: failed, and saved at step 6, 1 before its last in runs/ck.",
        "Start the same command again to resume.",
    ]


def test_an_ejected_job_says_so():
    job = StoppedJob(name="h", status=JobStatus.EJECTED, step=7, begun=True, saved=7)
    assert (
        stop_message([job], "ck").splitlines()[1]
        == "Job `h`: was ejected, and saved at step 7 in ck."
    )


def test_without_checkpoints_nothing_was_saved():
    jobs = [
        StoppedJob(name="a", status=JobStatus.STOPPED, step=5),
        StoppedJob(name="b", status=JobStatus.ENDED, step=7),
        StoppedJob(name="c", status=JobStatus.FAILED, step=3),
    ]
    assert stop_message(jobs, None) == (
        "jaxcross: the run has stopped: job `a` after step 5, job `b` ended after step 7, job `c` "
        "failed after step 3. Nothing was saved, because the runner has no `checkpoints`."
    )


def test_finished_jobs_do_not_hide_unfinished_ones():
    jobs = [StoppedJob(name=f"{n}", status=JobStatus.ENDED, step=4) for n in range(64)]
    jobs.append(StoppedJob(name="last", status=JobStatus.STOPPED, step=3, begun=True, saved=3))
    assert stop_message(jobs, "ck").splitlines()[1] == "Job `last`: saved at step 3 in ck."


def test_many_jobs_are_a_few_lines():
    jobs = [
        StoppedJob(name=f"{n}", status=JobStatus.STOPPED, step=1, begun=True, saved=1)
        for n in range(64)
    ]
    lines = stop_message(jobs, "ck").splitlines()
    assert len(lines) == MAX_JOBS_SHOWN + 3
    assert lines[-2] == f"And {64 - MAX_JOBS_SHOWN} more jobs in ck."
    assert f"and {64 - MAX_JOBS_SHOWN} more jobs" in stop_message(jobs, None)
