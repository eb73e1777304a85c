"""A pytest plugin that logs each test's start and outcome as JSON lines."""

import json
import time

import pytest


def pytest_addoption(parser):
    parser.addoption("--mutation-log", help="file to append to")


def pytest_configure(config):
    if not hasattr(config, "workerinput") and config.getoption("mutation_log"):
        config.pluginmanager.register(Record(config.getoption("mutation_log")))


class Record:
    """Writes the log. With pytest-xdist, only the controller process has a `Record`."""

    def __init__(self, path):
        self._path = path

    def _write(self, **line):
        with open(self._path, "a") as file:
            file.write(f"{json.dumps(line)}\n")

    def pytest_runtest_logstart(self, nodeid):
        self._write(started=nodeid, at_s=time.monotonic())

    def pytest_runtest_logreport(self, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (crash.message if crash else str(report.longrepr)) if report.failed else ""
        self._write(
            test=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            duration_s=report.duration,
            reason=reason.partition("\n")[0][:300],
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report):
        if report.failed:
            self._write(
                collected=report.nodeid,
                reason=str(report.longrepr).strip().rpartition("\n")[2][:300],
            )
