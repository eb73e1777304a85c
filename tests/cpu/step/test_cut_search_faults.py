"""A cut search that fails on one of two ranks: no rank waits, and all choose the same cut.

Also tests the folder of stored cuts: which rank reads it, and what happens without one.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import pytest

from jaxcross._jax_compat import compilation_cache_dir
from jaxcross.program import stages
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced, trace
from jaxcross.runtime.collective_call import run_collectively
from jaxcross.step import cut_tuner, timed_trial
from jaxcross.step.cut_tuner import CutHint, CutSearch, gather_hint
from jaxcross.testing import LocalRanks
from tests.support.fakes import run_ranks
from tests.support.layers import step

ARGUMENTS = ([jnp.eye(4)] * 4, jnp.ones((2, 4)))
LEAVES = jax.tree.leaves(ARGUMENTS)
FAILURE = "rank 1 failed: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
UNCUT = (
    "`step` is not cut, because it fails on the copies of its arguments with which cuts are timed"
)
UNUSED = "fails on the copies of its arguments with which cuts are timed, so that cut is not used"
Fails = Callable[[Program, int], bool]


@functools.cache
def traced() -> Traced:
    return trace(step, ARGUMENTS, axes={"batch": 2}, wire=LocalRanks(), donate_argnums=(0,))


def out_of_memory() -> NoReturn:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand a long table")


def compile_for(world: Any, program: Program, fails: Fails) -> Compiled:
    """Returns a program whose exchanges wait for the other rank.

    A computation for which `fails` returns true raises on rank 1.
    """
    compiled = stages.compile(program, LEAVES)

    def broken(runnable: Any) -> Any:
        segment, pieces = runnable.segment, len(program.collectives)

        def call(*args: Any) -> Any:
            if segment.kind == "collective":
                world.control.meet(f"{pieces} {segment.index}", None)
            elif world.rank == 1 and fails(program, segment.index):
                out_of_memory()
            return runnable.call(*args)

        return replace(runnable, call=call)

    return replace(compiled, runnables=tuple(map(broken, compiled.runnables)))


@pytest.fixture
def found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Searches on two ranks, in a job or alone, and returns what rank 0 logs.

    Both ranks end up with the uncut step.
    """
    monkeypatch.setattr(
        cut_tuner, "_QUIET_S", float("inf")
    )  # no progress lines, however slow the machine is

    def run(
        in_job: bool,
        fails: Fails = lambda *_: False,
        compiles: Callable[[Program], bool] = lambda _: True,
        kept: tuple[int, float] | None = None,
    ) -> list[str]:
        def work(world: Any) -> int:
            def build(program: Program) -> Compiled:
                if world.rank == 1 and not compiles(program):
                    out_of_memory()
                return compile_for(world, program, fails)

            def run_on_all_ranks(_: str, work: Callable[[Any], Any]) -> Any:
                return run_collectively(work, world.control) if in_job else work(world.control)

            with ThreadPoolExecutor(1) as world.exchanger:
                pieces, compiled = CutSearch(
                    traced(),
                    LEAVES,
                    world=world,
                    cut=lambda n: stages.cut(traced(), n, bucket_bytes=0),
                    build=build,
                    run_on_all_ranks=run_on_all_ranks,
                    hint=CutHint(key="", resumed=None, in_process=None, is_first=True, cached=kept),
                ).run()
            assert world.control.allgather_text("at the same place") == ["at the same place"] * 2
            assert pieces == len(compiled.program.collectives)
            return pieces

        with caplog.at_level(logging.WARNING, "jaxcross"):
            assert run_ranks(2, work) == [1, 1]
        assert not any(x.is_deleted() for x in LEAVES)
        return [
            text for text in caplog.messages if "is compiled and timed in several cuts" not in text
        ]

    return run


@pytest.mark.integration
@pytest.mark.parametrize("in_job", [True, False])
@pytest.mark.parametrize("after", [0, 3])
def test_copies_too_large_on_one_rank_leave_step_uncut(
    in_job: bool, after: int, found: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If copies don't fit in memory on one rank, the step stays uncut."""
    made: list[Any] = []

    def copy(x: Any) -> Any:
        if threading.current_thread().name == "rank-1":
            if len(made) == after:
                out_of_memory()
            made.append(x)
        return x.copy()

    monkeypatch.setattr(timed_trial, "jnp", SimpleNamespace(copy=copy))
    assert found(in_job) == [f"{UNCUT}: {FAILURE}"]
    assert len(made) == after


@pytest.mark.integration
@pytest.mark.parametrize("in_job", [True, False])
def test_cut_not_compilable_on_one_rank_is_not_tried(
    in_job: bool, found: Callable[..., list[str]]
) -> None:
    notices = found(in_job, compiles=lambda program: len(program.collectives) == 1)
    assert notices == [
        f"`step` with `cut={n}` cannot be compiled, and is not tried: {FAILURE}" for n in (2, 4)
    ]


@pytest.mark.integration
def test_stored_cut_not_compilable_is_not_retried(found: Callable[..., list[str]]) -> None:
    notices = found(True, compiles=lambda program: len(program.collectives) == 1, kept=(4, 1.0))
    assert notices == [
        f"`step` with `cut={n}` cannot be compiled, and is not tried: {FAILURE}" for n in (4, 2)
    ]


@pytest.mark.integration
def test_stored_cut_failing_on_copies_is_not_retried(found: Callable[..., list[str]]) -> None:
    *notices, chosen = found(True, lambda program, _: len(program.collectives) > 1, kept=(4, 1.0))
    assert notices == [f"`step` with `cut={n}` {UNUSED}: {FAILURE}" for n in (4, 2)]
    assert chosen.startswith("`step` runs fastest cut into 1 exchange segment: ")


@pytest.mark.integration
@pytest.mark.parametrize("in_job", [True, False])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_cut_that_fails_on_one_rank_is_not_taken(
    in_job: bool, which: int, found: Callable[..., list[str]]
) -> None:
    """The failing rank still makes the remaining exchanges, so the other rank waits in none."""

    def fails(program: Program, index: int) -> bool:
        computes = [s.index for s in program.segments if s.kind == "compute"]
        return len(program.collectives) > 1 and index == computes[which]

    *notices, chosen = found(in_job, fails)
    assert notices == [f"`step` with `cut={n}` {UNUSED}: {FAILURE}" for n in (2, 4)]
    assert chosen.startswith("`step` runs fastest cut into 1 exchange segment: ")


@pytest.mark.integration
@pytest.mark.parametrize("in_job", [True, False])
def test_step_failing_uncut_on_one_rank_stays_uncut(
    in_job: bool, found: Callable[..., list[str]]
) -> None:
    notices = found(in_job, lambda program, index: len(program.collectives) == 1)
    assert notices == [f"{UNCUT}: {FAILURE}"]


@pytest.mark.integration
def test_late_failure_in_the_search_leaves_step_uncut(
    found: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes in the last race, between uncut and the fastest, whichever that is."""
    times = [(3.0, 2.0), (2.0, 1.0), (float("inf"), float("inf"))]
    monkeypatch.setattr(
        cut_tuner, "_race", lambda rivals, traced, leaves, world, *_: next(left[world.rank])
    )
    left = [iter(times), iter(times)]
    assert found(True) == []


@pytest.mark.parametrize("forbidden", [0, 1])
def test_kept_cuts_are_read_by_rank_0_alone(
    forbidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_tuner, "compilation_cache_dir", lambda: tmp_path)
    cut_tuner.CutCache("key").write(4, 0.5)
    stat = Path.stat

    def checked(path: Path, **options: Any) -> Any:
        if threading.current_thread().name == f"rank-{forbidden}":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", checked)
    cached = run_ranks(
        2,
        lambda world: (
            gather_hint(
                "key", rank=world.rank, run_on_all_ranks=lambda _, work: work(world.control)
            ).cached
        ),
    )
    assert cached == [None if forbidden == 0 else (4, 0.5)] * 2


@pytest.mark.parametrize(
    ("folder", "enabled", "expected"),
    [
        (None, True, None),
        ("", True, None),
        ("gs://bucket/x", True, None),
        ("/x", False, None),
        ("/x", True, Path("/x")),
        ("x", True, Path("x")),
    ],
)
def test_cuts_are_stored_in_jax_local_cache_folder(
    folder: str | None, enabled: bool, expected: Path | None
) -> None:
    """Cuts are stored where JAX stores its compiled programs, if that's a local folder."""
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = [jax.config.values[name] for name in names]
    try:
        for name, value in zip(names, (folder, enabled), strict=True):
            jax.config.update(name, value)
        assert compilation_cache_dir() == expected
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
