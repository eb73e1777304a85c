"""Compares whether all ranks hold the same state of a job.

Each rank reports a digest per leaf. A comparison costs one small all-reduce if all ranks report the
same, and only otherwise a gather of the digests. When to compare is decided in `replica_checks`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from jaxcross.program.ir import hash_62
from jaxcross.world.control_plane import Control, gather, which_equal

BETWEEN = "its last step stands between two exchanges, where ranks may differ"
"""Why a difference is expected. Replicas that are equal anyway are still reported as equal."""

UNCHANGED = "its state is the one that it began with"
"""Why a job without training has nothing to compare. Reports don't mention it."""


class RankReport(NamedTuple):
    """One rank's report for a comparison.

    Attributes:
        step: The step of the state.
        why: Why there's nothing to compare, or `BETWEEN`, or "".
        digests: The digests of the leaves to compare, by path.
    """

    step: int
    why: str
    digests: dict[str, str]

    def number(self) -> int:
        """Returns a hash of the report that fits into a reduction."""
        return hash_62(self.text())

    def text(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self)


def exchange(control: Control, reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Returns the reports of every rank: a list for each subject, by rank. Waits for all ranks.

    Every rank passes its reports on the same subjects, in the same order.
    """
    equal = which_equal(control, [report.number() for report in reports])
    differ = [n for n, same in enumerate(equal) if not same]
    every = [[report] * control.size for report in reports]
    if differ:
        for n, *found in zip(differ, *gather(control, [reports[n] for n in differ]), strict=True):
            every[n] = [RankReport(*report) for report in found]
    return every


class Difference(NamedTuple):
    """The first leaf that differs, and two ranks between which it differs."""

    path: str
    ranks: tuple[int, int]


def judge(reports: Sequence[RankReport]) -> Difference | str | None:
    """Returns a difference, why nothing is known, or None if all reports are equal. Pure."""
    first = reports[0]
    if why := next((report.why for report in reports if report.why not in ("", BETWEEN)), ""):
        return why
    if any(report.step != first.step for report in reports):
        return (
            f"its ranks are at different steps, {', '.join(str(report.step) for report in reports)}"
        )
    for path, digest in first.digests.items():
        for rank, report in enumerate(reports):
            if report.digests.get(path) != digest:
                return first.why or Difference(path, (0, rank))
    return None


class Findings:
    """The results of one job's comparisons so far; the same on every rank.

    Attributes:
        text: The text for the report: `equal`, `differ ...`, `not compared: ...`, or "".
        difference: What the latest comparison found, if replicas differ.
        unknown: Whether the latest comparison had nothing to compare.
        unit: What is counted: `step`, or `batch` in a job that hasn't exchanged anything.
        held: The number of steps after which replicas were last known to be equal, or None.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.text = ""
        self.held: int | None = None
        self.difference: Difference | None = None
        self.unknown = False
        self.unit = "step"
        self.step = 0

    def add(self, reports: Sequence[RankReport], leaves: int) -> Difference | None:
        """Adds a comparison of a state with `leaves` leaves, and returns the difference, if any."""
        found, self.step = judge(reports), reports[0].step
        self.difference = found if isinstance(found, Difference) else None
        self.unknown = isinstance(found, str)
        last = (
            "; never found equal in this run"
            if self.held is None
            else f"; equal {self._when(self.held)}"
        )
        if isinstance(found, Difference):
            here, there = found.ranks
            self.text = (
                f"differ after {self.unit} {self.step}, first {_leaf(found.path)} on ranks {here} "
                f"and {there}{last}"
            )
        elif found == UNCHANGED:
            self.text, self.unknown = "", False
        elif found is not None:
            self.text = f"not compared: {found}{last}"
        else:
            compared = len(reports[0].digests)
            self.text = "equal" if compared == leaves else f"equal in {compared} of {leaves} leaves"
            self.held = self.step
        return self.difference

    def message(self) -> str:
        """Returns the difference in full, for an error or a warning."""
        assert self.difference is not None
        path, (here, there) = self.difference
        held = "They were never found equal in this run"
        if self.held is not None:
            held = f"They were equal {self._when(self.held)}"
        own = path and (
            f" If each rank is to have its own `{path}`, name it: `job.restore(state, "
            "rank_local=...)`, or `jaxcross.Job(..., rank_local=...)`."
        )
        return (
            f"Job `{self._job}`: its replicas differ after {self.unit} {self.step}, first in "
            f"{_leaf(path)} on ranks {here} and {there}. {held}. Each rank trains a model of its "
            "own. Look for what differs between ranks: gradients without `jax.lax.pmean`, a "
            f"learning rate, a seed, a step that is a plain `jax.jit`.{own}"
        )

    def _when(self, count: int) -> str:
        return f"after {self.unit} {count}" if count else "at the start"


def _leaf(path: str) -> str:
    """Returns a leaf's path for messages. A state that's a single array has an empty path."""
    return f"`{path}`" if path else "its only leaf"
