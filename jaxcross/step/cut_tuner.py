"""Finds the fastest cut of a step that runs alone under `cut="auto"`, by timing several.

If we cut the backward pass, its first gradients can be exchanged while the remaining ones are still
being computed (wait-free backpropagation). On the other hand, XLA can't fuse operations across a
cut, more intermediate values have to stay in memory, and each segment costs a dispatch. Whether a
cut pays off depends on the network between the ranks, so we measure it. The timed steps run on
copies of the arguments, so they don't affect the training.
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
_WARM_UP_STEPS = 2  # per cut, untimed: the first steps are slower, as they get memory from the OS
_TIMED_STEPS = 2
_LARGEST_BYTES = 2**24  # a larger cache file can't be ours, so we don't read it
_SAME_STEP_RATIO = 1.25  # if uncut step times differ by more, the network or machine has changed
_QUIET_S = 5.0  # minimum time between two progress messages of a search
_WORTH = 0.99  # a finer cut must save at least 1%, which is more than the measurement noise


@dataclass(frozen=True, slots=True, kw_only=True)
class CutHint:
    """What the ranks know about a step's cut before they run it.

    All fields except `key` are identical across ranks.

    Attributes:
        key: Identifies the step on this rank.
        resumed: The number of segments that this job used before a restart. We keep it, because a
            different cut may round differently, and a resumed run must continue bit for bit. None
            if the number isn't known, or differs between ranks.
        in_process: The number of segments that the first run in this process used. None if there
            was no such run, or if the number differs between ranks.
        is_first: Whether no rank has run this step in its process before.
        cached: The number of segments that an earlier process found to be the fastest, and its time
            for an uncut step in seconds. Read from JAX's folder of compiled programs.
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
    """Identifies this rank's step, device kind and number of ranks, in the same way in every run.

    Includes both the number of all ranks and the number of ranks on this node.
    """
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
    """Combines what each rank knows about the step's cut into a hint that's the same on all ranks.

    Ranks may know different things, because their shapes, neighbours and files may differ. Waits
    for all ranks.

    Args:
        key: See `cut_key`.
        rank: The rank of this process.
        run_on_all_ranks: Runs work that communicates.
        resumed: This rank's value for `CutHint.resumed`.
        in_process: This rank's value for `CutHint.in_process`.
        steps: This rank's value for `CutHint.steps`.
    """
    if resumed is not None and not 0 <= resumed <= max(SEGMENT_COUNTS):
        resumed = None

    # Earlier runs may have stored a cut in a file. Only rank 0 reads it, and it does so before
    # calling `run_on_all_ranks`: while that function runs, no job can exchange anything, so reading
    # from a slow disk would delay all jobs.
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
    """The uncut step or the best cut so far fails on the copies, so there's nothing to compare."""


@final
class CutSearch:
    """One rank's part in a search for the fastest of a few cuts.

    A cut divides the step's exchanges among a number of segments. The search doubles this number
    until two finer cuts in a row bring no speed-up. If the length of the run is known, the search
    may take only a fraction of that time (`Budget`), because a short run would otherwise spend its
    time on compiling cuts.

    At the end, the best cut is timed against the uncut step, and if it turns out to be slower, the
    step stays uncut. A cut is rejected if compiling or running it fails on any rank. If even the
    uncut step can't be timed, e.g. because there isn't enough memory for copies of its arguments,
    there's nothing to compare with, so the step stays uncut.

    All ranks must call `run` for the same step, because timing a step includes its exchanges, and
    `run` waits for all of them. The time of a cut is that of the slowest rank. All ranks receive
    this time, so they all choose the same cut.

    If JAX keeps compiled programs (`jax_compilation_cache_dir`), we store the choice in the same
    folder, together with the time of an uncut step. By the next run, the network may have changed.
    So that run first times the stored cut against the uncut step. If the cut has become slower than
    the uncut step, or if the uncut step's time has changed by more than a quarter, it searches
    again.

    Args:
        traced: The step.
        leaves: Its flat arguments, which are copied if the step may overwrite them.
        world: All ranks.
        cut: Returns the program with the given number of segments.
        build: Returns a program's executables, after all ranks have agreed on the program.
        run_on_all_ranks: As for `gather_hint`. Called once for every step that is tried.
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
        self._traced = traced
        self._leaves = leaves
        self._world = world
        self._cut = cache(cut)
        self._build = build
        self._run_on_all_ranks = run_on_all_ranks
        self._hint = hint
        self._budget = Budget(hint.steps, run_on_all_ranks)
        # Executables by number of segments, or None if the cut fails on some rank.
        self._compiled: dict[int, Compiled | None] = {}
        self._compiling_s = 0.0
        self._uncut_s: float | None = None  # per step, once it has been timed
        self._tried = [1]
        self._complete = True  # becomes False if the budget ends the search early

    def run(self) -> tuple[int, Compiled]:
        """Searches, and returns the fastest cut's number of segments and its executables.

        Waits for all ranks.
        """
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
        begin_s = time.perf_counter()
        self._compiling_s = 0.0
        n_segments, best = self._try_finer(uncut)
        gain = 1.0
        if best is not uncut:
            # During the search, each cut was only timed against the best one before it, so the
            # winner may never have been compared with the uncut step itself. So we time these two
            # against each other now, and report the speed-up that we measure here.
            self._uncut_s, best_s = self._race(n_segments, uncut, best)
            gain = self._uncut_s / best_s
            if gain < 1:
                n_segments = 1
                best = uncut
                gain = 1.0
        if self._uncut_s is not None:
            self._report(n_segments, self._uncut_s, gain, begin_s)
        return n_segments, best

    def _check_cached(self, uncut: Compiled) -> tuple[int, Compiled] | None:
        """Returns the cached cut if it's still at least as fast as the uncut step.

        Returns None if it's slower, or if the uncut step's time has changed too much since the cut
        was stored.
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
        """Races each finer cut against the best cut so far, and returns the winner.

        Stops after two cuts in a row that brought no speed-up, or when the budget is used up.
        """
        n_best = 1
        best = uncut
        missed = False
        finest = len(self._cut(1).collectives)
        logged_s = time.perf_counter()
        name = self._traced.name
        for n in SEGMENT_COUNTS[1:]:
            # If exchanges depend on one another, a step can't be cut into arbitrarily many
            # segments, so asking for more segments (`n`) doesn't always give more. If it doesn't,
            # there's nothing new to time. All ranks skip the same numbers, because their programs
            # have the same exchanges.
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
            rival = self._built(n)
            best_s = math.nan
            rival_s = math.inf
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
                n_best = n
                best = rival
                missed = False
            elif missed:
                break
            else:
                missed = True
        return n_best, best

    def _built(self, n: int) -> Compiled | None:
        """Returns a cut's executables, or None if compiling them fails on some rank.

        Waits for all ranks when it's first called for this cut.
        """
        if n in self._compiled:
            return self._compiled[n]
        compiled: Compiled | None = None
        error_text = ""
        start_s = time.perf_counter()
        try:
            compiled = self._build(self._cut(n))
        # If compilation fails on this rank alone, we mustn't simply raise, because the other ranks
        # would wait for us. Instead, all ranks exchange their error texts below, and reject the cut
        # together. If the ranks' exchanges differ, `build` raises a different error, but that one
        # is raised on all ranks.
        except JaxRuntimeError as error:
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
        if self._complete:  # otherwise we store nothing, so that a longer run can search further
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
    """Times one or two cuts, alternating between them, and returns each one's seconds per step.

    A cut's time is that of its fastest step, taken from the rank on which this is slowest. If the
    second cut fails on some rank, its time is infinite. If the first cut fails, there's nothing to
    compare the second one with, so both times are infinite.

    Each timed step is a separate call of `run_on_all_ranks`, rather than one call for all steps
    together. A watchdog limits how long an exchange may take, so that a hanging run is noticed.
    This way, its limit applies to a single step rather than to the whole comparison.
    """
    running: list[Compiled | None] = [*rivals]
    times_ns: list[list[int]] = [[] for _ in rivals]
    for repeat in range(_WARM_UP_STEPS + _TIMED_STEPS):
        for n, compiled in enumerate(running):
            if compiled is None:
                continue
            elapsed = run_on_all_ranks(
                label, lambda control, its=compiled: time_step(its, traced, leaves, world, control)
            )
            if isinstance(elapsed, int):
                if repeat >= _WARM_UP_STEPS:
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
    # There's only an all-reduce for the minimum, so we negate the times to get the maximum.
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
    """The cuts that earlier runs found, in a file in JAX's folder of compiled programs.

    Only rank 0 reads and writes this file.
    """

    def __init__(self, key: str) -> None:
        folder = compilation_cache_dir()
        self._file = None if folder is None else folder / "jaxcross-cuts.json"
        self._key = key

    def read(self) -> tuple[int, float] | None:
        """Returns the stored number of segments, and how long an uncut step took at that time."""
        match self._all().get(self._key):
            case [int(n), float(uncut_s)] if type(n) is int and n in SEGMENT_COUNTS and uncut_s > 0:
                return n, uncut_s
        return None

    def write(self, n_segments: int, uncut_s: float) -> None:
        """Stores a cut. If the file can't be written, only logs a warning."""
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
            return {}  # no file, or a damaged or unreadable one: then the search is repeated
        return found if isinstance(found, dict) else {}
