"""Draws a run's lanes over time, as a PNG.

The picture shows which work overlapped. A lane does one thing at a time: compute lanes run on the
device, exchange lanes use the network. Every lane of every rank gets a row, and each job has its
own colour. When comparing two runs, we draw them one above the other on the same time axis, so you
can see at a glance how much time the second run saved.

The hard part is that a run has far more segments (individual computations and exchanges) than the
picture has pixels. Drawing them all as bars would keep matplotlib busy for minutes, and the edges
of the bars would hide everything else. So most of this module is about what to leave out or
simplify:

- The picture starts once the jobs are in steady state. Otherwise it would mostly show compilation.
- It stops before any lane has more than `MOST_BARS` bars.
- Bars narrower than `EDGED` pixels are drawn without an edge or a pattern, since these would cover
  up the bar's colour.
- Segments shorter than a pixel aren't drawn as bars at all. Instead, we tint each pixel column
  according to how much work it contains (`_Tint`). Simply leaving these segments out would make a
  lane that's constantly busy with short segments look idle, while drawing each of them one pixel
  wide would make an almost idle lane look busy.
- Only the first `MOST_RANKS` ranks are shown.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcross.errors import require_extra
from jaxcross.interleave import Span
from jaxcross.report.compare import Comparison
from jaxcross.report.timeline import Timeline, in_lane_order
from jaxcross.report.units import seconds, share

if TYPE_CHECKING:
    from jaxcross.report.report import Report

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's palette, whose colours can be told apart by colour-blind readers as well."""
QUIET = {"compile": "#B8B8B8", "input": "#DDDDDD", "vote": "#555555"}
INK = "#222222"
FAINT = "#777777"
MOST_RANKS = 8
MOST_NAMES = 5
LINE_CHARACTERS = 160
"""How many characters fit on a line of the legend. Anything longer would be cut off at the edge of
the picture.
"""
MARK_CHARACTERS = 7
"""Width of a colour mark in the legend, in characters."""
EDGED = 8
"""Minimum width of a bar to be drawn with an edge and a pattern, in pixels. The edge of a narrower
bar would hide everything else.
"""
_PIXELS = 1700
"""Width of the picture's axes, in pixels."""
_PALEST = 0.15
"""Minimum tint of a pixel column that contains any work. Anything paler would look empty."""
MOST_BARS = 300
"""Maximum number of bars per lane. Any more can't be told apart, and take minutes to draw."""


def draw_gantt(
    report: Report,
    path: Path,
    compare: Report | None = None,
    *,
    window: tuple[float, float] | None = None,
    headline: str | None = None,
) -> Path:
    """Writes the PNG. Needs no display, and leaves matplotlib's global state alone.

    Args:
        report: The run.
        path: Where to write the PNG.
        compare: A run to draw above `report`, on the same time axis.
        window: Start and end of the picture, in seconds since the run began. By default, the
            picture starts once the jobs are in steady state, and is short enough to tell individual
            segments apart.
        headline: Text at the top. By default, states the speed-up of `report` over `compare`.

    Raises:
        ValueError: `window` doesn't end after it begins.
        MissingExtraError: matplotlib is not installed.
    """
    require_extra("plot", "a picture of a run", "matplotlib")
    # Create the figure and its canvas by hand. `pyplot` would be shorter, but it picks a backend,
    # which may need a display, and keeps figures and settings in global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if window is not None and not window[0] < window[1]:
        raise ValueError(f"`window` must end after it begins, got {window}")
    runs = [run for run in (compare, report) if run is not None]
    begins = [
        _run_begin(run) + round(window[0] * 1e9) if window else _steady_begin(run) for run in runs
    ]
    rows = [_rows(run) for run in runs]
    colours = {
        name: COLOURS[i % len(COLOURS)]
        for i, name in enumerate(dict.fromkeys(j.name for r in runs for j in r.jobs))
    }
    # Rows should be equally tall (in inches) in every picture, so the figure grows with the number
    # of rows. matplotlib expects positions as fractions of the figure's height, though, which is
    # why we divide lengths in inches by `total`.
    heights = [len(r) * 0.34 + 0.55 for r in rows]
    second = 0.22 if _is_long(colours) else 0.0  # inches for a second line of the legend
    total = sum(heights) + 1.75 + second
    figure = Figure(figsize=(13, total), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    every = list(zip(runs, rows, begins, strict=True))
    shown_s = window[1] - window[0] if window else _shown_s(every)
    for axis, (run, lanes, begin) in zip(axes, every, strict=True):
        _panel(axis, run, lanes, colours, begin, shown_s)
    length_s = max(_length_s(run, begin) for run, _, begin in every)
    cut = ""
    if shown_s < length_s and window is None:
        cut = f" (the first {seconds(shown_s)} of {seconds(length_s)})"
    shift = window[0] if window else 0.0
    since = "the run began" if window else f"{_since(runs)}{cut}"
    axes[-1].xaxis.set_major_formatter(lambda at, _: f"{at + shift:.6g}")
    axes[-1].set_xlabel(f"seconds since {since}", color=INK)
    axes[-1].set_xlim(0, shown_s * 1.005)
    figure.subplots_adjust(
        left=0.105,
        right=0.985,
        top=1 - (1.0 + second) / total,
        bottom=0.55 / total,
        hspace=0.55 / min(heights),
    )
    headline = textwrap.fill(headline or _headline(report, compare), 92)
    size = 14 if len(headline) < 80 else 9.5  # long if it explains why there's no speed-up
    figure.text(
        0.105,
        1 - 0.12 / total,
        _as_written(headline),
        fontsize=size,
        weight="bold",
        color=INK,
        va="top",
    )
    figure.text(
        0.985,
        1 - 0.15 / total,
        _as_written(report.link),
        fontsize=10,
        color=INK,
        va="top",
        ha="right",
    )
    _legend(figure, colours, rows, 1 - 0.42 / total, second / total)
    figure.savefig(path)
    return path


def _as_written(text: str) -> str:
    """Escapes `$`, since matplotlib would typeset text between two dollar signs as a formula."""
    return text.replace("$", r"\$")


def _headline(report: Report, compare: Report | None) -> str:
    if compare is None:
        return f"{report.policy or 'run'}: {_pace(report)}"
    return Comparison.of([compare], [report]).headline


def _pace(report: Report) -> str:
    if report.rounds.period_s is not None:
        return f"{seconds(report.rounds.s_per_step)} per job-step"
    if sum(job.period_s > 0 for job in report.rounds.jobs) > 1:
        return "never in steady state together"
    return "no steady state"


Row = tuple[int, str, list[Span]]


def _rows(report: Report) -> list[Row]:
    """Returns the rank, lane name and spans of each row in the panel."""
    spans = in_lane_order(report.spans)
    rows: list[Row] = []
    for rank in report.ranks[:MOST_RANKS]:
        own = [s for s in spans if s.rank == rank]
        waits = [s for s in own if s.kind in ("compile", "input")]
        lanes = sorted({s.lane for s in own if s.kind == "compute"} or {0})
        for lane in lanes:
            mine = [s for s in own if s.kind == "compute" and s.lane == lane]
            # A job can't compute while it's compiling or waiting for its next batch, which leaves a
            # gap in the compute lane. Neither activity belongs to a lane itself, so we draw both in
            # the first compute lane, where they account for such gaps.
            rows.append(
                (
                    rank,
                    _lane_name("compute", lane, lanes),
                    waits + mine if lane == lanes[0] else mine,
                )
            )
        lanes = sorted({s.lane for s in own if s.kind in ("collective", "vote")} or {0})
        for lane in lanes:
            mine = [s for s in own if s.kind in ("collective", "vote") and s.lane == lane]
            rows.append((rank, _lane_name("exchange", lane, lanes), mine))
    return rows


def _lane_name(kind: str, lane: int, lanes: list[int]) -> str:
    return kind if len(lanes) == 1 else f"{kind} {lane}"


def _run_begin(report: Report) -> int:
    return min((start for start, _ in report.wall_ns.values()), default=0)


def _steady_begin(report: Report) -> int:
    """Returns where the picture begins: when all jobs of the round have reached steady state.

    A job reaches steady state once it's done with its first step, which includes compilation. If
    the jobs run alongside each other, we return the moment when the last of them gets there.

    If the jobs run one after the other, or if there's no round, waiting for the last job would skip
    most of the run, so we return the moment when any job has completed its first step. If no job
    made a second step, there's no steady state at all, and we return the start of the first
    segment.
    """
    rank = next(iter(report.ranks), 0)
    timeline = Timeline.of(rank, report.spans, {})
    crossed = {job.facts.name for job in report.rounds.crossed}
    firsts = [
        ends[0][1]
        for job, ends in timeline.step_ends.items()
        if len(ends) > 1 and job in (crossed or {job})
    ]
    if firsts:
        return (
            min(firsts) if report.rounds.period_s is None or report.rounds.in_turn else max(firsts)
        )
    work = [s.start_ns for s in report.spans if s.kind in ("compute", "collective")]
    return min(work, default=_run_begin(report))


def _since(runs: Sequence[Report]) -> str:
    """Describes the moment at which the pictures of these runs begin."""
    if all(run.rounds.period_s is not None for run in runs):
        return "the jobs were in steady state"
    if any(job.period_s for run in runs for job in run.rounds.jobs):
        return "a first step ended"
    works = all(any(s.kind in ("compute", "collective") for s in run.spans) for run in runs)
    return "the first step" if works else "the run began"


def _length_s(report: Report, begin: int) -> float:
    ends = [end for _, end in report.wall_ns.values()]
    return (max([*ends, *(s.end_ns for s in report.spans)], default=begin) - begin) / 1e9


def _shown_s(every: Sequence[tuple[Report, list[Row], int]]) -> float:
    """Returns how many seconds fit before a lane exceeds `MOST_BARS` bars. Votes don't count."""
    lengths = [max(_length_s(run, begin) for run, _, begin in every)]
    for _, rows, begin in every:
        for _, _, spans in rows:
            starts = sorted(s.start_ns for s in spans if s.kind != "vote" and s.end_ns > begin)
            if len(starts) > MOST_BARS:
                lengths.append((starts[MOST_BARS] - begin) / 1e9)
    return max(min(lengths), 1e-9)


def _panel(
    axis: Any, run: Report, rows: list[Row], colours: dict[str, str], begin: int, shown_s: float
) -> None:
    for y, (_, _, spans) in enumerate(rows):
        thin = _Tint(shown_s)
        for kind in ("compile", "input", "compute", "collective", "vote"):
            # Spans without a job, or with a job that isn't in the report, are drawn in grey.
            for job in [*colours, *sorted({s.job for s in spans} - set(colours))]:
                own = [s for s in spans if s.kind == kind and s.job == job]
                bars = [((s.start_ns - begin) / 1e9, (s.end_ns - s.start_ns) / 1e9) for s in own]
                style = _style(kind, colours.get(job, FAINT))
                # Votes aren't work, so leave them out of the tint. Otherwise a lane that does
                # nothing but vote would look busy.
                if kind != "vote":
                    bars = thin.keep_wide(bars, style["facecolor"])
                else:
                    bars = [bar for bar in bars if bar[0] + bar[1] > 0 and bar[0] < shown_s]
                narrow = [bar for bar in bars if bar[1] < EDGED * thin.pixel_s]
                wide = [bar for bar in bars if bar[1] >= EDGED * thin.pixel_s]
                # In a vote, the ranks agree on what to run next, and mostly wait for each other
                # while the exchange lane has nothing to do. At full height it would look like work,
                # so draw it as a thin line.
                place = (y - 0.08, 0.16) if kind == "vote" else (y - 0.4, 0.8)
                for some, look in (
                    (wide, style),
                    (narrow, {"facecolor": style["facecolor"], "edgecolor": "none"}),
                ):
                    if some:
                        axis.broken_barh(some, place, **look)
        thin.draw(axis, y)
    names = [f"rank {rank}  {lane}" for rank, lane, _ in rows]
    axis.set_yticks(range(len(rows)), names, fontsize=9, color=INK)
    axis.set_ylim(len(rows) - 0.45, -0.55)
    for y in range(1, len(rows)):
        if rows[y][0] != rows[y - 1][0]:
            axis.axhline(y - 0.5, color="#CCCCCC", lw=0.8)
    rounds = run.rounds
    if rounds.period_s is None:
        pace = _pace(run)
    else:
        bound = "" if rounds.bound_s is None else f"bound {seconds(rounds.bound_s)}, "
        hidden = f"{share(rounds.hidden_share)} of exchange hidden"
        pace = f"round {seconds(rounds.period_s)}, {bound}{hidden}"
    note = f"{run.policy or 'run'}   {pace}"
    if begin - _run_begin(run) >= 1e8:
        note += f"   (from {seconds((begin - _run_begin(run)) / 1e9)} into the run)"
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
    """Mixes one part of the colour with three parts of white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - c) // 4:02X}" for c in channels)


def _middle_cut(name: str, longest: int) -> str:
    """Shortens a long name in the middle, since names often end with the job's settings."""
    if len(name) <= longest:
        return name
    return f"{name[: longest // 2]}...{name[len(name) + 3 - (longest + 1) // 2 :]}"


def _is_long(names: Iterable[str]) -> bool:
    """Whether the job names are too long to share a line of the legend with the kinds of work."""
    return sum(len(name) + MARK_CHARACTERS for name in names) > LINE_CHARACTERS // 2


def _legend(
    figure: Any, colours: dict[str, str], rows: list[list[Row]], top: float, second: float
) -> None:
    """Draws the legend of job names and kinds of work.

    If `second` isn't 0, the kinds of work go on a second line, lower by that fraction of the
    figure's height.
    """
    from matplotlib.patches import Patch

    kinds = {s.kind for panel in rows for _, _, spans in panel for s in spans}
    named = list(colours.items())[:MOST_NAMES]
    room = LINE_CHARACTERS // (len(named) + 1) - MARK_CHARACTERS
    handles = [
        Patch(label=_as_written(_middle_cut(name, room)), facecolor=colour)
        for name, colour in named
    ]
    if len(named) < len(colours):
        handles.append(Patch(label=f"and {len(colours) - len(named)} more", facecolor="none"))
    texts = {"compute": "compute", "collective": "exchange", "compile": "compiling"}
    texts |= {"input": "waiting for a batch", "vote": "vote"}
    shown = [
        Patch(label=text, **_style(kind, FAINT)) for kind, text in texts.items() if kind in kinds
    ]
    for line, at in (
        ((handles, top), (shown, top - second)) if second else ((handles + shown, top),)
    ):
        figure.legend(
            handles=line,
            loc="upper left",
            bbox_to_anchor=(0.098, at),
            ncols=len(line),
            frameon=False,
            fontsize=9,
            handlelength=2.2,
            columnspacing=1.6,
            borderaxespad=0.0,
        )


class _Tint:
    """The segments of one lane that are shorter than a pixel, by colour.

    A segment shorter than a pixel can't be drawn as a bar of the right width. Instead, we draw all
    such segments of a lane together, as an image that's a single row of pixels. The more of a
    pixel's time was spent on work, the darker it gets, so a lane that's busy half of the time looks
    half as dark as a lane that's always busy.
    """

    def __init__(self, shown_s: float) -> None:
        self._shown_s = shown_s
        self.pixel_s = shown_s / _PIXELS
        self._bars: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def keep_wide(
        self, bars: Sequence[tuple[float, float]], colour: str
    ) -> list[tuple[float, float]]:
        """Sets aside bars thinner than a pixel for `draw`, and returns the rest.

        Bars are pairs (begin, length) in seconds; those outside the picture are dropped.
        """
        shown = [bar for bar in bars if bar[0] + bar[1] > 0 and bar[0] < self._shown_s]
        self._bars[colour] += [bar for bar in shown if bar[1] < self.pixel_s]
        return [bar for bar in shown if bar[1] >= self.pixel_s]

    def draw(self, axis: Any, y: float) -> None:
        """Draws the thin bars as a tint into the row at height `y`."""
        taken = {colour: bars for colour, bars in self._bars.items() if bars}
        if not taken:
            return
        # `strip` is the colour of each pixel column (white to begin with), and `free` is the
        # fraction of the column that's still white.
        strip = np.ones((_PIXELS, 3))
        free = np.ones(_PIXELS)
        for colour, bars in taken.items():
            part = self._coverage(bars)
            # A column with very little work would look empty, so even the slightest amount gets the
            # minimum tint. In a column with several colours, these minimums could add up to more
            # than the whole column, so cap each colour at whatever is still white.
            part = np.minimum(np.where(part > 0, np.maximum(part, _PALEST), 0), free)
            free -= part
            rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
            strip -= part[:, None] * (1 - rgb)
        # Make columns without work transparent, to avoid hiding wide bars or the grid.
        image = np.concatenate([strip, (free < 1)[:, None]], axis=1)[None]
        # `imshow` changes the axis limits, so restore them afterwards.
        x_limits = axis.get_xlim()
        y_limits = axis.get_ylim()
        axis.imshow(
            image,
            extent=(0, self._shown_s, y - 0.4, y + 0.4),
            aspect="auto",
            interpolation="nearest",
            zorder=1,
        )
        axis.set_xlim(x_limits)
        axis.set_ylim(y_limits)

    def _coverage(self, bars: Sequence[tuple[float, float]]) -> np.ndarray:
        """Returns how much of each pixel column the bars cover, from 0 to 1.

        All bars are shorter than a pixel here, so each touches at most two pixel columns: the one
        it begins in, and the next. That makes two additions per bar. `bincount` performs them for
        all bars at once; a Python loop would be slow.
        """
        begin, length = np.array(bars).T / self.pixel_s
        end = np.clip(begin + length, 0, _PIXELS)
        begin = np.clip(begin, 0, _PIXELS)
        column = np.minimum(begin.astype(int), _PIXELS - 1)
        inside = np.minimum(end, column + 1) - begin
        share = np.bincount(column, inside, _PIXELS + 1)
        share += np.bincount(np.minimum(column + 1, _PIXELS), end - begin - inside, _PIXELS + 1)
        return np.clip(share[:_PIXELS], 0, 1)
