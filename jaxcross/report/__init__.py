"""Events of a run -> table, JSON, Chrome trace, Gantt chart, live view. Listens only."""

from jaxcross.report.compare import Comparison
from jaxcross.report.live import LiveView
from jaxcross.report.record import Recorder
from jaxcross.report.report import Report
from jaxcross.report.summary import LOST_TIME, JobSummary, JobTiming, TimeBreakdown
from jaxcross.report.time_breakdown import break_down

__all__ = [
    "LOST_TIME",
    "Comparison",
    "JobSummary",
    "JobTiming",
    "LiveView",
    "Recorder",
    "Report",
    "TimeBreakdown",
    "break_down",
]
