"""The Gantt chart is drawn with and without a comparison, and without a display."""

from dataclasses import replace

import pytest

from jaxcross.interleave.instrument import Span
from jaxcross.report import JobSummary, Report

S = 1_000_000_000


def make(crossed, policy, *, ranks=2, steps=4, names="ab", link=""):
    spans = []
    for rank in range(ranks):
        for j, job in enumerate(names):
            for step in range(steps):
                t = 2 * step + j if crossed else 2 * (step + j * steps)
                common = {"rank": rank, "job": job, "step": step, "lane": 0}
                spans.append(
                    Span(
                        kind="compute",
                        segment=0,
                        start_ns=t * S,
                        end_ns=(t + 1) * S,
                        ready_ns=t * S,
                        **common,
                    )
                )
                times = {"start_ns": (t + 1) * S, "end_ns": (t + 2) * S, "ready_ns": (t + 1) * S}
                spans.append(Span(kind="collective", segment=1, **times, **common))
    jobs = tuple(JobSummary(name=name, steps=steps) for name in names)
    wall_ns = dict.fromkeys(range(ranks), (0, 17 * S))
    return Report(spans=tuple(spans), jobs=jobs, wall_ns=wall_ns, policy=policy, link=link)


def size_of(path):
    import matplotlib.image

    return matplotlib.image.imread(path).shape[:2]


@pytest.mark.integration
def test_both_runs_share_one_picture(tmp_path):
    crossover = make(True, "crossover")
    one = size_of(crossover.to_gantt(tmp_path / "one.png"))
    two = size_of(crossover.to_gantt(tmp_path / "two.png", compare=make(False, "sequential")))
    assert two[1] == one[1]
    assert two[0] > 1.4 * one[0]


def test_the_headline_states_the_speed_up():
    from jaxcross.report.gantt import _headline

    text = _headline(make(True, "crossover"), make(False, "sequential"))
    assert text == "2.00x: 2.00 s per job-step (sequential), 1.00 s (crossover)"


@pytest.mark.mostly_integration("1")
@pytest.mark.parametrize("ranks", [1, 12])
def test_many_ranks_and_one(tmp_path, ranks):
    from jaxcross.report.gantt import _rows

    report = make(True, "crossover", ranks=ranks)
    assert len(_rows(report)) == 2 * min(ranks, 8)
    assert report.to_gantt(tmp_path / "x.png").stat().st_size > 1000


def test_a_long_run_is_drawn_as_far_as_it_can_be_read():
    from jaxcross.report.gantt import _rows, _shown_s, _steady_begin

    def shown(report):
        begin = _steady_begin(report)
        return begin / S, _shown_s([(report, _rows(report), begin)])

    # Starts when b's first step ends. The lane has two computes every 2 s, so the 301st starts 300
    # s later.
    assert shown(make(True, "crossover", ranks=1, steps=1000)) == (3.0, 300.0)
    assert shown(make(True, "crossover", ranks=1, steps=8)) == (3.0, 14.0)


def test_dollars_are_no_mathematics(tmp_path):
    name = r"n=$x^$"
    report = make(True, name, names=(name, r"a\$b", "_$\\alpha$"), link=name)
    assert report.to_gantt(tmp_path / "x.png", compare=report).stat().st_size > 1000


@pytest.mark.parametrize("text", ["n=$x^$", r"a\$b", r"\alpha", "$", r"$\$$"])
def test_texts_are_drawn_as_written(text):
    from matplotlib.text import Text

    from jaxcross.report.gantt import _as_written

    shown = Text(text=_as_written(text))
    assert shown._preprocess_math(shown.get_text()) == (text, False)


def test_the_chart_begins_at_the_steady_state():
    from jaxcross.report.gantt import _steady_begin

    crossed, sequential = make(True, "crossover"), make(False, "sequential")
    # The latest end of a first step, or the first job's if jobs run one after another.
    assert (_steady_begin(crossed), _steady_begin(sequential)) == (3 * S, 2 * S)
    # A job that comes later and isn't in the round doesn't count.
    late = [replace(s, job="late") for s in make(True, "x", names="a", steps=2).spans]
    later = [replace(s, start_ns=s.start_ns + 13 * S, end_ns=s.end_ns + 13 * S) for s in late]
    three = replace(
        crossed,
        spans=(*crossed.spans, *later),
        jobs=(*crossed.jobs, JobSummary(name="late", steps=2)),
    )
    assert [job.facts.name for job in three.rounds.crossed] == ["a", "b"]
    assert _steady_begin(three) == 3 * S
    apart = make(False, "round-robin")
    assert apart.rounds.period_s is None
    assert _steady_begin(apart) == 2 * S


def test_run_without_a_round_claims_no_steady_state():
    from jaxcross.report.gantt import _headline, _since

    apart = make(False, "round-robin")
    assert _headline(apart, None) == "round-robin: never in steady state together"
    assert _since([apart]) == "a first step ended"
    assert _since([make(True, "crossover")]) == "the jobs were in steady state"
    assert _headline(make(True, "x", steps=1), None) == "x: no steady state"
    assert _since([make(True, "x", steps=1)]) == "the first step"
    assert _since([make(True, "x", steps=0)]) == "the run began"


@pytest.mark.mostly_integration("1", "2")
@pytest.mark.parametrize("jobs", [1, 2, 5, 9])
def test_the_legend_is_within_the_picture(tmp_path, monkeypatch, jobs):
    from matplotlib.figure import Figure

    boxes, legend = [], Figure.legend

    def watched(figure, **options):
        made = legend(figure, **options)
        boxes.append(
            (
                made.get_window_extent(),
                figure.bbox.width,
                [text.get_text() for text in made.get_texts()],
            )
        )
        return made

    monkeypatch.setattr(Figure, "legend", watched)
    names = [
        f"a job with a name that is long, {n}" + " and longer" * (jobs == 1) * 19
        for n in range(jobs)
    ]
    report = make(True, "x", names=names)
    rest = [replace(report.spans[0], kind=kind) for kind in ("compile", "input", "vote")]
    replace(report, spans=(*report.spans, *rest)).to_gantt(tmp_path / "x.png")
    assert all(box.x1 <= width for box, width, _ in boxes)
    assert len(boxes) == (1 if jobs == 2 else 2)
    texts = boxes[0][2]
    assert texts[0].startswith("a job") and len(set(texts)) == len(texts)
    assert ("and 4 more" in texts) == (jobs == 9)


def test_a_window_is_drawn_as_asked(tmp_path):
    report = make(True, "crossover")
    path = report.to_gantt(tmp_path / "x.png", window=(0.0, 17.0))
    assert path.read_bytes() != report.to_gantt(tmp_path / "y.png").read_bytes()
    with pytest.raises(ValueError, match="must end after it begins"):
        report.to_gantt(tmp_path / "z.png", window=(3.0, 3.0))


@pytest.mark.integration
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_what_is_thinner_than_a_pixel_is_a_tint(tmp_path, share):
    """Draws 17,000 steps in one second: ten in each of the 1,700 columns of the axis."""
    import matplotlib.image
    import numpy as np

    steps = 17_000
    every = S // steps
    spans = [
        Span(
            rank=0, job="a", step=n + 1, segment=0, kind="compute", lane=0, start_ns=n * every,
            end_ns=n * every + round(every * share), ready_ns=n * every,
        )
        for n in range(steps)
    ]  # fmt: skip
    report = Report(
        spans=tuple(spans), jobs=(JobSummary(name="a", steps=steps),), wall_ns={0: (0, S)}
    )
    picture = matplotlib.image.imread(report.to_gantt(tmp_path / "x.png", window=(0.0, 1.0)))[
        ..., :3
    ]
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    tinted = np.abs(picture - (1 - max(share, 0.15) * (1 - blue))).max(axis=-1) < 0.02
    whole = (
        tinted.mean(axis=1) > 0.85
    )  # picture rows that have the tint from the axis's left to its right
    assert whole.sum() > 20
