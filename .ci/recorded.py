"""Runs pytest, and writes down each folder whose tests have all passed as soon as the last of them has.

    python .ci/recorded.py TIER COMMIT [ARGUMENTS OF PYTEST]

`.ci/more` runs all due folders of a tier at once: with one run per folder, much of the time went into starting pytest
and its workers, and into waiting for each folder's last test. A run that is killed loses only the folders that weren't
finished. COMMIT is `-` for a working tree with changes, for which nothing is written down.
"""

from __future__ import annotations

import json
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
    RECORDS.write_text(json.dumps({**passed(), **dict.fromkeys(names, commit)}, indent=1, sort_keys=True) + "\n")


def folder_of(path: str) -> str:
    """Returns the folder of the package that a test or a folder of tests is for."""
    name = Path(path.partition("::")[0]).parts[2]
    return PACKAGE if name.endswith(".py") else name


class Recorder:
    """A pytest plugin that records folders."""

    def __init__(self, tier: str, commit: str) -> None:
        self._tier, self._commit = tier, commit
        self._left: Counter[str] = Counter()
        self._failed: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._left = self._left or Counter(map(folder_of, ids))  # every worker collects the same

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = folder_of(report.nodeid)
        if report.failed:
            self._failed.add(folder)
        if report.when == "teardown":
            self._left[folder] -= 1
            if not self._left[folder] and folder not in self._failed:
                self._record([folder])

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not hasattr(session.config, "workerinput") and exitstatus in NOTHING_FAILED:
            self._record(map(folder_of, session.config.args))

    def _record(self, folders: Iterable[str]) -> None:
        if self._commit != "-":
            record([f"{self._tier}:{folder}" for folder in folders], self._commit)


if __name__ == "__main__":
    tier, commit, *arguments = sys.argv[1:]
    code = pytest.main(arguments, plugins=[Recorder(tier, commit)])
    sys.exit(0 if code in NOTHING_FAILED else code)
