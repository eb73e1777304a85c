"""`cut="auto"`: finds the fastest cut of a step that runs alone by timing several.

Cutting the backward pass lets us exchange the first gradients while the rest are still being
computed (wait-free backpropagation). On the other hand, XLA can't fuse operations across a cut,
more intermediate values have to stay in memory, and every segment costs a dispatch. Whether a cut
pays off depends on the network between the ranks, so we measure it. To keep this from affecting the
training, the timed steps run on copies of the arguments.
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
_LARGEST_BYTES = 2**24  # a cache file larger than this can't be ours, so we ignore it
_SAME_STEP_RATIO = 1.25  # if uncut step times differ by more, the network or machine has changed
_QUIET_S = 5.0  # minimum time between progress messages of a search
_WORTH = 0.99  # a finer cut must save at least 1%, which is more than the measurement noise


@dataclass(frozen=True, slots=True, kw_only=True)
class CutHint:
    """What the ranks know about the cut of a step before running it.

    All fields except `key` are identical across ranks.

    Attributes:
        key: Identifies the step on this rank.
        resumed: Number of segments this job used before it was restarted. We stick to it because a
            different cut may round differently, and a resumed run has to continue bit for bit. None
            if unknown, or if the ranks have different values.
        in_process: Number of segments used by the first run in this process. None if there hasn't
            been any, or if the ranks have different values.
        is_first: Whether no rank has run this step in its current process yet.
        cached: Number of segments that an earlier process found to be fastest, and how long an
            uncut step took at the time, in seconds. Read from JAX's compilation cache folder.
        steps: Number of steps the job has left, taken from the rank with the fewest. None if no
            rank knows.
    """

    key: str
    resumed: int | None
    in_process: int | None
    is_first: bool
    cached: tuple[int, float] | None
    steps: int | None = None


def cut_key(program: Program, world: World) -> str:
    """Identifies this rank's step, device kind and number of ranks, consistently across runs.

    It covers both the total number of ranks and the number of ranks on this node.
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
    """Combines what each rank knows about a step's cut into a hint that's identical on all ranks.

    Shapes, neighbours and files can differ between ranks, so they may know different things. Waits
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

    # An earlier run may have stored a cut in a file. Only rank 0 reads it, and it does so before
    # calling `run_on_all_ranks`: no job can exchange anything while that function runs, so a slow
    # disk would hold up every job.
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
    """The uncut step or the best cut so far fails on copies, so there's no baseline."""


@final
class CutSearch:
    """Searches for the fastest cut, together with the other ranks.

    A cut splits the step's exchanges into a number of segments. The search keeps doubling this
    number until two finer cuts in a row haven't helped. If the length of the run is known, the
    search is limited to a fraction of it (`Budget`), because a short run would otherwise spend most
    of its time compiling cuts.

    At the end, the best cut is timed against the uncut step; if it turns out slower, the step stays
    uncut. A cut is rejected if it fails to compile or run on any rank. If not even the uncut step
    can be timed, e.g. because there isn't enough memory for copies of its arguments, we have
    nothing to compare with and the step stays uncut as well.

    All ranks must call `run` at the same step, since timing a step includes its exchanges and `run`
    waits for all ranks. A cut is as fast as it is on the slowest rank. Every rank receives that
    time, so they all pick the same cut.

    If JAX has a compilation cache (`jax_compilation_cache_dir`), we store the result there, along
    with the time of an uncut step. The network may have changed by the next run, so that run times
    the stored cut against the uncut step before using it. If the cut is slower than the uncut step
    by now, or if the uncut step's time has changed by more than a quarter, it searches again.

    Args:
        traced: The step.
        leaves: Its flat arguments. Those that the step may overwrite are copied.
        world: All ranks.
        cut: Returns the program with the given number of segments.
        build: Compiles a program once all ranks have agreed on it.
        run_on_all_ranks: As in `gather_hint`. Called once for each timed step.
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
        # Executables by number of segments; None for cuts that fail on some rank.
        self._compiled: dict[int, Compiled | None] = {}
        self._compiling_s = 0.0
        self._uncut_s: float | None = None  # per step, once it has been timed
        self._tried = [1]
        self._complete = True  # becomes False if the budget ends the search early

    def run(self) -> tuple[int, Compiled]:
        """Runs the search. Returns the fastest cut's number of segments and its executables.

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
            # The search only timed each cut against the best one before it, so the winner may never
            # have raced the uncut step directly. Do that now, and report the speed-up measured
            # here.
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
        """Returns the cached cut if it still holds up, i.e. it's at least as fast as the uncut
        step.

        Returns None if it's slower by now, or if the uncut step's time has changed too much since.
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
                "Now an uncut step takes %.4g s, and with that cut %.4g s, so cuts are tried again "
                "to find the fastest.",
                self._traced.name,
                n_segments,
                "s" * (n_segments > 1),
                before_s,
                self._uncut_s,
                cut_s,
            )
        return None

    def _try_finer(self, uncut: Compiled) -> tuple[int, Compiled]:
        """Races finer and finer cuts against the best cut so far, and returns the winner.

        Stops once two cuts in a row haven't helped, or when the budget is exhausted.
        """
        n_best = 1
        best = uncut
        missed = False
        finest = len(self._cut(1).collectives)
        logged_s = time.perf_counter()
        name = self._traced.name
        for n in SEGMENT_COUNTS[1:]:
            # Exchanges that depend on one another limit how finely a step can be cut, so asking for
            # more segments (`n`) doesn't always yield more. In that case there's nothing new to
            # time. All ranks skip the same values of `n`, because their programs have the same
            # exchanges.
            n_collectives = len(self._cut(n).collectives)
            if n_collectives <= finest:
                continue
            if not self._budget.allows_another():
                _log_on_rank_0(self._world, _too_long(name, n, self._budget))
                self._complete = False
                break
            if self._tried == [1]:
                text = (
                    f"`{name}` is compiled and timed in several cuts to find the fastest. To save "
                    "that time, pass a number as `cut`."
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
                        f"`{name}` with `cut={n}`: {rival_s:.4g} s per step, {best_s:.4g} s with "
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
        """Returns a cut's executables, or None if compilation fails on some rank.

        The first call for a cut waits for all ranks.
        """
        if n in self._compiled:
            return self._compiled[n]
        compiled: Compiled | None = None
        error_text = ""
        start_s = time.perf_counter()
        try:
            compiled = self._build(self._cut(n))
        # If compilation fails only on this rank, we can't just raise, because the other ranks would
        # be left waiting for us. Instead, all ranks exchange their errors below and reject the cut
        # together. If the ranks' exchanges differ, `build` raises a different error, but that
        # happens on every rank.
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
        if self._complete:  # otherwise store nothing, so that a longer run can search further
            CutCache(self._hint.key).write(n_segments, uncut_s)
        if self._complete or len(self._tried) > 1:
            _log.warning(
                "`%s` runs fastest cut into %d exchange segment%s: %.4g s per step, uncut %.4g s "
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
        f"`{name}` with `cut={n}` and finer is not tried, because that would take more than "
        f"{budget.limit_s:.2g} s, {SHARE:.0%} of the time of this loop's {budget.steps} steps. If "
        "the run is longer than the loop, pass a number as `cut`."
    )


def _race(
    rivals: tuple[Compiled, ...],
    traced: Traced,
    leaves: Sequence[Any],
    world: World,
    run_on_all_ranks: RunOnAllRanks,
    label: str,
) -> tuple[float, ...]:
    """Times one or two cuts, alternating between them. Returns the seconds per step of each.

    On each rank, a cut's fastest step counts; across ranks, the slowest rank does. If the second
    cut fails on some rank, its time is infinite. If the first cut fails, there's nothing to compare
    with, so both times are infinite.

    We call `run_on_all_ranks` for every single step instead of once for all of them. To catch
    hanging runs, a watchdog limits how long an exchange may take. This way, the limit applies to
    one step at a time and not to the whole comparison.
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
                    world,
                    f"`{traced.name}` is not cut, because it fails on the copies of its arguments "
                    f"with which cuts are timed: {elapsed}",
                )
                return (math.inf,) * len(rivals)
            else:
                _log_on_rank_0(
                    world,
                    f"`{traced.name}` with `{label}` fails on the copies of its arguments with "
                    f"which cuts are timed, so that cut is not used: {elapsed}",
                )
                running[1] = None
    # The only all-reduce we have computes a minimum, so negate the times to get the maximum.
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
    """The cuts found by earlier runs, kept in a file in JAX's compilation cache folder.

    Only rank 0 reads and writes it.
    """

    def __init__(self, key: str) -> None:
        folder = compilation_cache_dir()
        self._file = None if folder is None else folder / "jaxcross-cuts.json"
        self._key = key

    def read(self) -> tuple[int, float] | None:
        """Returns the stored number of segments, and how long an uncut step took at the time."""
        match self._all().get(self._key):
            case [int(n), float(uncut_s)] if type(n) is int and n in SEGMENT_COUNTS and uncut_s > 0:
                return n, uncut_s
        return None

    def write(self, n_segments: int, uncut_s: float) -> None:
        """Stores a cut, best effort: if the file can't be written, we just log a warning."""
        if self._file is None:
            return
        content = json.dumps({**self._all(), self._key: [n_segments, uncut_s]}, indent=1)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, content, durable=False, shared=True)
        except OSError as error:
            _log.warning(
                "The cut that was found cannot be stored in `%s`, so the next run will search "
                "again: %s",
                self._file,
                error,
            )

    def _all(self) -> dict[str, object]:
        if self._file is None:
            return {}
        try:
            if self._file.stat().st_size > _LARGEST_BYTES:
                return {}
            found = json.loads(self._file.read_text())
        except (ValueError, OSError, RecursionError):
            return {}  # missing, corrupt or unreadable: search again
        return found if isinstance(found, dict) else {}
