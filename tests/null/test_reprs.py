"""What a console or a notebook shows of a result that is not printed: a line, however long the run
was.
"""

from collections.abc import Callable
from typing import Any

import pytest

from jaxcross import plan
from jaxcross.plan.estimate import estimate_of
from jaxcross.plan.step_cost import StepCost
from jaxcross.report import Comparison, JobSummary, Report
from jaxcross.report.sweep import SweepResult
from jaxcross.report.sweep_trial import SweepTrial
from tests.support.fakes import plain_program
from tests.support.report_spans import S, span

STEPS = 300


def report(policy: str = "round-robin") -> Report:
    spans = [
        span(kind, job, step, 2 * step + shift, 2 * step + shift + 1, segment=shift)
        for step in range(STEPS)
        for job in "ab"
        for shift, kind in enumerate(("compute", "collective"))
    ]
    program = {"graph": profile("a").graph.as_data(), "steps": STEPS, "memory": {}}
    jobs = [
        JobSummary(name="a", steps=STEPS, program=program),
        JobSummary(name="b", steps=STEPS, program=program, how="failed", why="ValueError: boom"),
    ]
    return Report.build(spans, jobs=jobs, start_ns=0, end_ns=2 * STEPS * S, policy=policy)


def profile(name: str) -> plan.Profile:
    return plan.Profile.whole(name, compute_s=0.2, exchange_s=0.1, ranks=2).cut_evenly(40)


def sweep_result() -> SweepResult:
    trials = tuple(
        SweepTrial(
            number=n,
            name=f"trial{n}",
            params={"lr": n / 10},
            status="finished",
            step=STEPS,
            value=float(n),
            values=tuple((step, 1.0) for step in range(STEPS)),
        )
        for n in range(100)
    )
    return SweepResult(
        metric="error", mode="min", trials=trials, best=trials[0], reports=(report(),)
    )


RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "report": (
        report,
        (
            "<Report of 2 jobs (1 ended, 1 failed): 600 steps in 600.00 s on 1 rank; print() shows the "
            "table>"
        ),
    ),
    "sweep": (
        sweep_result,
        (
            "<Sweep of 100 trials by error (min): 100 finished. Best: lr 0, with error 0 after 300 "
            "steps; print() shows "
        ),
    ),
    "plan": (
        lambda: plan.make(
            [plan.Profile.whole(f"job{n}", compute_s=0.2, exchange_s=0.1) for n in range(4)]
        ),
        "<Plan of 4 jobs in ",
    ),
    "profile": (
        lambda: profile("a"),
        "<Profile of `a` on 2 ranks: 200 ms of computation and 100 ms of exchange in 81 segments>",
    ),
    "prediction": (
        lambda: plan.predict(
            [plan.Profile.whole(name, compute_s=0.2, exchange_s=0.1) for name in "ab"], steps=40
        ),
        "<Prediction of 2 jobs, round-robin: 80 steps in ",
    ),
    "estimate": (
        lambda: estimate_of(
            StepCost(whole=profile("step"), steps=4, wire_bytes=10**7, narrow_wire_bytes=10**6)
        ),
        "<Estimate of `step`: ",
    ),
    "comparison": (lambda: Comparison.of([report("sequential")], [report()]), "Comparison("),
    "facts": (lambda: report().jobs[0], "JobSummary(name='a', steps=300, "),
    "rounds": (lambda: report().rounds, "TimeBreakdown("),
    "program": (
        lambda: plain_program("step", exchanges=50),
        "<Program `step`: segments 51 compute, 50 collective; print() lists them>",
    ),
}


@pytest.mark.parametrize(("make", "begin"), RESULTS.values(), ids=RESULTS)
def test_a_result_is_shown_in_a_line(make: Callable[[], Any], begin: str) -> None:
    result = make()
    assert repr(result).startswith(begin)
    assert len(repr(result)) < 1000 and "\n" not in repr(result)
