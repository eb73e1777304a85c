"""Runs the tests that cover a mutant, and returns a verdict."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise

from tests.mutation.mutants import Mutant
from tests.mutation.suite import Covering, lines
from tests.mutation.workspace import Workspace

COLLECTION = "collection"

_BATCHES = (20, 200)


class Verdict(StrEnum):
    """What a suite did to a mutant."""

    KILLED = "killed"  # a test failed
    HUNG = "hung"  # a test took far longer than without the mutant
    SURVIVED = "survived"  # all tests that evaluate it passed
    LIMITED = "limited"  # all tests that ran within the time limit passed
    UNCOVERED = "uncovered"  # no test evaluates it
    ABSENT = "absent"  # its function differs in this checkout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A verdict and its reason: the test that failed or hung, and the part of the suite it's in."""

    verdict: Verdict
    killer: str = ""
    reason: str = ""
    stage: int = -1
    passed: int = 0
    direct: int = 0
    unrun_direct: int = 0
    unrun_mates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    code: int | None  # None if we stopped it
    passed: int
    failed: str = ""
    reason: str = ""
    hung: str = ""


class Judge:
    """Judges mutants by one suite. Threads can share a judge, each with its own workspace."""

    def __init__(
        self, stages: Sequence[Sequence[str]], covering: Covering, *, limit_s: float, grace_s: float
    ) -> None:
        self._stages = stages
        self._covering = covering
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._trusted: dict[str, bool] = {}  # by test: whether it passes without a mutant
        self._lock = threading.Lock()

    def untrusted(self) -> list[str]:
        """Returns the tests that were left out because they fail alone even without a mutant."""
        with self._lock:
            return sorted(name for name, passes in self._trusted.items() if not passes)

    def judge(self, mutant: Mutant, workspace: Workspace) -> Outcome:
        """Runs tests until one fails, one hangs, or the time limit is reached.

        If a test fails, we run it twice more, alone: with the mutant, and (once per test) without
        it. If it passes with the mutant, something else made it fail the first time. If it fails
        without the mutant, it can't tell us anything about mutants: some tests fail when they run
        alone or on a busy machine. In both cases we leave the test out and try the others again.
        """
        left_out: set[str] = set()
        original = workspace.read(mutant.file)
        while True:
            workspace.write(mutant.file, mutant.applied(original))
            try:
                outcome = self._tried(mutant, workspace, left_out)
                again = outcome.verdict is not Verdict.KILLED or self._fails_alone(
                    outcome, workspace
                )
            finally:
                workspace.write(mutant.file, original)
            if not outcome.killer or (again and self._is_trusted(outcome, workspace)):
                return outcome
            left_out.add(outcome.killer)

    def _tried(self, mutant: Mutant, workspace: Workspace, left_out: set[str]) -> Outcome:
        deadline_s = time.monotonic() + self._limit_s
        groups = self._covering.of(mutant)
        left_out = left_out.union(self.untrusted())
        direct, mates = ([name for name in names if name not in left_out] for names in groups)
        passed = 0
        for batch in (*self._batches(direct), *self._batches(mates)):
            run = self._run(batch, workspace, deadline_s)
            passed += run.passed
            facts = {"stage": self._stage(batch[0]), "passed": passed, "direct": len(direct)}
            if run.hung:
                return Outcome(verdict=Verdict.HUNG, killer=run.hung, **facts)
            if run.failed:
                return Outcome(
                    verdict=Verdict.KILLED, killer=run.failed, reason=run.reason, **facts
                )
            if run.code is None and batch[0] in direct:
                return Outcome(
                    verdict=Verdict.LIMITED, unrun_direct=max(0, len(direct) - passed), **facts
                )
            if run.code is None:
                unrun = max(0, len(direct) + len(mates) - passed)
                return Outcome(verdict=Verdict.SURVIVED, unrun_mates=unrun, **facts)
        return Outcome(
            verdict=Verdict.SURVIVED if direct else Verdict.UNCOVERED,
            passed=passed,
            direct=len(direct),
        )

    def _stage(self, name: str) -> int:
        return self._covering.tests[name].stage

    def _batches(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yields the tests for each call of pytest. A batch has tests from one part of the suite,
        and the first batch of a part is small.

        The first batch is small because most mutants are killed by one of the first tests, whereas
        it takes pytest half a minute to collect a thousand tests.
        """
        for _, group in groupby(names, self._stage):
            part = [*group]
            for begin, end in pairwise(
                (0, *(size for size in _BATCHES if size < len(part)), len(part))
            ):
                yield part[begin:end]

    def _fails_alone(self, outcome: Outcome, workspace: Workspace) -> bool:
        if outcome.killer == COLLECTION:
            return True
        run = self._run([outcome.killer], workspace, math.inf, outcome.stage)
        return bool(run.failed or run.hung)

    def _is_trusted(self, outcome: Outcome, workspace: Workspace) -> bool:
        if outcome.killer == COLLECTION:
            return True  # collection worked without the mutant when the suite was recorded
        with self._lock:
            known = self._trusted.get(outcome.killer)
        if known is None:
            run = self._run([outcome.killer], workspace, math.inf, outcome.stage)
            known = run.code == 0
            with self._lock:
                self._trusted[outcome.killer] = known
        return known

    def _allowed_s(self, name: str) -> float:
        """Returns the seconds after which a test counts as hung.

        If the tests of a file share fixtures, the first one has to set them up, so the limit
        includes the time for that.
        """
        return self._grace_s + 3 * self._covering.longest_s(name)

    def _run(
        self,
        names: Sequence[str],
        workspace: Workspace,
        deadline_s: float,
        stage: int | None = None,
    ) -> _Run:
        """Runs tests in this order, up to the first failure. All of them are in the same part of
        the suite, which is `stage` if given.
        """
        if time.monotonic() > deadline_s:
            return _Run(code=None, passed=0)
        log = workspace.folder.with_suffix(".jsonl")
        listed = workspace.folder.with_suffix(".tests")
        options = [
            "-n",
            "0",
            "-x",
            "-q",
            "-p",
            "mutation_record",
            f"--mutation-log={log}",
            "-p",
            "no:cacheprovider",
        ]
        command = [
            *self._stages[self._stage(names[0]) if stage is None else stage],
            *options,
            "--hypothesis-seed=0",
            f"@{listed}",
        ]

        files = list(dict.fromkeys(name.partition("::")[0] for name in names))
        collected_in_s = 2 * self._grace_s + len(files)

        def attempt(arguments: Sequence[str]) -> _Run:
            log.unlink(missing_ok=True)
            listed.write_text("".join(f"{name}\n" for name in arguments))
            watch = _Watch(lambda: lines(log), self._allowed_s, collected_in_s, deadline_s)
            return _read(workspace.pytest(command, watch.is_hopeless), lines(log), watch.hung)

        run = attempt(names)
        # The mutant changes the ids of parametrized tests, so run whole files.
        if run.failed == COLLECTION and run.code == 4:
            run = attempt(files)
        return run


class _Watch:
    """Decides when to stop pytest: if a test runs for too long, or if a test starts after the
    mutant's time limit.

    If a test is still running when the mutant's time is up, it may finish, because otherwise we
    couldn't tell a long test from one that hangs.
    """

    def __init__(
        self,
        read: Callable[[], list[dict]],
        allowed_s: Callable[[str], float],
        collected_in_s: float,
        deadline_s: float,
    ) -> None:
        self._read = read
        self._allowed_s = allowed_s
        self._deadline_s = deadline_s
        self._collect_by_s = time.monotonic() + collected_in_s
        self.hung = ""

    def is_hopeless(self) -> bool:
        now_s = time.monotonic()
        started = [line for line in self._read() if "started" in line]
        if started and now_s > started[-1]["at_s"] + self._allowed_s(started[-1]["started"]):
            self.hung = started[-1]["started"]
        elif not started and now_s > self._collect_by_s:
            self.hung = COLLECTION
        return bool(self.hung) or bool(started and started[-1]["at_s"] > self._deadline_s)


def _read(code: int | None, log: list[dict], hung: str) -> _Run:
    failures = [line for line in log if line.get("outcome") == "failed" or "collected" in line]
    failed_tests = {line.get("test") for line in failures}
    ended = {line["test"] for line in log if "test" in line} - failed_tests
    running = [line["started"] for line in log if "started" in line][-1:]
    passed = len(ended) - (code is None and bool(running) and running[0] in ended)
    if failures:
        first = failures[0]
        return _Run(
            code=code, passed=passed, failed=first.get("test", COLLECTION), reason=first["reason"]
        )
    if code in (0, 5, None):
        return _Run(code=code, passed=passed, hung=hung)
    return _Run(
        code=code, passed=passed, failed=COLLECTION, reason=f"pytest ended with exit code {code}"
    )
