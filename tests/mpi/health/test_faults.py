"""Every fault of one rank ends as the table says.

Every rank names the fault, and no checkpoint is damaged.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import faults  # pyright: ignore[reportMissingImports]

from jaxcross.report.event_files import read_event_files
from jaxcross.report.post_mortem import first_to_end
from tests.support.fault_scripts import HURT, START, WAIT

# One fault for each outcome: a job leaves, all ranks are terminated, all ranks stop.
USUAL = (("raise", "compile", 2), ("kill", "carried", 3), ("term", "vote", 2))
THREE = faults.Case(fault="kill", point="exchange", ranks=3)


@pytest.mark.integration
def test_faults_at_points(monkeypatch, quick_compiler):
    """Runs several cases at once, because they mostly wait.

    They get slack, because other tests may leave a rank little CPU time.
    """
    for name, value in quick_compiler.items():
        monkeypatch.setenv(name, value)
    cases = [
        faults.Case(fault=fault, point=point, ranks=ranks, slack=4) for fault, point, ranks in USUAL
    ]
    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(faults.run_case, cases))
    wrong = [
        f"{r.case.fault} at {r.case.point}: {r.problems}\n{r.output}" for r in results if r.problems
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.integration
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", [*faults.table(2), THREE], ids=lambda case: f"{case.fault}-{case.point}-{case.ranks}"
)
def test_every_fault_at_every_point(case):
    result = faults.run_case(case)
    assert result.problems == (), result.output


def test_the_check_finds_what_is_wrong():
    """Tests the table's own check, which must be able to fail."""
    kill, stops = (
        faults.Case(fault=fault, point="exchange", ranks=2) for fault in ("kill", "term")
    )
    leaves = faults.Case(fault="raise", point="compute", ranks=2)
    place = "job 'b', step 3, segment 1 (exchange)"
    good = f"jaxcross: rank 0 ends all ranks while in {place}, because rank 1 is gone"
    waited = f". Rank 0 waited in {place}."
    said = f"Rank 1 ended first, in {place}{waited}"
    assert list(faults.check(kill, 1, good, said)) == []
    assert len(list(faults.check(kill, 0, "", ""))) == 3
    for named, other in (
        ("job 'b'", "job 'a'"),
        ("step 3", "step 2"),
        (", segment 1", ""),
        (" (exchange)", ""),
    ):
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
    begin = "".join(
        f"rank {rank} begins job {job} after step 3\n" for rank in (0, 1) for job in "ab"
    )
    end = begin + "".join(
        f"rank {rank} ends: {{'a': (8, 36.0), 'b': (8, 72.0)}}\n" for rank in (0, 1)
    )
    assert (
        list(faults.check_restart(kill, 0, end, {}))
        == list(faults.check_restart(stops, 0, end, left))
        == []
    )
    assert len(list(faults.check_restart(kill, 0, end.replace("72.0", "71.0", 1), {}))) == 1
    assert len(list(faults.check_restart(kill, 1, "", {}))) == 4
    assert (
        len(
            list(
                faults.check_restart(stops, 0, end.replace("after step 3", "after step 2", 1), left)
            )
        )
        == 1
    )


def test_a_limit_tells_a_promise_from_the_watchdog():
    """A busy machine may be late, but a rank that waits for the watchdog is later still."""
    for case in faults.table(2):
        if case.outcome == "ends":
            assert faults.PROMISED_S[case.fault] < case.limit_s < faults.WATCHDOG_S


@pytest.mark.integration
def test_event_files_are_evidence_under_plain_mpirun(mpirun, tmp_path):
    code = START.format("heartbeat_timeout_s=5") + HURT.format("KILL") + WAIT
    done = mpirun(2, code, env={"JAXCROSS_EVENTS": str(tmp_path)})
    assert done.returncode != 0
    text = first_to_end(read_event_files(tmp_path))
    assert (
        text.startswith("Rank 1 ") and "Rank 0 waited in job 'a', step 3, segment 1 (psum)." in text
    )


ALONE = """
import jax.numpy as jnp, numpy as np
from jax import lax
from jaxcross import Runner, crossover, initialize
from jaxcross.program import stages
world = initialize(stall_timeout_s=120, heartbeat_timeout_s=0)
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
    return job.run_on_all_ranks(
        "mine", lambda control: control.allgather_text("x") if world.rank == 0 else 1 / 0
    )

def differs(job):
    job.nonfinite = "skip" if world.rank == 1 else "raise"
    return lucky(job.restore(0.0), 1.0)

def endless(job):
    w = job.restore(0.0)
    def over(control):
        return control.allreduce_min(np.array([all(other.done.is_set() for other in bad)]))[0]
    while not job.run_on_all_ranks("are they over?", over):
        pass
    for _ in range(3):
        w = lucky(w, 1.0)
    return w

runner = Runner(world)
bad = [runner.add(fn.__name__, fn) for fn in (compiles, reads, talks, differs)]
good = runner.add("good", endless)
try:
    runner.run()
except Exception as error:
    print(f"rank {world.rank}: {type(error).__name__}", flush=True)
for job in runner.jobs:
    print(f"rank {world.rank}: {job.name} {job.status}: {job.error or job.state}", flush=True)
"""


def test_job_failing_where_others_wait_leaves_alone(mpirun):
    """A job fails in its compiler, while its state is compared, or in a collective call.

    No rank waits for it, and the other jobs continue.
    """
    done = mpirun(2, ALONE).check()
    for rank in (0, 1):
        assert f"rank {rank}: JobError" in done.stdout
        assert f"rank {rank}: good ended: 6.0" in done.stdout
        for job, why in (
            ("compiles", "rank 1 .*MemoryError: no room"),
            ("reads", "[Rr]ank 1 .*deleted"),
            ("talks", "rank 1 .*ZeroDivisionError"),
            (
                "differs",
                "`raise` on rank 0, `skip` on rank 1",
            ),  # on both ranks, because the vote may come before either of them fails
        ):
            assert re.search(rf"rank {rank}: {job} failed: .*{why}", done.stdout), done.stdout
