"""The search for the fastest cut: what it tries, when it stops, what it stores. Times are fake.

Also tests which cut runs: with several jobs, after a restart, and on ranks with different
knowledge.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxcross.jobs.step_registry import StepRegistry
from jaxcross.program import stages
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced, trace
from jaxcross.runtime.standalone import Standalone
from jaxcross.runtime.step_host import Agreement
from jaxcross.step import cut_budget, cut_tuner, timed_trial
from jaxcross.step import prepare as prepare_module
from jaxcross.step.prepare import prepare
from jaxcross.step.variant import ChosenCut, StepRecord, Variant
from jaxcross.testing import LocalRanks
from tests.support.fakes import FakeControl, run_ranks
from tests.support.layers import step

Search = Callable[..., int]


ARGUMENTS = ([jnp.eye(4)] * 16, jnp.ones((2, 4)))


@functools.cache
def traced() -> Traced:
    return trace(step, ARGUMENTS, axes={"batch": 2}, wire=LocalRanks())


class Job:
    """Hosts a variant in a run."""

    in_run = True
    steps_left: int | None = None

    def __init__(
        self, control: FakeControl, cuts: dict[str, int] | None = None, *, only: bool = True
    ) -> None:
        self.control, self.cuts, self.is_only_job = control, {} if cuts is None else cuts, only
        self.labels: list[str] = []
        self._programs: list[Program] = []

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:
        new = not any(program is other for other in self._programs)
        self._programs.append(program)
        return new

    def cut_before_restart(self, key: str) -> int | None:
        return self.cuts.get(key)

    def remember_cut(self, key: str, n_segments: int) -> None:
        self.cuts[key] = n_segments

    def agree(self, agreement: Agreement) -> None:
        self.run_on_all_ranks(agreement.label, agreement.in_run)

    def run_on_all_ranks(self, label: str, work: Callable[[Any], Any]) -> Any:
        self.labels.append(label.partition("\n")[0])
        return work(self.control)

    def compiling(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, compiled: Compiled, leaves: Sequence[object], step: object) -> None:
        raise NotImplementedError


def variant_of(control: FakeControl, *, local_size: int = 2) -> Variant:
    """Returns the variant of the step on one rank, before any call."""
    world: Any = SimpleNamespace(
        rank=control.rank,
        size=2,
        local_size=local_size,
        control=control,
        executables=None,
        flight=SimpleNamespace(during=lambda *_, **__: nullcontext()),
        monitor=lambda **_: nullcontext(),
        wire=lambda: SimpleNamespace(create_communicators=lambda *_: None),
    )
    return Variant(
        traced=traced(),
        record=StepRecord(cut="auto", bucket_bytes=0),
        trial_args=tuple(jax.tree.leaves(ARGUMENTS)),
        world=world,
    )


def pieces_of(compiled: Any) -> int:
    return len(compiled.program.collectives)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of pieces of each program that should be compiled; none is."""
    asked: list[int] = []

    def compiled(program: Program, inputs: Any, **_: Any) -> Any:
        assert len(inputs) == len(jax.tree.leaves(ARGUMENTS))
        asked.append(len(program.collectives))
        return SimpleNamespace(program=program, constants=(), shared={})

    monkeypatch.setattr(stages, "compile", compiled)
    return asked


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Replaces measured times with seconds per step, by number of pieces."""
    seconds: dict[int, float] = {}
    monkeypatch.setattr(
        cut_tuner, "_race", lambda rivals, *_: tuple(seconds[pieces_of(r)] for r in rivals)
    )
    return seconds


@pytest.fixture
def search(asked: list[int], times: dict[int, float]) -> Search:
    """Returns a search for a lone job: seconds per step by pieces -> the chosen number."""
    (control,) = FakeControl.group(1)

    def run(
        seconds: dict[int, float],
        into: list[int] | None = None,
        found: dict[str, int] | None = None,
        steps: int | None = None,
    ) -> int:
        asked.clear()
        times.clear()
        times.update(seconds)
        job, node = Job(control, found), variant_of(control)
        job.steps_left = steps
        compiled = prepare(node, job)
        assert prepare(node, job) is compiled
        assert node.program is compiled.program
        assert list(job.cuts.values()) == [pieces_of(compiled)]
        if into is not None:
            into.extend(asked)
        return pieces_of(compiled)

    return run


def test_cuts_are_doubled_while_that_pays(
    search: Search, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_tuner, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    asked: list[int] = []
    with caplog.at_level(logging.WARNING, "jaxcross"):
        assert search({1: 3.0, 2: 2.5, 4: 2.0, 8: 2.2, 16: 2.4}, asked) == 4
    assert asked == [1, 2, 4, 8, 16]
    first, second = caplog.messages
    assert (
        first
        == "`step` is compiled and timed in several cuts to find the fastest. To save that time, "
        "pass a number as `cut`."
    )
    assert second == (
        "`step` runs fastest cut into 4 exchange segments: 2 s per step, uncut 3 s (1.50x; tried "
        "1, 2, 4, 8, 16 in 0 s, 0 s of them compiling)."
    )


def test_never_slower_than_uncut(search: Search) -> None:
    assert search({1: 3.0, 2: 3.1, 4: 3.2}) == 1
    assert search({1: 3.0, 2: 2.999, 4: 3.2}) == 1, "what scatter explains is no gain"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ten seconds pass between any two reads of a budget's clock."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(cut_budget, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("steps", "tried", "chosen"),
    [(10, [1], 1), (27, [1, 2, 4], 4), (10**4, [1, 2, 4, 8, 16], 8), (None, [1, 2, 4, 8, 16], 8)],
)
def test_a_search_takes_a_share_of_the_run_at_most(
    search: Search,
    steps: int | None,
    tried: list[int],
    chosen: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A quarter of 27 steps at 3 s each suffices for two trials of 10 s, but not for three."""
    asked: list[int] = []
    assert search({1: 3.0, 2: 2.5, 4: 2.4, 8: 2.0, 16: 2.1}, asked, steps=steps) == chosen
    assert asked == tried
    ended = [
        text
        for text in caplog.messages
        if "and finer is not tried, because that would take more than" in text
    ]
    assert len(ended) == (tried[-1] < 16)
    assert any("runs fastest cut into" in text for text in caplog.messages) == (len(tried) > 1)


@pytest.mark.usefixtures("slow")
def test_short_run_does_not_store_an_unsearched_cut(search: Search, tmp_path: Path) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}, steps=10) == 1
        assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}) == 2, "a longer run searches"
        assert search({1: 3.0, 2: 2.0}, steps=10) == 2, "a short run takes what was found"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_search_tries_one_cut_past_a_slower_one(search: Search) -> None:
    """After a cut that doesn't pay off, the search tries one finer cut."""
    asked: list[int] = []
    assert search({1: 3.0, 2: 3.1, 4: 2.5, 8: 2.6, 16: 2.6}, asked) == 4 and asked == [
        1,
        2,
        4,
        8,
        16,
    ]
    asked.clear()
    assert search({1: 3.0, 2: 3.1, 4: 3.2}, asked) == 1 and asked == [1, 2, 4]


def test_what_a_job_found_before_a_restart_is_taken(search: Search) -> None:
    found: dict[str, int] = {}
    assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}, found=found) == 2
    assert list(found.values()) == [2]
    asked: list[int] = []
    assert search({}, asked, found) == 2 and asked == [2]
    assert search({1: 1.0, 2: 2.0, 4: 2.0}, found=dict.fromkeys(found, 10**9)) == 1, (
        "no number of pieces: measured again"
    )


def test_found_cut_is_stored_with_compiled_programs(search: Search, tmp_path: Any) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    try:
        assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}) == 2
        asked: list[int] = []
        assert search({1: 3.0, 2: 2.9}, asked) == 2 and asked == [1, 2]
        asked.clear()
        assert search({1: 3.0, 2: 3.1, 4: 3.2}, asked) == 1 and asked == [1, 2, 4], (
            "slower than uncut: another link"
        )
        asked.clear()
        assert search({1: 3.3}, asked) == 1 and asked == [1], "what was found anew is kept"
        assert search({1: 9.0, 2: 7.0, 4: 6.0, 8: 6.0, 16: 6.0}) == 4, (
            "uncut takes thrice as long: another link"
        )
        (tmp_path / "cache" / "jaxcross-cuts.json").write_text("{")
        assert search({1: 1.0, 2: 2.0, 4: 2.0}) == 1, "a damaged file is measured again"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

    """A job that arrives during a search changes nothing."""


def test_job_joining_during_a_search_changes_nothing(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (control,) = FakeControl.group(1)
    node, first, second = variant_of(control), Job(control), Job(control, only=False)
    others: list[Any] = []

    def search(_: Traced, leaves: Any, *, cut: Any, build: Any, **__: Any) -> Any:
        build(cut(1))
        others.append(prepare(node, second))
        assert not any(x.is_deleted() for x in leaves)
        found = 2, build(cut(2))
        return SimpleNamespace(run=lambda: found)

    monkeypatch.setattr(prepare_module, "CutSearch", search)
    mine = prepare(node, first)
    assert (pieces_of(mine), pieces_of(others[0])) == (2, 1)
    assert asked == [1, 1, 2]
    for _ in range(2):  # each keeps its own cut, whatever ran last
        assert prepare(node, second) is others[0]
        assert node.program is others[0].program
        assert prepare(node, first) is mine
        assert node.program is mine.program
    assert (list(first.cuts.values()), list(second.cuts.values())) == ([2], [0])
    assert prepare(node, Job(control, only=False)) is others[0], "one that comes later"
    assert prepare(node, Job(control)) is mine, "the only one of a later run"
    assert prepare(node, Standalone(node.world, "step")) is mine
    assert asked == [1, 1, 2], "compiled once"


def test_job_keeps_its_cut_whatever_runs_beside_it(search: Search, asked: list[int]) -> None:
    (control,) = FakeControl.group(1)
    found: dict[str, int] = {}
    assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}, found=found) == 2
    asked.clear()
    assert pieces_of(
        prepare(variant_of(control), Job(control, found, only=False))
    ) == 2 and asked == [2]
    asked.clear()
    beside = Job(control, only=False)
    assert pieces_of(prepare(variant_of(control), beside)) == 1 and asked == [1]
    alone = Job(control, beside.cuts)
    assert pieces_of(prepare(variant_of(control), alone)) == 1 and asked == [1, 1], "not searched"


@pytest.mark.parametrize(
    ("knows", "only", "expected"),
    [({0, 1}, False, 4), ({0, 1}, True, 4), ({1}, False, 1), ({1}, True, 2)],
    ids=["both", "both, alone", "one", "one, alone"],
)
def test_a_cut_that_not_all_ranks_know_is_not_taken(
    knows: set[int], only: bool, expected: int, asked: list[int], times: dict[int, float]
) -> None:
    times.update({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5})

    def work(world: Any) -> tuple[int, list[int]]:
        node = variant_of(
            world.control, local_size=2 - world.rank
        )  # hosts with different numbers of ranks
        key = cut_tuner.cut_key(node.default, node.world)
        job = Job(world.control, {key: 4} if world.rank in knows else {}, only=only)
        return pieces_of(prepare(node, job)), list(job.cuts.values())

    number = expected if only or len(knows) == 2 else 0
    assert run_ranks(2, work) == [(expected, [number])] * 2
    assert len(asked) == (2 * 4 if expected == 2 else 2), "all search, or none"


def test_job_agrees_once_per_step_and_branch() -> None:
    """A job agrees on equal exchanges once per step, and once in its branch."""
    calls, step, other, branch = StepRegistry(), object(), object(), replace(traced(), choices=(1,))
    asked = [(traced(), step), (traced(), step), (branch, step), (branch, step), (traced(), other)]
    assert [calls.first_use(stages.cut(t), s) for t, s in asked] == [True, False, True, False, True]


def test_what_ran_on_one_rank_only_decides_nothing(asked: list[int]) -> None:
    def work(world: Any) -> int:
        node = variant_of(world.control)
        if world.rank == 1:
            node.record.chosen_cuts[node.signature] = ChosenCut(4, 0)
        return pieces_of(prepare(node, Job(world.control)))

    assert run_ranks(2, work) == [1, 1]
    assert asked == [1, 1]


def test_every_step_that_is_tried_is_a_wait_of_its_own(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog allows its timeout for one wait at a time."""
    (control,) = FakeControl.group(1)
    runs: list[Any] = []
    monkeypatch.setattr(timed_trial, "run_execution", lambda *_: runs.append(_))

    class Counting(Job):
        most = 0

        def run_on_all_ranks(self, label: str, work: Callable[[Any], Any]) -> Any:
            before = len(runs)
            result = super().run_on_all_ranks(label, work)
            self.most = max(self.most, len(runs) - before)
            return result

    job = Counting(control)
    prepare(variant_of(control), job)
    assert job.most == 1
    assert len(runs) >= 16 and len(runs) % 8 == 0, (
        "two cuts or more against the best, four steps of both"
    )
    assert len(asked) > 2
