"""Runs pytest, and writes down each folder whose tests have all passed as soon as the last of them has.

    python .ci/recorded.py TIER COMMIT [ARGUMENTS OF PYTEST]

`.ci/more` runs all due folders of a tier at once: with one run per folder, much of the time went into starting pytest
and its workers, and into waiting for each folder's last test. A run that is killed loses only the folders that weren't
finished. COMMIT is `-` for a working tree with changes, for which nothing is written down.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

RECORDS = Path(__file__).with_name("passed.json")
PACKAGE = "jaxcross"
NOTHING_FAILED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # in most folders nothing is exhaustive


def passed() -> dict[str, str]:
    """Returns the commit at which each part has passed."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def record(names: Iterable[str], commit: str) -> None:
    """Writes down that parts have passed at a commit."""
    new = RECORDS.with_suffix(".new")
    new.write_text(json.dumps({**passed(), **dict.fromkeys(names, commit)}, indent=1, sort_keys=True) + "\n")
    new.replace(RECORDS)  # at once, because this process may be killed at any time


def is_at(commit: str) -> bool:
    """Whether the checkout is at a commit, without other changes than the records."""
    line = ["git", "status", "--porcelain", "--", ".", f":!{RECORDS.parent.name}/{RECORDS.name}"]
    head, changes = (
        subprocess.run(words, cwd=RECORDS.parents[1], capture_output=True, text=True, check=True).stdout.strip()
        for words in (["git", "rev-parse", "HEAD"], line)
    )
    return head == commit and not changes


def folder_of(path: str) -> str | None:
    """Returns the folder of the package that a test or a folder of tests is for, None if it's for several."""
    parts = Path(path.partition("::")[0]).parts
    if len(parts) < 3:
        return None
    return PACKAGE if parts[2].endswith(".py") else parts[2]


class Recorder:
    """A pytest plugin that records folders."""

    def __init__(self, tier: str, commit: str) -> None:
        self._tier, self._commit = tier, commit
        self._left: Counter[str | None] = Counter()
        self._failed: set[str | None] = set()  # None: any of them

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # the tests of this file aren't among those that run
            self._failed.add(folder_of(report.nodeid))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._left = self._left or Counter(map(folder_of, ids))  # every worker collects the same

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        if report.failed:
            self._failed.add(folder)
        if report.when == "teardown":
            self._left[folder] -= 1
            if not self._left[folder]:
                self._record([folder])

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (*NOTHING_FAILED, pytest.ExitCode.TESTS_FAILED):  # also those that have no tests in this tier
            self._record({folder for folder in map(folder_of, session.config.args) if not self._left[folder]})

    def _record(self, folders: Iterable[str | None]) -> None:
        passed = {folder for folder in folders if None not in self._failed and folder not in self._failed}
        if self._commit != "-" and passed and is_at(self._commit):
            record([f"{self._tier}:{folder}" for folder in passed], self._commit)


if __name__ == "__main__":
    tier, commit, *arguments = sys.argv[1:]
    sys.path.pop(0)  # this folder, whose modules are none of the tests'
    code = pytest.main(arguments, plugins=[Recorder(tier, commit)])
    sys.exit(0 if code in NOTHING_FAILED else code)
