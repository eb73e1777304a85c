"""Whether all ranks hold the same state of a job: what each rank reports, and what follows from all
reports.

A comparison costs one small all-reduce where all ranks report the same, and a gather of one digest
a leaf where they do not. Nothing here decides when to compare.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxcross.program.ir import hash_62
from jaxcross.world.control_plane import Control, gather

BETWEEN = "its last step stands between two exchanges, where ranks may differ"
"""The reason why a difference is expected. Equal replicas are reported as equal all the same."""

UNCHANGED = "its state is the one that it began with"
"""Why a job without training has nothing to compare; reports do not mention it."""


class RankReport(NamedTuple):
    """One rank's report for a comparison.

    Attributes:
        step: Of the state.
        why: Why there is nothing to compare, or `BETWEEN`, or empty.
        digests: By path, of the leaves to compare.
    """

    step: int
    why: str
    digests: dict[str, str]

    def number(self) -> int:
        """Returns a hash of it, which fits a reduction."""
        return hash_62(self.text())

    def text(self) -> str:
        """Returns it as JSON."""
        return json.dumps(self)


def exchange(control: Control, reports: Sequence[RankReport]) -> list[list[RankReport]]:
    """Returns every rank's reports on the same subjects: for each subject, by rank. Waits for all
    ranks.
    """
    numbers = np.array([report.number() for report in reports], np.int64)
    low, high = np.split(control.allreduce_min(np.concatenate([numbers, -numbers])), 2)
    differ = np.flatnonzero(low != -high).tolist()
    every = [[report] * control.size for report in reports]
    if differ:
        for n, *found in zip(differ, *gather(control, [reports[n] for n in differ]), strict=True):
            every[n] = [RankReport(*report) for report in found]
    return every


class Difference(NamedTuple):
    """The first leaf that differs, and two ranks where it does."""

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
    """Results of one job's comparisons so far; the same on every rank.

    Attributes:
        text: For the report: `equal`, `differ ...`, `not compared: ...`, or empty.
        difference: What the latest one found, if replicas differ.
        unknown: Whether the latest one had nothing to compare.
        unit: What is counted: `step`, or `batch` in a job that has not exchanged anything.
        held: After how many steps the latest comparison held; None if none has.
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
        """Adds a comparison of a state of so many leaves, and returns the difference, if there is
        one.
        """
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
    """A leaf as texts name it; the path of a state that is a single array is empty."""
    return f"`{path}`" if path else "its only leaf"
