"""Events of a run -> table, JSON, Chrome trace, Gantt chart, live view. Listens only."""

from jaxcross.report.account import account
from jaxcross.report.compare import Comparison
from jaxcross.report.facts import LOSSES, Account, JobAccount, JobFacts
from jaxcross.report.live import LiveView
from jaxcross.report.record import Recorder
from jaxcross.report.report import Report

__all__ = ["LOSSES", "Account", "Comparison", "JobAccount", "JobFacts", "LiveView", "Recorder", "Report", "account"]
