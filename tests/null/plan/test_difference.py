"""Compares runs with their predictions: each cause lands in its own part, and the parts add up
exactly.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcross
import jaxcross.plan
from jaxcross.interleave.contention import Contention
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.plan.difference import PARTS, Difference
from jaxcross.plan.twin import Prediction, predict
from jaxcross.report import JobSummary, Report
from jaxcross.step.profile import Profile
from tests.support.examples import scaled

VOTE_S = 1e-5
JOBS = (
    replace(Profile.whole("a", compute_s=0.10, exchange_s=0.06), host_s=0.002),
    replace(Profile.whole("b", compute_s=0.07, exchange_s=0.08), host_s=0.001),
)
MILD = Contention(compute=1.1, exchange=1.05)
IN_TWO = StepGraph(
    kinds=("compute", "collective", "compute", "collective", "compute"),
    needs=((), (0,), (0,), (2,), (1, 3)),
    after_commit=frozenset({4}),
)


def _twin(jobs: tuple[Profile, ...] = JOBS, **options: Any) -> Prediction:
    return predict(
        jobs, **{"contention": MILD, "vote_s": VOTE_S, "steps": [12] * len(jobs), **options}
    )


def _report(made: Prediction, **changes: Any) -> Report:
    """Returns the report of a run that went exactly as predicted."""
    jobs = tuple(JobSummary(name=job.facts.name, steps=job.facts.steps) for job in made.rounds.jobs)
    options: dict[str, Any] = {
        "policy": "round-robin",
        "wall_ns": {0: (0, round(made.wall_s * 1e9))},
        **changes,
    }
    return Report(spans=made.spans, jobs=jobs, **options)


def _scaled(job: Profile, kind: str, factor: float) -> Profile:
    pairs = zip(job.seconds, job.graph.kinds, strict=True)
    return replace(job, seconds=tuple(s * factor if own == kind else s for s, own in pairs))


def _adds_up(found: Difference) -> None:
    assert found.predicted_ns + sum(found.parts_ns.values()) == found.achieved_ns
    assert found.parts_ns.keys() == PARTS.keys()
    assert all(length >= 0 for part, length in found.parts_ns.items() if part != "unexplained")


def test_a_twin_is_as_it_predicts_itself() -> None:
    found = _report(_twin()).against(_twin())
    _adds_up(found)
    assert not any(found.parts_ns.values())
    assert "Achieved 100% of the predicted speed" in str(found)


def test_a_planned_group_is_as_planned() -> None:
    plan = jaxcross.plan.make(JOBS, contention=MILD)
    twin = jaxcross.plan.predict_group(plan.group_of("a"), JOBS, contention=MILD)
    found = twin.report.against(twin)
    _adds_up(found)
    assert not any(found.parts_ns.values())


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("computation", {"jobs": tuple(_scaled(job, "compute", 1.2) for job in JOBS)}),
        ("computation", {"jobs": (_scaled(JOBS[0], "compute", 1.3), JOBS[1])}),
        ("exchange", {"jobs": tuple(_scaled(job, "collective", 1.5) for job in JOBS)}),
        ("host", {"jobs": tuple(replace(job, host_s=job.host_s + 0.15) for job in JOBS)}),
        ("contention", {"contention": Contention(compute=1.4, exchange=1.2)}),
        ("contention", {"contention": Contention(compute=1.4, exchange=1.05)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cause_lands_in_its_own_part(part: str, changes: dict[str, Any]) -> None:
    """The part gets at least nine tenths of the extra time per round."""
    found = _report(_twin(**changes)).against(_twin())
    _adds_up(found)
    longer = found.achieved_ns - found.predicted_ns
    assert longer > 0.02 * found.predicted_ns
    assert found.parts_ns[part] >= 0.9 * longer, found.parts_ns
    assert f" {part} " in str(found)


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("votes", "votes"),
        ("peers", "peer"),
        ("peers", "imbalance"),
        ("dispatch", "dispatch"),
        ("input", "input"),
    ],
)
def test_what_the_report_lost_lands_in_its_part(part: str, cause: str) -> None:
    """A round is 10 ms longer, and the report attributes 15 ms or 4 ms of loss to this cause."""
    for lost_s, found_ns in ((0.015, 10_000_000), (0.004, 4_000_000)):
        report = _report(_twin())
        rounds, period_s = report.rounds, (report.rounds.period_s or 0.0) + 0.01
        lost = {**rounds.lost_s, cause: rounds.lost_s[cause] + lost_s}
        object.__setattr__(report, "rounds", replace(rounds, period_s=period_s, lost_s=lost))
        found = report.against(_twin())
        _adds_up(found)
        assert found.parts_ns[part] == pytest.approx(found_ns, abs=2)
        assert found.parts_ns[part] + found.parts_ns["unexplained"] == pytest.approx(
            10_000_000, abs=2
        )


def test_a_faster_run_has_no_negative_part() -> None:
    found = _report(_twin(tuple(_scaled(job, "compute", 0.8) for job in JOBS))).against(_twin())
    _adds_up(found)
    assert found.achieved_ns - found.predicted_ns == found.parts_ns["unexplained"] < 0


_FACTOR = st.floats(0.7, 2.0)


@settings(max_examples=scaled(30), deadline=None)
@given(
    factors=st.lists(
        st.tuples(_FACTOR, _FACTOR, st.floats(0, 0.1), st.booleans()), min_size=1, max_size=3
    ),
    contention=st.tuples(st.floats(1, 1.5), st.floats(1, 1.5)),
    vote_s=st.floats(0, 0.05),
)
def test_the_parts_add_up(
    factors: list[Any], contention: tuple[float, float], vote_s: float
) -> None:
    jobs, there = [], []
    for number, (compute, exchange, host_s, cut) in enumerate(factors):
        job = replace(JOBS[0], name=f"job{number}")
        if cut:
            job = replace(job, graph=IN_TWO, seconds=(0.05, 0.03, 0.04, 0.03, 0.01))
        jobs.append(job)
        there.append(
            replace(
                _scaled(_scaled(job, "compute", compute), "collective", exchange), host_s=host_s
            )
        )
    both = Contention(compute=contention[0], exchange=contention[1])
    run = _twin(tuple(there), contention=both, vote_s=vote_s)
    if run.rounds.period_s is not None:
        _adds_up(_report(run).against(_twin(tuple(jobs))))


@pytest.mark.parametrize(
    ("jobs", "changes", "message"),
    [
        (JOBS[:1], {}, "the jobs a, but the run had the jobs a, b"),
        (JOBS, {"policy": "sequential"}, "policy round-robin, but the run had sequential"),
        (
            (JOBS[0], replace(JOBS[1], graph=IN_TWO, seconds=(0.1,) * 5)),
            {},
            "step was cut differently",
        ),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    jobs: tuple[Profile, ...], changes: dict[str, Any], message: str
) -> None:
    report = _report(_twin(), **changes)
    program = {"graph": JOBS[1].graph.as_data()}
    object.__setattr__(report, "jobs", tuple(replace(job, program=program) for job in report.jobs))
    with pytest.raises(ValueError, match=message):
        report.against(_twin(jobs))


def test_a_run_without_a_round_cannot_be_compared() -> None:
    report = _report(_twin(steps=[2, 2], policy=jaxcross.RoundRobin()))
    if report.rounds.period_s is None:
        with pytest.raises(ValueError, match="the run has no round"):
            report.against(_twin())
