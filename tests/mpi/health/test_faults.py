"""Every fault of one rank ends as the table says: each is named on every rank, and no checkpoint is damaged."""

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import faults

from jaxcross.report.event_files import read
from jaxcross.report.post_mortem import verdict

USUAL = (
    ("raise", "compile", 2), ("raise", "exchange", 2), ("kill", "exchange", 3), ("stop", "compute", 2),
    ("term", "vote", 2),
)  # fmt: skip
START = "import os, signal, sys, threading\nfrom jaxcross.world import initialize\nworld = initialize({})\n"
WAIT = (
    "from mpi4py import MPI\n"
    "with world.monitor(job='a', step=3, segment=1, what='psum'):\n    MPI.COMM_WORLD.Dup().Barrier()\n"
)
HURT = "if world.rank == 1:\n    os.kill(os.getpid(), signal.SIG{})\n"


def test_faults_at_points():
    """Several at once: most of their time they wait. Beside other tests a rank may get the processor seldom."""
    cases = [faults.Case(fault=fault, point=point, ranks=ranks, slack=4) for fault, point, ranks in USUAL]
    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(faults.run_case, cases))
    wrong = [f"{r.case.fault} at {r.case.point}: {r.problems}\n{r.output}" for r in results if r.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", faults.table(2), ids=lambda case: f"{case.fault}-{case.point}")
def test_every_fault_at_every_point(case):
    result = faults.run_case(case)
    assert result.problems == (), result.output


def test_the_check_finds_what_is_wrong():
    """The table's own check, which must be able to fail."""
    kill, stops = (faults.Case(fault=fault, point="exchange", ranks=2) for fault in ("kill", "term"))
    leaves = faults.Case(fault="raise", point="compute", ranks=2)
    place = "job 'b', step 3, segment 1 (exchange)"
    good = f"jaxcross: rank 0 ends all ranks while in {place}, because rank 1 is gone"
    waited = f". Rank 0 waited in {place}."
    said = f"Rank 1 ended first, in {place}{waited}"
    assert list(faults.check(kill, 1, good, said)) == []
    assert len(list(faults.check(kill, 0, "", ""))) == 3
    for named, other in (("job 'b'", "job 'a'"), ("step 3", "step 2"), (", segment 1", ""), (" (exchange)", "")):
        assert len(list(faults.check(kill, 1, good.replace(named, other), said))) == 1
        assert len(list(faults.check(kill, 1, good, said.replace(named, other)))) == 1
    assert len(list(faults.check(kill, 1, good.replace("rank 1", "rank 0"), said))) == 1
    assert len(list(faults.check(kill, 1, good, f"Rank 1 ended first, in vote{waited}"))) == 1
    assert len(list(faults.check(kill, 1, good, said.replace("Rank 1", "Rank 0")))) == 1
    assert len(list(faults.check(leaves, 1, "", ""))) == 3
    stood = "rank 0 leaves: {'a': 3, 'b': 3}\nrank 1 leaves: {'a': 3, 'b': 3}"
    assert list(faults.check(stops, 143, stood, "")) == []
    assert len(list(faults.check(stops, 143, stood.replace("'b': 3}\n", "'b': 4}\n"), ""))) == 1
    assert len(list(faults.check(stops, 143, stood.replace("3", "8"), ""))) == 1
    left = faults.steps_left(stood)
    assert left == {"a": 3, "b": 3} and faults.steps_left(good) == {}
    begin = "".join(f"rank {rank} begins job {job} after step 3\n" for rank in (0, 1) for job in "ab")
    end = begin + "".join(f"rank {rank} ends: {{'a': (8, 36.0), 'b': (8, 72.0)}}\n" for rank in (0, 1))
    assert list(faults.check_restart(kill, 0, end, {})) == list(faults.check_restart(stops, 0, end, left)) == []
    assert len(list(faults.check_restart(kill, 0, end.replace("72.0", "71.0", 1), {}))) == 1
    assert len(list(faults.check_restart(kill, 1, "", {}))) == 4
    assert len(list(faults.check_restart(stops, 0, end.replace("after step 3", "after step 2", 1), left))) == 1


def test_a_limit_tells_a_promise_from_the_watchdog():
    """A loaded machine may be late, but whoever waits for the watchdog is later."""
    for case in faults.table(2):
        if case.outcome == "ends":
            assert faults.PROMISED_S[case.fault] < case.limit_s < faults.WATCHDOG_S


def test_under_a_plain_mpirun_the_event_files_are_the_evidence(mpirun, tmp_path):
    code = START.format("heartbeat_timeout_s=5") + HURT.format("KILL") + WAIT
    done = mpirun(2, code, env={"JAXCROSS_EVENTS": str(tmp_path)})
    assert done.returncode != 0
    text = verdict(read(tmp_path))
    assert text.startswith("Rank 1 ") and "Rank 0 waited in job 'a', step 3, segment 1 (psum)." in text


def test_who_waits_for_a_rank_whose_script_has_ended_is_told(mpirun):
    code = START.format("heartbeat_timeout_s=10") + "if world.rank == 1:\n    raise SystemExit(0)\n" + WAIT
    done = mpirun(2, code)
    assert done.returncode != 0
    said = "because rank 1 does not come to job 'a', step 3, segment 1 (psum): its script ended after 0 of 1 exchanges"
    assert said in done.stderr


LEFT = (
    "import time\nprocess = int(world.control.allgather_text(str(os.getpid()))[1])\nif world.rank == 1:\n"
    "    raise SystemExit(0)\ntime.sleep(5)\nos.kill(process, signal.SIG{})\ntime.sleep(60)\n"
)


def test_a_rank_whose_script_has_ended_is_watched(mpirun):
    done = mpirun(3, START.format("heartbeat_timeout_s=10") + LEFT.format("STOP"))
    assert done.returncode != 0
    assert "because rank 1 is silent for " in done.stderr and "is stopped (by SIGSTOP or a debugger)." in done.stderr


def test_a_rank_whose_script_has_ended_can_be_stopped(mpirun):
    done = mpirun(2, START.format("") + LEFT.format("TERM"))
    assert done.returncode == 143
    said = "jaxcross: rank 1 was told to end (SIGTERM) while it waited for the others to end."
    assert said in done.stderr


def test_an_exception_is_told_by_every_rank(mpirun):
    code = START.format("") + "if world.rank == 1:\n    raise ValueError('no more data')\n" + WAIT
    done = mpirun(3, code)
    for rank in (0, 2):
        words = f"jaxcross: rank {rank} of 3 ends while "
        assert "because rank 1 failed with ValueError: no more data, outside of any step" in done.stderr.split(words)[1]


def test_a_stop_outside_of_a_run_ends_all_with_its_code(mpirun):
    code = START.format("") + HURT.format("TERM") + WAIT
    done = mpirun(2, code)
    assert "jaxcross: rank 1 was told to end (SIGTERM); all 2 ranks end." in done.stderr
    assert "because rank 1 was told to end (SIGTERM)" in done.stderr
    assert done.returncode == 143


@pytest.mark.exhaustive
def test_a_stop_reaches_a_rank_whose_main_thread_never_comes_back_from_c(mpirun):
    code = START.format("") + (
        "if world.rank == 1:\n    import ctypes\n    mutex = (ctypes.c_char * 64)()\n"
        "    lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n    lock(mutex), lock(mutex)\n"
        + WAIT
    )
    done = mpirun(2, code)
    assert "while its main thread was busy in C" in done.stderr
    assert done.returncode == 143


# The watchdogs here are short: what takes ranks unlike times, such as imports, comes before they begin.
HANGS = """
import os, threading, jaxcross
from jax import lax
from jaxcross import Runner, crossover
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12, heartbeat_timeout_s=0)

step = crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def data(hangs):
    for n in range(10_000):
        if hangs and n == 3:
            threading.Event().wait()
        yield float(n)

def goes_on(job):
    w = job.restore(0.0)
    for x in job.batches(data(False)):
        w = step(w, x)

def hangs(job):
    w = job.restore(0.0)
    for x in {loop}:
        w = step(w, x)
        {then}

runner = Runner(world, {checkpoints})
runner.add("good", goes_on)
runner.add("bad", hangs)
runner.run()
"""


@pytest.mark.parametrize(
    ("loop", "then", "said"),
    [
        (  # its own loop, beside a job that goes on
            "data(world.rank == 1)",
            "pass",
            r"step 4 \(call of the step\).\n  rank 1 has not arrived: its job 'bad' has not come so far; ",
        ),
        pytest.param(
            "job.batches(data(world.rank == 1))",
            "pass",
            "rank 1 is late itself: own batch 4 of data 1 is its own affair",
            marks=pytest.mark.exhaustive,
        ),
        (  # and on all ranks
            "job.batches(data(True))",
            "pass",
            r"s in job 'bad', step 4 \(own batch 4 of data 1\).\n  rank (\d) is late itself",
        ),
    ],
    ids=["own-loop", "data", "data-on-all"],
)
def test_a_job_that_hangs_in_its_own_code_is_named_although_votes_go_on(mpirun, loop, then, said):
    done = mpirun(2, HANGS.replace("{loop}", loop).replace("{then}", then).replace("{checkpoints}", ""))
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr


ALONE = """
import jax.numpy as jnp, numpy as np
from jax import lax
from jaxcross import Runner, crossover, initialize
from jaxcross.program import stages
world = initialize(stall_timeout_s=30, heartbeat_timeout_s=0)
compiled = stages.compile

def fails(program, *args, **kwargs):
    if world.rank == 1 and program.name == "unlucky":
        raise MemoryError("no room")
    return compiled(program, *args, **kwargs)

stages.compile = fails

@crossover(axes="batch")
def unlucky(w, x):
    return w + lax.psum(x, "batch")

@crossover(axes="batch")
def lucky(w, x):
    return w + lax.psum(x, "batch")

def compiles(job):  # before there is any communicator
    return unlucky(job.restore(0.0), 1.0)

def reads(job):
    leaf = jnp.zeros(3)
    if world.rank == 1:
        leaf.delete()
    return job.restore(leaf)

def talks(job):
    return job.run_on_all_ranks("mine", lambda control: control.allgather_text("x") if world.rank == 0 else 1 / 0)

def differs(job):
    job.nonfinite = "skip" if world.rank == 1 else "raise"
    return lucky(job.restore(0.0), 1.0)

def goes_on(job):
    w = job.restore(0.0)
    over = lambda control: control.allreduce_min(np.array([all(other.done.is_set() for other in bad)]))[0]
    while not job.run_on_all_ranks("are they over?", over):
        pass
    for _ in range(3):
        w = lucky(w, 1.0)
    return w

runner = Runner(world)
bad = [runner.add(fn.__name__, fn) for fn in (compiles, reads, talks, differs)]
good = runner.add("good", goes_on)
try:
    runner.run()
except Exception as error:
    print(f"rank {world.rank}: {type(error).__name__}", flush=True)
for job in runner.jobs:
    print(f"rank {world.rank}: {job.name} {job.status}: {job.error or job.state}", flush=True)
"""


def test_a_job_that_fails_where_others_wait_for_it_leaves_alone(mpirun):
    """In its compiler, while its state is compared, in what ranks do together: nobody waits for it, others go on."""
    done = mpirun(2, ALONE).check()
    for rank in (0, 1):
        assert f"rank {rank}: JobError" in done.stdout
        assert f"rank {rank}: good ended: 6.0" in done.stdout
        for job, why in (
            ("compiles", "MemoryError: no room"),
            ("reads", "deleted"),
            ("talks", "ZeroDivisionError"),
            ("differs", "`raise` on rank 0, `skip` on"),
        ):
            assert re.search(rf"rank {rank}: {job} failed: .*([Rr]ank|ranks 0,) 1 .*{why}", done.stdout), done.stdout


AFTER_THE_COMMIT = """
import threading, jax, jaxcross, numpy as np
from jax import lax
from jaxcross import Runner, crossover
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12, heartbeat_timeout_s=0)

def last(total):
    if world.rank == 1 and total >= 6:
        threading.Event().wait()
    return np.float32(total)

def step(w, x):
    total = lax.psum(x, "batch")
    return w + jax.pure_callback(last, jax.ShapeDtypeStruct((), np.float32), total)

step = crossover(step, axes="batch")

def work(job):
    w = job.restore(np.float32(0))
    for n in range(10):
        w = step(w, np.float32(n))
        if job.step == 4 and world.rank == 0:
            raise ValueError("no more")

runner = Runner(world)
runner.add("a", work)
runner.run()
"""


def test_a_hang_after_the_commit_is_named_although_another_rank_has_failed_meanwhile(mpirun):
    done = mpirun(2, AFTER_THE_COMMIT)
    assert done.returncode != 0
    said = r"rank 1 has waited \d+ s in job 'a', step 4 \(own end of the step\).\n  rank 1 is late itself"
    assert re.search(said, done.stderr), done.stderr


LONG = """
import time, jaxcross
from jax import lax
from jaxcross import Runner, crossover
world = jaxcross.initialize(stall_timeout_s=3, heartbeat_timeout_s=0)

step = crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def steps(job, count, pause_s):
    w = job.restore(0.0)
    for _ in range(count):
        w = step(w, 1.0)
        time.sleep(pause_s)
    return w

def evaluates(job):
    steps(job, 3, 0)
    with job.measure("host", "evaluation"):
        time.sleep(6 if world.rank == 0 else 0)
    return step(0.0, 1.0)

def in_pieces(job):
    steps(job, 3, 0)
    for _ in range(3 if world.rank == 0 else 0):
        with job.measure("host", "evaluation"):
            time.sleep(2.4)
        time.sleep(1.6)
    return step(0.0, 1.0)

def rests(job):
    other.pause()
    steps(job, 15, 0.4)
    other.resume()

def ends_early(job):
    steps(job, 2, 0)
    time.sleep(0 if world.rank else 6)

def goes_on(job):
    steps(job, 20, 0.4)

for policy, functions in (
    (jaxcross.Sequential(), (goes_on, goes_on)),
    (None, (rests, goes_on)),
    (None, (evaluates,)),
    (None, (in_pieces,)),
    (None, (ends_early, goes_on)),
):
    runner = Runner(world, policy)
    jobs = [runner.add(f"job-{n}", function) for n, function in enumerate(functions)]
    other = jobs[-1]
    runner.run()
    print(f"rank {world.rank}: {[job.status for job in jobs]}", flush=True)
"""


@pytest.mark.exhaustive
def test_waits_that_are_right_are_not_taken_for_hangs(mpirun):
    """All last twice the watchdog's time: for the policy, a rest, an evaluation, one in pieces, others at the end."""
    done = mpirun(2, LONG).check()
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank}: ['ended', 'ended']") == 3
        assert done.stdout.count(f"rank {rank}: ['ended']") == 2


IDLE = """
import threading, jaxcross
from jax import lax
from jaxcross import Runner, crossover
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12, heartbeat_timeout_s=0)

step = crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def trains(job):
    w = job.restore(0.0)
    for _ in range(3):
        w = step(w, 1.0)
    if world.rank == 1:
        threading.Event().wait()

def waits(job):
    jobs[0].done.wait()

runner = Runner(world, {policy})
jobs = [runner.add("a", trains), runner.add("b", {other})]
runner.run()
"""


@pytest.mark.parametrize(("policy", "other"), [("jaxcross.Sequential()", "trains"), ("None", "waits")])
def test_a_hang_at_the_end_of_a_job_is_named_where_no_other_job_goes_on(mpirun, policy, other):
    done = mpirun(2, IDLE.format(policy=policy, other=other))
    assert done.returncode != 0
    said = (
        r"rank 0 has waited \d+ s in job 'a', step 4 \(end of the job\).\n  rank 1 has not arrived: its job 'a' has not"
    )
    assert re.search(said, done.stderr), done.stderr


def test_a_disk_that_hangs_is_named(mpirun, tmp_path):
    """A file system that is gone keeps `fsync` for ever."""
    script = HANGS.replace("{loop}", "job.batches(data(False))").replace("{then}", "job.save(w)")
    script = script.replace("{checkpoints}", f"checkpoints=jaxcross.Checkpoints({str(tmp_path)!r})")
    gone = "if world.rank == 1:\n    os.fsync = lambda file: threading.Event().wait()\n"
    done = mpirun(2, script.replace("runner =", f"{gone}runner ="))
    assert done.returncode != 0
    assert "(own checkpoint).\n  rank 1 is late itself: its disk has not taken the last checkpoint" in done.stderr, (
        done.stderr
    )


WARNED = """
import os, signal, sys, time, jaxcross
world = jaxcross.initialize()
from jax import lax

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
step = jaxcross.crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def work(job):
    w = job.restore(0.0)
    while True:
        w = step(w, 1.0)
        if job.step == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGUSR1)  # by way of the launcher, too

runner = jaxcross.Runner(world)
job = runner.add("a", work)
try:
    runner.run()
except BaseException as error:
    print(f"rank {world.rank}: {type(error).__name__} {error} after step {job.step}, {job.status}", flush=True)
    steps = set(world.control.allgather_text(str(job.step)))
    print("steps agree" if len(steps) == 1 and job.step >= 3 else f"steps {steps}", flush=True)
"""


def test_a_handler_of_another_signal_stops_all_and_its_exception_comes_after(mpirun):
    done = mpirun(2, WARNED).check()
    assert "rank 1: SystemExit 7 after step " in done.stdout
    assert "rank 0: KeyboardInterrupt  after step " in done.stdout
    assert done.stdout.count("steps agree") == 2


def test_the_launcher_passes_a_stop_on_and_leaves_nothing_behind(tmp_path):
    code = (
        "import time, jaxcross\nworld = jaxcross.initialize()\n"
        "def wait(job):\n    job.run_on_all_ranks('all', lambda _: None)\n    print('running', flush=True)\n    try:\n"
        "        while not job.run_on_all_ranks('turn', lambda _: None): pass\n"
        "    finally:\n        time.sleep(2)\n        print('saved', flush=True)\n"
        "runner = jaxcross.Runner(world)\nrunner.add('a', wait)\nrunner.run()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    line = [
        sys.executable,
        "-m",
        "jaxcross.cli",
        "launch",
        "-n",
        "2",
        "--events",
        str(tmp_path / "events"),
        str(script),
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        while "running" not in process.stdout.readline():  # of two ranks, perhaps on one line
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(60) == 143, output
    assert output.count("saved") == 2, "Open MPI's own patience ends after a second"
    assert "post-mortem" not in output
    records = read(tmp_path / "events")
    assert [record.words for record in records] == ["terminated"] * 2
    assert not any(faults.lives(record.pid) for record in records)
