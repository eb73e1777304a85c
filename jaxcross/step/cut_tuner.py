"""Finds the fastest cut of a step that runs alone under `cut="auto"`, by trying several.

Cutting the backward pass lets its first gradients travel while the rest is computed (wait-free
backpropagation), but it costs fusion, memory, and one dispatch per segment. Which effect wins
depends on the network, so we time the cuts. That happens on copies of the arguments, so the
training itself isn't affected.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from jaxcross._files import write_whole
from jaxcross._jax_compat import compilation_cache_dir
from jaxcross.program import Compiled, Program, Traced, program_digest
from jaxcross.step.cut_budget import SHARE, Budget
from jaxcross.step.timed_trial import gather_failures, summary, time_step
from jaxcross.world import RunOnAllRanks, World, gather

_log = logging.getLogger("jaxcross")
SEGMENT_COUNTS = (1, 2, 4, 8, 16)
_WARM_UP_STEPS = 2  # per rival, alternating; the first steps get their memory from the kernel
_TIMED_STEPS = 2
_LARGEST_BYTES = 2**24  # of the cache file; a larger one isn't ours
_SAME_STEP_RATIO = 1.25  # largest ratio of uncut step times on one network and machine
_QUIET_S = 5.0  # between two progress messages of a search
_WORTH = 0.99  # a finer cut must save more than the noise in measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class CutHint:
    """What is known about a step's cut before it runs.

    All fields but `key` are the same on every rank.

    Attributes:
        key: Identifies the step on this rank.
        resumed: The number of segments that this job used before a restart. A different cut may
            round differently, and a resumed run must continue bit for bit. None if the number isn't
            known, or isn't the same on all ranks.
        in_process: The number of segments that the first run in this process used; None as for
            `resumed`.
        is_first: Whether nothing ran before in this process, on any rank.
        cached: A number of segments, and the seconds of an uncut step, from JAX's folder of
            compiled programs.
        steps: The number of steps that the job has left, on the rank with the fewest; None if no
            rank knows it.
    """

    key: str
    resumed: int | None
    in_process: int | None
    is_first: bool
    cached: tuple[int, float] | None
    steps: int | None = None


def cut_key(program: Program, world: World) -> str:
    """Returns a key for this rank's step, machine and neighbours that is stable across runs."""
    return (
        f"{program_digest(program)} {world.size} {world.local_size} {jax.devices()[0].device_kind}"
    )


def gather_hint(
    key: str,
    *,
    rank: int,
    run_on_all_ranks: RunOnAllRanks,
    resumed: int | None = None,
    in_process: int | None = None,
    steps: int | None = None,
) -> CutHint:
    """Combines what all ranks know, since their shapes, neighbours and files may differ.

    Waits for all ranks.

    Args:
        key: See `cut_key`.
        rank: The rank of this process.
        run_on_all_ranks: Runs work that communicates.
        resumed: This rank's value; see `CutHint`.
        in_process: Likewise.
        steps: Likewise.
    """
    if resumed is not None and not 0 <= resumed <= max(SEGMENT_COUNTS):
        resumed = None

    # Only rank 0 reads its file. It does so before `run_on_all_ranks`, because otherwise the
    # exchanges of all jobs would wait for the disk.
    cached = CutCache(key).read() if rank == 0 else None
    own = [resumed, in_process, cached, steps]
    gathered = run_on_all_ranks("cut", lambda control: gather(control, own))
    resumed, in_process, cached, _ = gathered[0]
    if any(each[0] != resumed for each in gathered):
        resumed = None
    if any(each[1] != in_process for each in gathered):
        in_process = None
    return CutHint(
        key=key,
        resumed=resumed,
        in_process=in_process,
        is_first=all(each[1] is None for each in gathered),
        cached=None if cached is None else (cached[0], cached[1]),
        steps=min((each[3] for each in gathered if each[3] is not None), default=None),
    )


class _UncutError(Exception):
    """Nothing can be timed: the uncut step, or the best cut so far, fails on the copies."""


@final
class CutSearch:
    """A search for the fastest of a few cuts, on one rank.

    Each candidate is twice as fine as the previous one, until two finer cuts in a row don't pay
    off. If the length of the run is known, the search ends before it takes more than a fraction of
    it (`Budget`), so a short run stays uncut.

    A cut isn't taken if it loses a final race against the uncut step, or if compiling or trying it
    fails on some rank. If uncut steps can't be tried, e.g. because the copies don't fit into
    memory, the step stays uncut.

    `run` waits for all ranks, each of which must call it with the same step. All decisions follow
    from numbers that the ranks share: the slowest rank's times count, so all ranks choose the same
    cut.

    If JAX keeps compiled programs (`jax_compilation_cache_dir`), the choice is stored alongside
    them with the seconds of an uncut step. The network may have changed by the next run. So a
    cached cut is raced once against the uncut step, and the search is repeated if the cut is
    slower, or if the time of the uncut step has changed by more than a quarter.

    Args:
        traced: The step.
        leaves: Its flat arguments; copied if the step may overwrite them.
        world: All ranks.
        cut: Number of segments -> program.
        build: Program -> executables, once all ranks have agreed on it.
        run_on_all_ranks: As for `gather_hint`; called once for every step that is tried.
        hint: From `gather_hint`.
    """

    def __init__(
        self,
        traced: Traced,
        leaves: Sequence[Any],
        *,
        world: World,
        cut: Callable[[int], Program],
        build: Callable[[Program], Compiled],
        run_on_all_ranks: RunOnAllRanks,
        hint: CutHint,
    ) -> None:
        self._traced, self._leaves, self._world = traced, leaves, world
        self._cut = cache(cut)
        self._build, self._run_on_all_ranks, self._hint = build, run_on_all_ranks, hint
        self._budget = Budget(hint.steps, run_on_all_ranks)
        self._compiled: dict[
            int, Compiled | None
        ] = {}  # by number of segments; None if it fails on some rank
        self._compiling_s = 0.0
        self._uncut_s: float | None = None  # per step
        self._tried = [1]
        self._complete = True  # unless the budget ends the search

    def run(self) -> tuple[int, Compiled]:
        """Returns the fastest cut's number of segments and executables. Waits for all ranks."""
        uncut = self._compiled[1] = self._build(self._cut(1))
        try:
            return self._run(uncut)
        except _UncutError:
            return 1, uncut

    def _run(self, uncut: Compiled) -> tuple[int, Compiled]:
        cached = self._check_cached(uncut)
        if cached is not None:
            return cached
        if self._hint.steps is not None:
            if self._uncut_s is None:
                self._uncut_s, *_ = self._race(1, uncut)
            self._budget.set(self._uncut_s)
        begin_s, self._compiling_s = time.perf_counter(), 0.0
        n_segments, best = self._try_finer(uncut)
        gain = 1.0
        if best is not uncut:
            # It has beaten coarser cuts one by one. Now it must also beat the uncut step itself.
            # This race also measures the speed-up.
            self._uncut_s, best_s = self._race(n_segments, uncut, best)
            gain = self._uncut_s / best_s
            if gain < 1:
                n_segments, best, gain = 1, uncut, 1.0
        if self._uncut_s is not None:
            self._report(n_segments, self._uncut_s, gain, begin_s)
        return n_segments, best

    def _check_cached(self, uncut: Compiled) -> tuple[int, Compiled] | None:
        """Returns the cached cut if it's still at least as fast as the uncut step.

        Returns None as well if the uncut step's time has changed too much since.
        """
        if self._hint.cached is None:
            return None
        n_segments, before_s = self._hint.cached
        candidate = self._built(n_segments)
        if candidate is None:
            return None
        self._uncut_s, cut_s = self._race(n_segments, uncut, candidate)
        unchanged = max(self._uncut_s, before_s) <= _SAME_STEP_RATIO * min(self._uncut_s, before_s)
        if unchanged and (candidate is uncut or cut_s <= self._uncut_s):
            return n_segments, candidate
        if math.isinf(cut_s):
            self._compiled[n_segments] = None
        else:
            _log.warning(
                "`%s` was cut into %d exchange segment%s before, when an uncut step took %.4g s. "
                "Now an uncut step takes %.4g s, and with that cut %.4g s: cuts are tried again.",
                self._traced.name,
                n_segments,
                "s" * (n_segments > 1),
                before_s,
                self._uncut_s,
                cut_s,
            )
        return None

    def _try_finer(self, uncut: Compiled) -> tuple[int, Compiled]:
        """Races each finer cut against the best one so far.

        Ends when two in a row don't pay off, or the budget is used up.
        """
        n_best, best, missed = 1, uncut, False
        finest, logged_s, name = (
            len(self._cut(1).collectives),
            time.perf_counter(),
            self._traced.name,
        )
        for n in SEGMENT_COUNTS[1:]:
            # If exchanges depend on one another, there's little to cut, so a larger number may not
            # give more segments. All ranks count the same collectives.
            n_collectives = len(self._cut(n).collectives)
            if n_collectives <= finest:
                continue
            if not self._budget.allows_another():
                _log_on_rank_0(self._world, _too_long(name, n, self._budget))
                self._complete = False
                break
            if self._tried == [1]:
                text = (
                    f"`{name}` is compiled and timed in several cuts; a number as `cut` would save "
                    "that time."
                )
                _log_on_rank_0(self._world, text)
            finest = n_collectives
            self._tried.append(n)
            rival, best_s, rival_s = self._built(n), math.nan, math.inf
            if rival is not None:
                best_s, rival_s = self._race(n, best, rival)
                if self._uncut_s is None:  # the first race is against the uncut step
                    self._uncut_s = best_s
                now_s = time.perf_counter()
                if now_s - logged_s > _QUIET_S:
                    logged_s = now_s
                    text = (
                        f"`{name}` with `cut={n}`: {rival_s:.4g} s a step, {best_s:.4g} s with "
                        f"`cut={n_best}`."
                    )
                    _log_on_rank_0(self._world, text)
            if rival is not None and rival_s <= _WORTH * best_s:
                n_best, best, missed = n, rival, False
            elif missed:
                break
            else:
                missed = True
        return n_best, best

    def _built(self, n: int) -> Compiled | None:
        """Compiles a cut; None if that fails on some rank. Waits for all ranks the first time."""
        if n in self._compiled:
            return self._compiled[n]
        compiled, error_text, start_s = None, "", time.perf_counter()
        try:
            compiled = self._build(self._cut(n))
        except (
            JaxRuntimeError
        ) as error:  # an agreement's errors are raised on all ranks, and end the step
            error_text = summary(error)
        self._compiling_s += time.perf_counter() - start_s
        failed = self._run_on_all_ranks(
            f"cut={n}", lambda control: gather_failures(control, error_text)
        )
        if failed:
            text = (
                f"`{self._traced.name}` with `cut={n}` cannot be compiled, and is not tried: "
                f"{failed}"
            )
            _log_on_rank_0(self._world, text)
            compiled = None
        self._compiled[n] = compiled
        return compiled

    def _race(self, n: int, *rivals: Compiled) -> tuple[float, ...]:
        seconds = _race(
            rivals, self._traced, self._leaves, self._world, self._run_on_all_ranks, f"cut={n}"
        )
        if math.isinf(seconds[0]):
            raise _UncutError
        return seconds

    def _report(self, n_segments: int, uncut_s: float, gain: float, begin_s: float) -> None:
        if self._world.rank != 0:
            return
        if self._complete:  # otherwise a longer run may still search
            CutCache(self._hint.key).write(n_segments, uncut_s)
        if self._complete or len(self._tried) > 1:
            _log.warning(
                "`%s` runs fastest cut into %d exchange segment%s: %.4g s a step, uncut %.4g s "
                "(%.2fx; tried %s in %.0f s, %.0f s of them compiling).",
                self._traced.name,
                n_segments,
                "s" * (n_segments > 1),
                uncut_s / gain,
                uncut_s,
                gain,
                ", ".join(map(str, self._tried)),
                time.perf_counter() - begin_s,
                self._compiling_s,
            )


def _too_long(name: str, n: int, budget: Budget) -> str:
    return (
        f"`{name}` with `cut={n}` and finer is not tried: that would take more than "
        f"{budget.limit_s:.2g} s, {SHARE:.0%} of the time of this loop's {budget.steps} steps. If "
        "the run is longer than the loop, give a number as `cut`."
    )


def _race(
    rivals: tuple[Compiled, ...],
    traced: Traced,
    leaves: Sequence[Any],
    world: World,
    run_on_all_ranks: RunOnAllRanks,
    label: str,
) -> tuple[float, ...]:
    """Returns the seconds per step of each rival, one or two, which take turns.

    A rival's time is its best step's, on the slowest rank. If the second rival fails on some rank,
    its time is infinite; if the first one fails, both are.

    Each step is a separate call of `run_on_all_ranks`, so the watchdog allows as much time for each
    as for any other exchange.
    """
    running: list[Compiled | None] = [*rivals]
    times_ns: list[list[int]] = [[] for _ in rivals]
    for turn in range(_WARM_UP_STEPS + _TIMED_STEPS):
        for n, compiled in enumerate(running):
            if compiled is None:
                continue
            elapsed = run_on_all_ranks(
                label, lambda control, its=compiled: time_step(its, traced, leaves, world, control)
            )
            if isinstance(elapsed, int):
                if turn >= _WARM_UP_STEPS:
                    times_ns[n].append(elapsed)
            elif n == 0:
                _log_on_rank_0(
                    world, f"`{traced.name}` is not cut, as it fails on copies: {elapsed}"
                )
                return (math.inf,) * len(rivals)
            else:
                _log_on_rank_0(
                    world,
                    f"`{traced.name}` with `{label}` fails on copies, and is not taken: {elapsed}",
                )
                running[1] = None
    # The minimum of the negated times is the slowest rank's.
    best = np.array([-min(found, default=0) for found in times_ns], np.int64)
    slowest = -run_on_all_ranks(label, lambda control: control.allreduce_min(best))
    pairs = zip(running, slowest, strict=True)
    return tuple(
        math.inf if compiled is None else float(elapsed) / 1e9 for compiled, elapsed in pairs
    )


def _log_on_rank_0(world: World, text: str) -> None:
    if world.rank == 0:
        _log.warning("%s", text)


class CutCache:
    """Cuts found by earlier runs, in a file in JAX's folder of compiled programs.

    Only rank 0 reads and writes it.
    """

    def __init__(self, key: str) -> None:
        folder = compilation_cache_dir()
        self._file = None if folder is None else folder / "jaxcross-cuts.json"
        self._key = key

    def read(self) -> tuple[int, float] | None:
        """Returns the number of segments, and the seconds of an uncut step at that time."""
        match self._all().get(self._key):
            case [int(n), float(uncut_s)] if type(n) is int and n in SEGMENT_COUNTS and uncut_s > 0:
                return n, uncut_s
        return None

    def write(self, n_segments: int, uncut_s: float) -> None:
        """Stores both. Only warns if the file can't be written."""
        if self._file is None:
            return
        content = json.dumps({**self._all(), self._key: [n_segments, uncut_s]}, indent=1)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, content, durable=False, shared=True)
        except OSError as error:
            _log.warning("The cut that was found cannot be stored in `%s`: %s", self._file, error)

    def _all(self) -> dict[str, object]:
        if self._file is None:
            return {}
        try:
            if self._file.stat().st_size > _LARGEST_BYTES:
                return {}
            found = json.loads(self._file.read_text())
        except (ValueError, OSError, RecursionError):
            return {}  # no file, or a damaged or unreadable one: the search is repeated
        return found if isinstance(found, dict) else {}
