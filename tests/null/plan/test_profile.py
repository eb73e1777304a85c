"""Tests profiles and contention as data: what we write can be read back, and anything else is
refused.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.interleave.contention import Contention
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.jobs.memory import JobMemory
from jaxcross.plan.machine_contention import TWO_CORES, MachineContention
from jaxcross.plan.twin import predict
from jaxcross.report import JobSummary, Report
from jaxcross.step.profile import MAX_FILE_BYTES, Profile

GRAPH = StepGraph(
    kinds=("compute", "collective", "compute"),
    needs=((), (0,), (0, 1)),
    after_commit=frozenset({2}),
    nbytes=(0, 64, 0),
)
PROFILE = Profile(
    name="resnet",
    graph=GRAPH,
    seconds=(0.1, 1 / 3, 1e-9),
    host_s=0.25,
    ranks=4,
    link="lab",
    mbps=500,
    memory=JobMemory(peak_bytes=9, boundary_bytes=8, exchange_temporary_bytes=1),
)


def test_a_profile_is_read_back(tmp_path: Path) -> None:
    assert Profile.load(PROFILE.to_json(tmp_path / "p.json")) == PROFILE


def test_compute_and_exchange_are_sums() -> None:
    assert (PROFILE.compute_s, PROFILE.exchange_s) == (0.1 + 1e-9, 1 / 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 1"),
        ({"graph": []}, "a step graph must have the lists"),
        ({"seconds": [1.0, 2.0]}, "3 segments and 2 times"),
        ({"seconds": [1.0, 2.0, "3"]}, r"expected `float`, got `str` at `seconds\[2\]`"),
        ({"ranks": True}, "expected `int`, got `bool` at `ranks`"),
        ({"ranks": 0}, "`ranks` of `resnet` must be from 1"),
        ({"host_s": -1.0}, "`host_s` of `resnet` must be finite and not negative, got -1.0"),
        (
            {"memory": {"peak_bytes": 9}},
            "the keys peak_bytes, boundary_bytes, exchange_temporary_bytes",
        ),
        ({"memory": [9, 8, 1]}, r"the memory of a job must be a dict .*, got \[9, 8, 1\]"),
        ({"ranks": 10**400}, "`ranks` of `resnet` must be from 1"),
        ({"host_s": float("nan")}, "`host_s` of `resnet` must be finite"),
        ({"name": None}, "expected `str`, got `null` at `name`"),
        ({"link": ...}, "`link` is missing"),
    ],
)
def test_another_content_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = {
        key: value for key, value in {**PROFILE.as_data(), **change}.items() if value is not ...
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"`.*p\.json` is not a profile of jaxcross: .*{message}"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kinds", [], "1 to 10000 entries, one for each segment, got 0"),
        ("kinds", ["compute", "send", "compute"], "`compute` or `collective`"),
        ("needs", [[], [0], [5]], "can only need earlier segments"),
        ("needs", [[], [0], [True]], "whole numbers"),
        ("needs", [[], [0], 1], "a list of segment numbers"),
        ("needs", [[], [0]], "`needs` must have one entry for each of the 3 segments, got 2"),
        ("nbytes", [0, -1, 0], "whole numbers from 0 .*, got -1"),
        ("nbytes", [0], "each of the 3 segments, got 1 entries"),
        ("after_commit", [3], "segment numbers, which are below 3 here, got 3"),
        ("after_commit", [1], "waits for the commit"),
        ("carried", [0, 1], r"the exchange segments \[1\], got \[0, 1\]"),
        ("carried", [-1], "whole numbers from 0 .*, got -1"),
        ("carried", 1, "but `carried` is missing or not a list"),
        ("local_step", 0, "true or false"),
        ("local_step", True, "`local_step` must be false"),
    ],
)
def test_another_graph_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepGraph.from_data({**GRAPH.as_data(), key: value})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": 1}, TypeError, "`name` of a profile must be a text, got 1"),
        ({"graph": {}}, TypeError, "`graph` of `resnet` must be a `StepGraph`, got {}"),
        ({"seconds": 1.0}, TypeError, "`seconds` of `resnet` must be numbers, got 1.0"),
        ({"seconds": (1, 2, "3")}, TypeError, "`seconds` of `resnet` must be numbers"),
        ({"seconds": (1, 2, -3)}, ValueError, "`seconds` of `resnet` must be finite and not neg"),
        ({"host_s": "1"}, TypeError, "`host_s` of `resnet` must be a number, got '1'"),
        ({"ranks": 1.5}, TypeError, "`ranks` of `resnet` must be a whole number, got 1.5"),
        ({"ranks": True}, TypeError, "`ranks` of `resnet` must be a whole number, got True"),
        ({"link": None}, TypeError, "`link` of `resnet` must be a text, got None"),
        ({"mbps": -1}, ValueError, "`mbps` of `resnet` must be finite and not negative, got -1"),
        ({"memory": 9}, TypeError, "`memory` of `resnet` must be a `JobMemory` or None, got 9"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(PROFILE, **change)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="more than 10000000 bytes"):
        Profile.load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(list(PROFILE.as_data())), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(list(PROFILE.as_data())), JSON))
def test_random_content_is_refused_or_read(change: dict[str, Any]) -> None:
    """The only error is ValueError, whatever the file contains."""
    try:
        profile = Profile.from_data({**PROFILE.as_data(), **change})
    except ValueError:
        return
    assert Profile.from_data(profile.as_data()) == profile


def test_contention_is_linear_between_two_rates() -> None:
    there = MachineContention(
        measured=(
            (100, Contention(compute=1.0, exchange=1.2)),
            (300, Contention(compute=1.5, exchange=1.4)),
        )
    )
    middle = there.at(200)
    assert (middle.compute, middle.exchange) == (pytest.approx(1.25), pytest.approx(1.3))
    assert there.at(10) == Contention(compute=1.0, exchange=1.2)
    assert there.at(1e9) == Contention(compute=1.5, exchange=1.4)
    assert there.at(300) == Contention(compute=1.5, exchange=1.4)


def test_contention_is_read_back() -> None:
    assert MachineContention.from_json(json.loads(json.dumps(TWO_CORES.to_json()))) == TWO_CORES


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "contention must be measured at one or more rates"),
        ({}, "contention must be a list of points"),
        ([1], r"expected `object`, got `int` at `\[0\]`"),
        ([{"mbps": 1, "compute": 1}], "each point of a contention must have exactly"),
        (
            [{"mbps": 1, "compute": 1, "exchange": 1, "x": 1}],
            "each point of a contention must have",
        ),
        ([{"mbps": 1, "compute": "1", "exchange": 1}], r"expected `float`, got `str` at `\[0\]"),
        ([{"mbps": 1, "compute": True, "exchange": 1}], r"got `bool` at `\[0\]"),
        ([{"mbps": 1, "compute": 10**400, "exchange": 1}], r"out of range at `\[0\]"),
        ([{"mbps": 1, "compute": 0.9, "exchange": 1}], "`compute` of a contention must be"),
        ([{"mbps": 1, "compute": 1, "exchange": 1}] * 2, "ascending order"),
        ([{"mbps": 0, "compute": 1, "exchange": 1}], "ascending order"),
        ([{"mbps": float("nan"), "compute": 1, "exchange": 1}], "ascending order"),
        ([{"mbps": float("inf"), "compute": 1, "exchange": 1}], "ascending order"),
    ],
)
def test_other_contention_is_refused(points: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MachineContention.from_json(points)


@pytest.mark.parametrize("factor", [0.99, float("nan"), float("inf")])
def test_a_factor_of_contention_is_at_least_1(factor: float) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Contention(compute=factor)


def _report(
    profile: Profile, *, steps: int = 8, ran: int | None = None, others: tuple[str, ...] = ()
) -> Report:
    """Returns the report of a run of the job, made by the twin."""
    spans = predict([profile], steps=steps, vote_s=0.0).spans
    program = {"graph": profile.graph.as_data(), "steps": steps if ran is None else ran}
    program["memory"] = asdict(profile.memory or JobMemory())
    jobs = [JobSummary(name=profile.name, steps=steps, program=program)]
    jobs += [JobSummary(name=name, steps=0) for name in others]
    return Report(
        spans=spans, jobs=tuple(jobs), wall_ns={0: (0, 1)}, policy="round-robin", link="lab"
    )


def test_the_profile_of_a_run_is_what_it_took(tmp_path: Path) -> None:
    graph = StepGraph(
        kinds=("compute", "collective", "compute", "collective", "compute"),
        needs=((), (0,), (0,), (2,), (1, 3)),
        after_commit=frozenset({4}),
        nbytes=(0, 8, 0, 8, 0),
    )
    memory = JobMemory(peak_bytes=7)
    made = Profile(
        name="a",
        graph=graph,
        seconds=(0.1, 0.2, 0.3, 0.4, 0.05),
        host_s=0.02,
        link="lab",
        memory=memory,
    )
    report = Report.load(_report(made).to_json(tmp_path / "report.json"))
    found = Profile.of(report, "a")
    assert found.seconds == pytest.approx(made.seconds, abs=1e-6)
    assert found.host_s == pytest.approx(made.host_s, abs=1e-6)
    assert (found.graph, found.memory, found.link) == (made.graph, memory, "lab")


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({}, "b", "no job `b`; its jobs are resnet"),
        ({"others": ("b",)}, "resnet", "ran alongside other jobs"),
        ({"others": ("b",)}, "b", "ran alongside other jobs"),
        ({"steps": 2}, "resnet", "fewer than 3 whole steps"),
        ({"ran": 5}, "resnet", "several programs"),
    ],
)
def test_a_run_that_is_no_profile_is_an_error(
    options: dict[str, Any], name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Profile.of(_report(PROFILE, **options), name)
