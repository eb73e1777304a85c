"""Turns a run's events into tables, JSON, traces, charts and progress. Never affects the run.

record           spans of a run on this rank, and the alignment of the ranks' clocks
summary          numbers of a run as plain data: jobs, timing, breakdown
steady_state     the part of a run that is measured: whole rounds in steady state
time_breakdown   what a run achieved against its bound, and where the rest went; `timeline`,
                 `intervals`
slow_rank        `SlowRank`: the rank that holds up the others
report           `Report`: a run on all its ranks, saved and loaded
table            the table at the end; `units` formats its numbers, `html_table` converts it for
                 notebooks
compare          `Comparison` of two ways to run the same jobs
gantt            the lanes as a picture
chrome           the run as a trace for Perfetto
sweep_result     `SweepResult`: the trials of a sweep, as a table and a picture
metric_files     what jobs log, as JSONL and CSV; `tensorboard` as TensorBoard's event files
tracker          sends what jobs log to a service, each step once, even if a run is killed;
                 `wandb_tracker` to Weights & Biases, `mlflow_tracker` to MLflow
progress         how far along a run's jobs are, as plain data and a file; `progress_text` renders
                 it as lines and as a table
run_state        whether a run is in progress and how it ended, from its event folder
event_files      reads the ranks' event files after the end; `post_mortem` finds the rank that ended
                 first
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use
from jaxcross.report.compare import Comparison
from jaxcross.report.mlflow_tracker import MLflow
from jaxcross.report.report import Report
from jaxcross.report.slow_rank import SlowRank
from jaxcross.report.summary import LOST_TIME, JobSummary, JobTiming, TimeBreakdown
from jaxcross.report.tensorboard import TensorBoard
from jaxcross.report.wandb_tracker import WandB

if TYPE_CHECKING:  # not public, for jaxcross's other folders
    from jaxcross.report.event_files import RankRecord, SavedPart, read_event_files
    from jaxcross.report.gantt import draw_gantt
    from jaxcross.report.html_table import as_html
    from jaxcross.report.intervals import Cumulated, merge_intervals
    from jaxcross.report.metric_files import MetricFiles, as_logged, flatten_metrics, is_of
    from jaxcross.report.post_mortem import first_to_end, ranks_without_file
    from jaxcross.report.progress import (
        PROGRESS_FILE,
        JobProgress,
        LatestMetric,
        RunProgress,
        StepRate,
        doing_text,
        metric_of,
    )
    from jaxcross.report.progress_text import duration, run_lines, run_table
    from jaxcross.report.record import Recorder
    from jaxcross.report.run_state import RunState, read_run, read_state
    from jaxcross.report.slow_rank import slowest
    from jaxcross.report.sweep_result import SweepResult, SweepTrial
    from jaxcross.report.table import printed_text, screen_width
    from jaxcross.report.time_breakdown import break_down
    from jaxcross.report.timeline import Timeline, in_lane_order, shortest_exchanges
    from jaxcross.report.tracker import Tracker
    from jaxcross.report.units import as_float, plural, seconds, share
else:
    __getattr__, *_ = on_first_use(__name__)

__all__ = [
    "LOST_TIME",
    "Comparison",
    "JobSummary",
    "JobTiming",
    "MLflow",
    "Report",
    "SlowRank",
    "TensorBoard",
    "TimeBreakdown",
    "WandB",
]


def __dir__() -> list[str]:
    return [*__all__]
