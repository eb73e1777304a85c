"""Turns the events of a run into tables, JSON, traces, charts and progress. Only listens.

record           spans of a run on this rank, and the alignment of the ranks' clocks
summary          numbers of a run as plain data: jobs, timing, breakdown
steady_state     the part of a run that is measured: whole rounds in steady state
time_breakdown   what a run achieved against its bound, and where the rest went; `timeline`,
                 `intervals`
report           `Report`: a run on all its ranks, saved and loaded
table            the table at the end; `units` formats its numbers
compare          `Comparison` of two ways to run the same jobs
gantt            the lanes as a picture
chrome           the run as a trace for Perfetto
sweep_result     `SweepResult`: the trials of a sweep, as a table and a picture
metric_files     what jobs log, as JSONL and CSV; `tensorboard` as TensorBoard's event files
progress         how far a run's jobs are, as plain data and a file; `progress_text` renders it as
                 lines and as a table
run_state        whether a run is in progress and how it ended, from its folder of events
event_files      reads the ranks' event files after the end; `post_mortem` finds the rank that ended
                 first
"""

from jaxcross.report.compare import Comparison
from jaxcross.report.report import Report
from jaxcross.report.summary import LOST_TIME, JobSummary, JobTiming, TimeBreakdown
from jaxcross.report.tensorboard import TensorBoard

__all__ = [
    "LOST_TIME",
    "Comparison",
    "JobSummary",
    "JobTiming",
    "Report",
    "TensorBoard",
    "TimeBreakdown",
]


def __dir__() -> list[str]:
    return [*__all__]
