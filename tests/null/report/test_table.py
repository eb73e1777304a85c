"""Tests what the table says about hand-written runs."""

from dataclasses import replace
from typing import Any

import pytest

from jaxcross.interleave.instrument import PARAMETER_SERVER, Span
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.report import JobSummary, Report
from jaxcross.report.units import number, seconds

S = 1_000_000_000


def steps_of(job: Any, steps: Any, *, begin=0.0, compute=1.0, exchange=1.0, first=1, every=None):
    spans = []
    for n in range(steps):
        start = begin + n * (every or compute + exchange)
        ends: Any = (
            ("compute", start, start + compute),
            ("collective", start + compute, start + compute + exchange),
        )
        spans += [
            Span(
                rank=0,
                job=job,
                step=first + n,
                segment=segment,
                kind=kind,
                lane=0,
                start_ns=round(low * S),
                end_ns=round(high * S),
                ready_ns=round(low * S),
            )
            for segment, (kind, low, high) in enumerate(ends)
        ]
    return spans


def report(spans, *jobs, **options):
    return Report.build(
        spans, jobs=jobs, start_ns=0, end_ns=max(s.end_ns for s in spans), **options
    )


def cells(text, first):
    """Returns the cells of the row that starts with this text."""
    (line,) = [line for line in str(text).splitlines() if line.startswith(f"│ {first} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_jobs_that_never_ran_together_get_no_round():
    spans = [*steps_of("a", 4), *steps_of("b", 4, begin=12)]
    text = str(
        report(
            spans,
            JobSummary(name="a", steps=4),
            JobSummary(name="b", steps=4),
            policy="round-robin",
        )
    )
    assert "Never in steady state together: at least two jobs were at work in 0% of the run" in text
    assert not any(word in text for word in ("Round", "bound", "efficiency", "Lost"))
    assert cells(text, "a") == ["a", "4", "0.500", "1.00 s", "1.00 s", "0%"]
    assert cells(text, "all 2") == ["all 2", "8", "-", "-", "-", "-"]


def test_jobs_run_in_turn_on_purpose_have_a_round():
    spans = [*steps_of("a", 4), *steps_of("b", 4, begin=12)]
    text = str(
        report(
            spans, JobSummary(name="a", steps=4), JobSummary(name="b", steps=4), policy="sequential"
        )
    )
    assert "Round 4.00 s (one step of every job), bound 2.00 s" in text
    assert "One job after the other: rates of a row are while that job ran" in text


def test_a_job_that_resumed_is_at_its_own_step():
    spans = steps_of("a", 4, first=705)
    facts = JobSummary(name="a", steps=4, first_step=704, how="stopped")
    text = str(report(spans, facts))
    assert cells(text, "a")[1] == "4 (705 to 708)"
    assert "stopped at 708" in text
    assert "a: resumed after step 704." in text
    (job,) = report(spans, facts).summary()["jobs"]
    assert (job["steps"], job["first_step"], job["last_step"]) == (4, 704, 708)


def test_previously_ended_job_has_no_step_range():
    spans = steps_of("a", 4, first=21)
    text = str(
        report(
            spans,
            JobSummary(name="a", steps=4, first_step=20),
            JobSummary(name="b", steps=0, first_step=10),
        )
    )
    assert cells(text, "b")[1] == "0"
    assert "b: resumed after step 10, and made no steps in this run." in text


@pytest.mark.parametrize(("begin", "warned"), [(2.0, False), (200.0, True)])
def test_a_short_stretch_is_not_said_to_be_the_run(begin, warned):
    spans = [*steps_of("a", 4, begin=begin), *steps_of("b", 4, begin=begin + 1)]
    text = str(report(spans, JobSummary(name="a", steps=4), JobSummary(name="b", steps=4)))
    assert ("may not be representative" in text) == warned
    assert ("Run 209.00 s: 2% of it measured, 202.00 s start-up and winding up." in text) == warned


def test_rows_add_up_to_the_last_one():
    """b continues alone, twice as fast. c never completes a step."""
    spans = [
        *steps_of("a", 6),
        *steps_of("b", 6, begin=1),
        *steps_of("b", 9, begin=20, compute=0.5, first=7),
    ]
    spans += steps_of("c", 1, begin=3)[:1]
    jobs = [
        JobSummary(name=name, steps=n, examples_per_step=8)
        for name, n in (("a", 6), ("b", 15), ("c", 1))
    ]
    text = str(report(spans, *jobs))
    assert cells(text, "a")[2:5] == cells(text, "b")[2:5] == ["0.500", "4.00", "1.00 s"]
    assert cells(text, "c") == ["c", "1", "-", "-", "-", "-", "-"]
    assert cells(text, "all 3") == ["all 3", "22", "1.00", "8.00", "2.00 s", "2.00 s", "100%"]
    assert "c: no part in the round, which needs two steps." in text


@pytest.mark.parametrize(
    ("units", "heading", "total"),
    [
        (("images", "images"), "images/s", "8.00"),
        (("letters", "images"), "examples/s", "-"),
        ((), "examples/s", "8.00"),
    ],
)
def test_only_images_are_called_so(units, heading, total):
    spans = [*steps_of("a", 6), *steps_of("b", 6, begin=1)]
    units = units or ("examples", "examples")
    jobs = [
        JobSummary(name=n, steps=6, examples_per_step=8, unit=unit)
        for n, unit in zip("ab", units, strict=True)
    ]
    text = str(report(spans, *jobs))
    assert heading in text.splitlines()[2]
    assert cells(text, "all 2")[3] == total


def test_jobs_too_small_to_gain_are_named():
    """Each job's 6 ms step waits 4 ms for votes."""
    spans = []
    for n in range(6):
        for j, job in enumerate("ab"):
            at = 0.02 * n + 0.01 * j
            spans += steps_of(job, 1, begin=at, compute=0.003, exchange=0.003, first=n + 1)
            vote = Span(
                rank=0,
                job="",
                step=0,
                segment=-1,
                kind="vote",
                lane=0,
                start_ns=round((at + 0.006) * S),
                end_ns=round((at + 0.01) * S),
                ready_ns=round((at + 0.006) * S),
            )
            spans.append(vote)
    text = str(report(spans, JobSummary(name="a", steps=6), JobSummary(name="b", steps=6)))
    assert "Too small to gain: 4.00 ms of votes on a 6.00 ms step." in text
    quiet = [span for span in spans if span.kind != "vote"]
    assert "Too small" not in str(
        report(quiet, JobSummary(name="a", steps=6), JobSummary(name="b", steps=6))
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.71e-5, "17.1 us"),
        (3e-9, "3.00 ns"),
        (0.004, "4.00 ms"),
        (0.123, "123 ms"),
        (0.9999, "1.00 s"),
        (1.5, "1.50 s"),
        (3599, "3599.00 s"),
        (None, "-"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_durations_have_the_unit_that_fits(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.5, "0.500"), (12.3456, "12.35"), (1e9, "1.00e+09")]
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_share_of_the_run_other_than_none_is_stated():
    """Job a runs from 0 to 8 s, and job b from 7 to 15 s. So they share 1 s of 15 s."""
    spans = [*steps_of("a", 4), *steps_of("b", 4, begin=7)]
    text = str(
        report(
            spans,
            JobSummary(name="a", steps=4),
            JobSummary(name="b", steps=4),
            policy="round-robin",
        )
    )
    assert "Never in steady state together: at least two jobs were at work in 7% of the run" in text


def test_a_round_of_two_says_why_a_third_has_no_part():
    spans = [*steps_of("c", 4), *steps_of("a", 8, begin=20), *steps_of("b", 8, begin=21)]
    text = str(
        report(
            spans, *(JobSummary(name=name, steps=n) for name, n in (("a", 8), ("b", 8), ("c", 4)))
        )
    )
    assert "Round 2.00 s (one step of each job in it)" in text
    assert (
        "c: no part in the round, as it was hardly or never in steady state together with the "
        "others." in text
    )
    assert cells(text, "c") == ["c", "4", "-", "-", "-", "-"]


def test_jobs_of_parameter_servers_have_no_efficiency():
    spans = [replace(s, lane=1, label=PARAMETER_SERVER) for s in steps_of("a", 4)]
    text = str(report(spans, JobSummary(name="a", steps=4)))
    assert "Round 2.00 s (one step of every job), no bound: " in text
    assert "parameter server" in text
    assert not any(word in text for word in ("efficiency", "Lost", "The bound takes"))


def test_steps_without_spans_are_reported_as_uncounted():
    """The job uses a plain `jax.jit`. It's tested alone and along with another job."""
    plain = JobSummary(
        name="plain", steps=0, replicas="differ after batch 30, first `w` on ranks 0 and 1"
    )
    line = "plain: 0 steps: only those of `crossover` and of a parameter server are counted."
    assert line in str(report(steps_of("a", 4), plain, JobSummary(name="a", steps=4)))
    assert line in str(Report.build([], jobs=[plain], start_ns=0, end_ns=S))
    assert "steps of `crossover`" not in str(
        report(steps_of("a", 4), JobSummary(name="a", steps=4))
    )


def test_other_exchanging_calls_are_not_called_steps():
    """If a job evaluates before its first training step, its evaluations count as its steps."""
    spans = [*steps_of("a", 4), *steps_of("b", 4)]
    spans += [
        replace(s, step=4, other_calls=1, in_step=False, nbytes=9)
        for s in steps_of("a", 1, begin=9)
    ]
    table = str(report(spans, JobSummary(name="a", steps=4), JobSummary(name="b", steps=4)))
    assert (
        "a: its steps are the calls of the first function that exchanges, not counted are 1 of "
        "others." in table
    )
    assert "b: its steps" not in table


def test_the_input_row_names_the_level_that_waited():
    """The job waits for 1 s before each step, because its next batch isn't ready.

    For four of five batches, that's because a data cache has to read them from the origin. The
    fifth was still being decoded.
    """
    spans = steps_of("a", 6, every=3.0)
    waits = [
        Span(
            rank=0,
            job="a",
            step=n,
            segment=-1,
            kind="input",
            lane=0,
            start_ns=round((3 * n - 1) * S),
            end_ns=3 * n * S,
            ready_ns=round((3 * n - 1) * S),
            label="" if n == 3 else "origin",
        )
        for n in range(1, 6)
    ]
    made = report([*spans, *waits], JobSummary(name="a", steps=6))
    assert made.rounds.input_share == {"origin": 0.8}
    assert (
        "input        1.00 s  a job waited for its next batch, 80% of it from the level `origin`\n"
        in str(made)
    )
    plain = report(
        [*spans, *(replace(wait, label="") for wait in waits)], JobSummary(name="a", steps=6)
    )
    assert plain.rounds.input_share == {}
    assert "a job waited for its next batch\n" in str(plain)


@pytest.mark.parametrize("carried", [True, False])
def test_a_carried_exchange_is_named(carried):
    """The report says which jobs exchange the results of the previous step."""
    graph = StepGraph(
        kinds=("compute", "collective", "compute"),
        needs=((), (), (0, 1)),
        carried=frozenset({1} if carried else ()),
    )
    facts = JobSummary(
        name="a", steps=4, program={"graph": graph.as_data(), "steps": 4, "memory": None}
    )
    text = report(steps_of("a", 4), facts)
    line = "a: the exchange is carried, that of a step runs while the next one computes."
    assert facts.is_carried == carried and (line in str(text).splitlines()) == carried
