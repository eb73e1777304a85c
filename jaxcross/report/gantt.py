"""The lanes over time as a picture: what ran beside what, and in a comparison, how much sooner it was done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxcross.report.table import seconds
from jaxcross.report.timeline import in_lane_order
from jaxcross.runtime.events import Span

if TYPE_CHECKING:
    from jaxcross.report.report import Report

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's palette: told apart by colour-blind readers too."""
QUIET = {"compile": "#B8B8B8", "input": "#DDDDDD", "vote": "#555555"}
INK, FAINT = "#222222", "#777777"
MOST_RANKS = 8
MOST_NAMES = 5
MOST_BARS = 300
"""Of one lane: more cannot be told apart, and would take minutes to draw."""


def draw(report: Report, path: Path, compare: Report | None = None) -> Path:
    """Writes the PNG. Needs no display; changes no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [run for run in (compare, report) if run is not None]
    rows = [_rows(run) for run in runs]
    colours = {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(j.name for r in runs for j in r.jobs))
    }
    heights = [len(r) * 0.34 + 0.55 for r in rows]
    figure = Figure(figsize=(13, sum(heights) + 1.75), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    length_s = max(_length_s(run) for run in runs)
    shown_s = min([length_s, *(_readable_s(run, lanes) for run, lanes in zip(runs, rows, strict=True))])
    for axis, run, lanes in zip(axes, runs, rows, strict=True):
        _panel(axis, run, lanes, colours, shown_s)
    cut = f" (the first {seconds(shown_s)} of {seconds(length_s)})" if shown_s < length_s else ""
    axes[-1].set_xlabel(f"seconds since the first step began{cut}", color=INK)
    axes[-1].set_xlim(0, shown_s * 1.005)
    total = sum(heights) + 1.75
    figure.subplots_adjust(
        left=0.105, right=0.985, top=1 - 1.0 / total, bottom=0.55 / total, hspace=0.55 / min(heights)
    )
    headline = _as_written(_headline(report, compare))
    figure.text(0.105, 1 - 0.12 / total, headline, fontsize=14, weight="bold", color=INK, va="top")
    figure.text(0.985, 1 - 0.15 / total, _as_written(report.link), fontsize=10, color=INK, va="top", ha="right")
    _legend(figure, colours, rows, 1 - 0.42 / total)
    figure.savefig(path)
    return path


def _as_written(text: str) -> str:
    """For matplotlib, which takes what stands between two `$` for mathematics."""
    return text.replace("$", r"\$")


def _headline(report: Report, compare: Report | None) -> str:
    if compare is None:
        return f"{report.policy or 'run'}: {seconds(report.rounds.s_per_step)} per job-step"
    return (
        f"{report.speedup(compare):.2f}x: {seconds(compare.rounds.s_per_step)} per job-step "
        f"({compare.policy}), {seconds(report.rounds.s_per_step)} ({report.policy})"
    )


Row = tuple[int, str, list[Span]]


def _rows(report: Report) -> list[Row]:
    """Rank, lane name and spans of each line of the panel."""
    spans = in_lane_order(report.spans)
    rows: list[Row] = []
    for rank in report.ranks[:MOST_RANKS]:
        own = [s for s in spans if s.rank == rank]
        waits = [s for s in own if s.kind in ("compile", "input")]
        lanes = sorted({s.lane for s in own if s.kind == "compute"} or {0})
        for lane in lanes:
            mine = [s for s in own if s.kind == "compute" and s.lane == lane]
            # waiting and compiling fill the gaps of the first compute lane
            rows.append((rank, _lane_name("compute", lane, lanes), waits + mine if lane == lanes[0] else mine))
        lanes = sorted({s.lane for s in own if s.kind in ("collective", "vote")} or {0})
        for lane in lanes:
            mine = [s for s in own if s.kind in ("collective", "vote") and s.lane == lane]
            rows.append((rank, _lane_name("exchange", lane, lanes), mine))
    return rows


def _lane_name(kind: str, lane: int, lanes: list[int]) -> str:
    return kind if len(lanes) == 1 else f"{kind} {lane}"


def _length_s(report: Report) -> float:
    begin, ends = _begin(report), [end for _, end in report.wall_ns.values()]
    return (max([*ends, *(s.end_ns for s in report.spans)], default=begin) - begin) / 1e9


def _begin(report: Report) -> int:
    """When the first step began. Of two runs only the first compiles: start-up would be no fair part of the picture."""
    work = [s.start_ns for s in report.spans if s.kind in ("compute", "collective")]
    return min(work or [start for start, _ in report.wall_ns.values()], default=0)


def _readable_s(report: Report, rows: list[Row]) -> float:
    """How far the busiest lane can be drawn with `MOST_BARS` pieces of work."""
    starts = [sorted(s.start_ns for s in spans if s.kind != "vote") for _, _, spans in rows]
    return min([(s[MOST_BARS] - _begin(report)) / 1e9 for s in starts if len(s) > MOST_BARS], default=float("inf"))


def _panel(axis: Any, run: Report, rows: list[Row], colours: dict[str, str], shown_s: float) -> None:
    begin = _begin(run)
    end = begin + shown_s * 1e9
    for y, (_, _, spans) in enumerate(rows):
        for kind in ("compile", "input", "compute", "collective", "vote"):
            for job in [*colours, *sorted({s.job for s in spans} - set(colours))]:
                pieces = [s for s in spans if s.kind == kind and s.job == job and s.end_ns > begin and s.start_ns < end]
                bars = [((s.start_ns - begin) / 1e9, (s.end_ns - s.start_ns) / 1e9) for s in pieces]
                if bars:
                    # votes wait in an idle lane: a thin line, so that they do not look like work
                    place = (y - 0.08, 0.16) if kind == "vote" else (y - 0.4, 0.8)
                    axis.broken_barh(bars, place, **_style(kind, colours.get(job, FAINT)))
    names = [f"rank {rank}  {lane}" for rank, lane, _ in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=9, color=INK)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    for y in range(1, len(rows)):
        if rows[y][0] != rows[y - 1][0]:
            axis.axhline(y - 0.5, color="#CCCCCC", lw=0.8)
    rounds = run.rounds
    note = (
        f"{run.policy or 'run'}   round {seconds(rounds.period_s)}, bound {seconds(rounds.bound_s)}, "
        f"{rounds.hidden_share:.0%} of exchange hidden"
    )
    start = min((begin_of_run for begin_of_run, _ in run.wall_ns.values()), default=begin)
    if begin - start >= 1e8:
        note += f"   (after {seconds((begin - start) / 1e9)} of start-up)"
    if len(run.ranks) > MOST_RANKS:
        note += f"   (first {MOST_RANKS} of {len(run.ranks)} ranks)"
    axis.set_title(_as_written(note), loc="left", fontsize=10.5, color=INK)
    axis.grid(axis="x", color="#E6E6E6", lw=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelcolor=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#BBBBBB")


def _style(kind: str, colour: str) -> dict[str, Any]:
    if kind == "compute":
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
    if kind == "collective":
        return {"facecolor": _pale(colour), "edgecolor": colour, "hatch": "////", "linewidth": 0.6}
    return {"facecolor": QUIET[kind], "edgecolor": "none"}


def _pale(colour: str) -> str:
    """The colour mixed with three parts of white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - c) // 4:02X}" for c in channels)


def _legend(figure: Any, colours: dict[str, str], rows: list[list[Row]], top: float) -> None:
    from matplotlib.patches import Patch

    kinds = {s.kind for panel in rows for _, _, spans in panel for s in spans}
    named = list(colours.items())[:MOST_NAMES]
    handles = [Patch(label=_as_written(name), facecolor=colour) for name, colour in named]
    words = {"compute": "compute", "collective": "exchange", "compile": "compiling"}
    words |= {"input": "waiting for a batch", "vote": "vote"}
    handles += [Patch(label=word, **_style(kind, FAINT)) for kind, word in words.items() if kind in kinds]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.098, top), ncols=len(handles), frameon=False,
        fontsize=9, handlelength=2.2, columnspacing=1.6, borderaxespad=0.0,
    )  # fmt: skip
