"""Runs pytest, and records each folder as soon as all of its tests have passed.

    python .ci/recorded.py TIER COMMIT [ARGUMENTS OF PYTEST]

`.ci/more` uses this to run all due folders of a tier in a single pytest run. We used to have one
run per folder, but spent much of the time on starting pytest and its workers, and on waiting for
each folder's last test. Since each folder is recorded separately, a run that's killed only loses
the unfinished folders. If the working tree has changes, pass `-` as COMMIT, so that nothing is
recorded.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = ".ci/passed.json"
PACKAGE = "jaxcross"
NOTHING_FAILED = (
    pytest.ExitCode.OK,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)  # most folders have no exhaustive tests


def git(*arguments: str) -> str | None:
    """Returns git's output, or None if git fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def changed_since(commit: str | None) -> list[str] | None:
    """Returns the files that differ from a commit, or None if the commit is unknown.

    The files include uncommitted ones.
    """
    if commit is None:
        return None
    named = git("diff", "--name-only", "--no-renames", commit)
    new = git("ls-files", "--others", "--exclude-standard")
    return (
        None
        if named is None
        else [file for file in f"{named}\n{new}".split("\n") if file not in ("", RECORDS)]
    )


def is_reworded(commit: str, file: str, *, help_counts: bool = True) -> bool:
    """Returns whether only comments, docstrings or the layout of a Python file have changed.

    If a program uses `__doc__`, e.g. as its `--help`, the docstring of its module counts as code,
    unless `help_counts` is False.
    """
    if not file.endswith(".py") or not (ROOT / file).exists():
        return False
    return _is_reworded(commit, file, (ROOT / file).read_text(), help_counts)


@cache
def _is_reworded(commit: str, file: str, new: str, help_counts: bool) -> bool:
    old = git("show", f"{commit}:{file}")
    return old is not None and _code(old, help_counts) == _code(new, help_counts)


def _code(text: str, help_counts: bool) -> tuple[str, str | None]:
    """Returns a file's syntax tree as text, without strings that stand alone, and its help."""
    tree = ast.parse(text)
    its_help = ast.get_docstring(tree) if help_counts and "__doc__" in text else None
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_string(each)] or [ast.Pass()]
    return ast.dump(tree), its_help


def _is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def is_at(commit: str | None) -> TypeGuard[str]:
    """Returns whether the checkout is exactly at this commit, apart from the records."""
    return commit is not None and git("rev-parse", "HEAD") == commit and not changed_since("HEAD")


def passed() -> dict[str, str]:
    """Returns the commit at which each part has passed."""
    return json.loads((ROOT / RECORDS).read_text()) if (ROOT / RECORDS).exists() else {}


def record(names: Iterable[str], commit: str) -> None:
    """Records that parts have passed at a commit."""
    new = ROOT / f"{RECORDS}.new"
    new.write_text(
        json.dumps({**passed(), **dict.fromkeys(names, commit)}, indent=1, sort_keys=True) + "\n"
    )
    new.replace(ROOT / RECORDS)  # atomic, because this process can be killed at any time


def folder_of(path: str) -> str | None:
    """Returns the folder of the package that a test, or a folder of tests, belongs to.

    Returns None if it covers several folders.
    """
    parts = Path(path.partition("::")[0]).parts
    if len(parts) < 3:
        return None
    return PACKAGE if parts[2].endswith(".py") else parts[2]


class Recorder:
    """A pytest plugin that records each folder once all of its tests have passed."""

    def __init__(self, tier: str, commit: str) -> None:
        self._tier, self._commit = tier, commit
        self._left: Counter[str | None] = Counter()
        self._failed: set[str | None] = set()  # None: a test that covers several folders

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # no test in this file will run
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
        if exitstatus in (
            *NOTHING_FAILED,
            pytest.ExitCode.TESTS_FAILED,
        ):  # includes folders without tests in this tier
            self._record(
                {folder for folder in map(folder_of, session.config.args) if not self._left[folder]}
            )

    def _record(self, folders: Iterable[str | None]) -> None:
        passed = {
            folder for folder in folders if None not in self._failed and folder not in self._failed
        }
        if self._commit != "-" and passed and is_at(self._commit):
            record([f"{self._tier}:{folder}" for folder in passed], self._commit)


if __name__ == "__main__":
    tier, commit, *arguments = sys.argv[1:]
    sys.path.pop(0)  # this folder: none of its modules belongs to the tests
    code = pytest.main(arguments, plugins=[Recorder(tier, commit)])
    sys.exit(0 if code in NOTHING_FAILED else code)
