"""The time that the tests of each file take, and a limit to it: `pytest --longest-file SECONDS`."""

from collections import Counter
from collections.abc import Collection

import pytest

ALL_TESTS_S = {"plain": 820.0, "integration": 5100.0}
"""Time of all tests of a plain `pytest` and of `pytest -m "integration and not exhaustive"`, added up over the workers,
on the machine of the table in tests/README.md."""

_REMEDIES = {"plain": "or mark it `integration`", "integration": "or mark it `exhaustive`"}


class FileTimes:
    """A plugin that adds up what the tests of each file take, fixtures included, and fails if a file takes too long.

    Plain tests and integration tests of a file are counted apart. On a slower machine, whose tests take longer than
    `ALL_TESTS_S`, the limit grows in proportion. Tests that are `exhaustive` have no limit.
    """

    def __init__(self, longest_s: float | None) -> None:
        self._longest_s = longest_s
        self._seconds: Counter[str] = Counter()
        self._by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in ALL_TESTS_S}

    def add(self, nodeid: str, seconds: float, keywords: Collection[str]) -> None:
        name = nodeid.partition("::")[0]
        self._seconds[name] += seconds  # type: ignore[assignment]
        if "exhaustive" not in keywords:
            kind = "integration" if "integration" in keywords else "plain"
            self._by_kind[kind][name] += seconds  # type: ignore[assignment]

    def too_long(self) -> list[str]:
        """Returns a line for each file that is over the limit, with its seconds and the remedy."""
        if self._longest_s is None:
            return []
        lines = []
        for kind, seconds in self._by_kind.items():
            limit_s = self._longest_s * max(1.0, seconds.total() / ALL_TESTS_S[kind])
            lines += [
                f"{name}: its {kind} tests took {took:.0f} s, more than {limit_s:.0f} s: speed it up, {_REMEDIES[kind]}"
                for name, took in seconds.items()
                if took > limit_s
            ]
        return lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.add(report.nodeid, report.duration, report.keywords)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._seconds.total() < 60:
            return
        terminalreporter.section(f"slowest files, of {self._seconds.total():.0f} s")
        for name, took in self._seconds.most_common(10):
            terminalreporter.line(f"{took:6.1f} s  {name}")
        for line in self.too_long():
            terminalreporter.line(f"TOO LONG  {line}", red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
