"""`cut="auto"` for a step that runs alone: which cut takes the least time, found by trying.

Cutting the backward pass lets its first gradients travel while the rest is computed (wait-free backpropagation), but
costs fusion, memory and a dispatch a segment. Which wins depends on the network, so both are measured, on throw-away
copies of the arguments: the training itself does not notice.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from jaxcross._jax_compat import compilation_cache_dir
from jaxcross.program.digest import program_digest
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced
from jaxcross.step.cut_budget import SHARE, Budget
from jaxcross.step.timed_trial import failures, summary, time_step
from jaxcross.world import World

_log = logging.getLogger("jaxcross")
PIECES = (1, 2, 4, 8, 16)
_WARM_UP, _STEPS = 2, 2  # steps of each rival, in turn: some that get their memory from the kernel, some that are timed
_LARGEST_BYTES = 2**24  # of the file; what is larger was not written by us
_ALIKE = 1.25  # uncut steps of the same network on the same machine
_QUIET_S = 5.0  # between two lines of a search that goes on
_WORTH = 0.99  # a finer cut must save more than measurements scatter

Together = Callable[[str, Callable[[Any], Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutHint:
    """What is known of how a step is to be cut, before it runs; all but `key` the same on every rank.

    Attributes:
        key: Of the step, on this rank.
        ran: Into how many pieces this job cut it before a restart. Another cut may round otherwise, and a run that is
            resumed goes on bit for bit. None if that is not known, or not the same on all ranks.
        before: Likewise, what ran first in this process.
        first: Nothing did, on no rank.
        kept: What JAX's folder of compiled programs tells: a number of pieces, and the seconds of an uncut step.
        steps: How many steps the job has left, on the rank that has fewest; None if no rank knows.
    """

    key: str
    ran: int | None
    before: int | None
    first: bool
    kept: tuple[int, float] | None
    steps: int | None = None


def key_of(program: Program, world: World) -> str:
    """What tells this rank's step, its machine and its neighbours from others, also in later runs."""
    return f"{program_digest(program)} {world.size} {world.local_size} {jax.devices()[0].device_kind}"


def recall(
    key: str, *, rank: int, together: Together, ran: int | None = None, before: int | None = None,
    steps: int | None = None,
) -> CutHint:  # fmt: skip
    """Brings together what the ranks know: their shapes, neighbours and files may differ. Waits for all ranks.

    Args:
        key: See `key_of`.
        rank: Of this process.
        together: `(label, work)` -> `work(control)`, run at the same time on all ranks with nothing else exchanging.
        ran: As this rank knows it; see `CutHint`.
        before: Likewise.
        steps: Likewise.
    """
    if ran is not None and not 0 <= ran <= max(PIECES):
        ran = None

    # Only its own count; not while all jobs' exchanges wait for a file.
    kept = CutCache(key).read() if rank == 0 else None
    own = json.dumps([ran, before, kept, steps])
    told = [json.loads(text) for text in together("cut", lambda control: control.allgather_text(own))]
    (ran, before, kept, _), first = told[0], all(each[1] is None for each in told)
    steps = min((each[3] for each in told if each[3] is not None), default=None)
    if any(each[0] != ran for each in told):
        ran = None
    if any(each[1] != before for each in told):
        before = None
    kept = None if kept is None else (kept[0], kept[1])
    return CutHint(key=key, ran=ran, before=before, first=first, kept=kept, steps=steps)


def search(
    traced: Traced,
    leaves: Sequence[Any],
    *,
    world: World,
    cut: Callable[[int], Program],
    build: Callable[[Program], Compiled],
    together: Together,
    recalled: CutHint,
) -> tuple[int, Compiled]:
    """The number of pieces and the executables of the fastest of a few cuts.

    Each is twice as fine as the one before, until two finer ones in a row do not pay. Where the length of the run is
    known, the search ends before it takes longer than a share of it (`Budget`): a short run stays uncut.

    A cut that is slower than uncut in a last race of the two is not taken, nor one that fails on some rank, compiled or
    tried. If uncut steps cannot be tried, as where copies do not fit, none is.

    Waits for all ranks, each of which must call it with the same step; the slowest rank's times count, so that all
    choose alike. Where JAX keeps compiled programs (`jax_compilation_cache_dir`), the choice is kept beside them with
    the seconds of an uncut step. The network may have changed since: a kept cut is timed once against uncut, and
    searched anew if it is slower, or if the uncut step takes a quarter more or less than it did.

    Args:
        traced: The step.
        leaves: Its flat arguments; copied where the step may overwrite them.
        world: All ranks.
        cut: Number of pieces -> program.
        build: Program -> executables, once all ranks have agreed on it.
        together: As for `recall`; called once for every step that is tried.
        recalled: What `recall` says.
    """
    cut, found = cache(cut), dict[int, Compiled | None]()  # None: it fails
    budget, compiling_s, first = Budget(recalled.steps, together), 0.0, None

    def built(n: int) -> Compiled | None:
        nonlocal compiling_s
        if n in found:
            return found[n]
        found[n], why, start = None, "", time.perf_counter()
        try:
            found[n] = build(cut(n))
        except JaxRuntimeError as error:  # not of what ranks say to each other before
            why = summary(error)
        compiling_s += time.perf_counter() - start
        if failed := together(f"cut={n}", lambda control: failures(control, why)):
            _tell(world, f"`{traced.name}` with `cut={n}` cannot be compiled, and is not tried: {failed}")
            found[n] = None
        return found[n]

    def race(n: int, *rivals: Compiled) -> tuple[float, ...]:
        return _race(rivals, traced, leaves, world, together, f"cut={n}")

    best = uncut = found[1] = build(cut(1))
    if recalled.kept is not None and (kept := built(recalled.kept[0])) is not None:
        pieces, before = recalled.kept
        first, new = race(pieces, uncut, kept)
        if math.isinf(first):
            return 1, uncut
        alike = max(first, before) <= _ALIKE * min(first, before)
        if alike and (kept is uncut or new <= first):
            return pieces, kept
        if math.isinf(new):
            found[pieces] = None
        else:
            _log.warning(
                "`%s` was cut into %d exchange segment%s before, when an uncut step took %.4g s. Here it takes %.4g s,"
                " and cut so %.4g s: cuts are tried anew.", traced.name, pieces, "s" * (pieces > 1), before, first, new,
            )  # fmt: skip
    if recalled.steps is not None:
        if first is None:
            first, *_ = race(1, uncut)
        if math.isinf(first):
            return 1, uncut
        budget.set(first)
    begin, compiling_s = time.perf_counter(), 0.0
    pieces, gain, tried, finest, missed, through, told_s = 1, 1.0, [1], len(cut(1).collectives), False, True, begin
    for n in PIECES[1:]:
        if len(cut(n).collectives) <= finest:  # which all ranks count alike
            continue  # exchanges that depend on one another leave little to cut
        if not budget.allows_another():
            _tell(world, _too_long(traced.name, n, budget))
            through = False
            break
        if tried == [1]:
            _tell(
                world, f"`{traced.name}` is compiled and timed in several cuts; a number as `cut` would save that time."
            )
        finest = len(cut(n).collectives)
        tried.append(n)
        old, new = math.nan, math.inf
        if (rival := built(n)) is not None:
            old, new = race(n, best, rival)
            if math.isinf(old):
                return 1, uncut
            first = old if first is None else first
            if (now_s := time.perf_counter()) - told_s > _QUIET_S:
                told_s = now_s
                _tell(world, f"`{traced.name}` with `cut={n}`: {new:.4g} s a step, {old:.4g} s with `cut={pieces}`.")
        if rival is not None and new <= _WORTH * old:
            best, pieces, missed = rival, n, False
        elif missed:
            break
        else:
            missed = True
    if best is not uncut:  # it won step by step; with steps of their own it must win once more, and by how much?
        first, new = race(pieces, uncut, best)
        if math.isinf(first):
            return 1, uncut
        gain = first / new
        if gain < 1:
            best, pieces, gain = uncut, 1, 1.0
    if world.rank == 0 and first is not None and through:
        CutCache(recalled.key).write(pieces, first)  # a longer run may still search
    if world.rank == 0 and first is not None and (through or len(tried) > 1):
        _log.warning(
            "`%s` runs fastest cut into %d exchange segment%s: %.4g s a step, uncut %.4g s (%.2fx; tried %s in"
            " %.0f s, %.0f s of them compiling).",
            traced.name, pieces, "s" * (pieces > 1), first / gain, first, gain, ", ".join(map(str, tried)),
            time.perf_counter() - begin, compiling_s,
        )  # fmt: skip
    return pieces, best


def _too_long(name: str, n: int, budget: Budget) -> str:
    return (
        f"`{name}` with `cut={n}` and finer is not tried: that would take more than {budget.limit_s:.2g} s,"
        f" {SHARE:.0%} of the time of this loop's {budget.steps} steps. If the run is longer than the loop, give a"
        " number as `cut`."
    )


def _race(
    rivals: tuple[Compiled, ...], traced: Traced, leaves: Sequence[Any], world: World, together: Together, label: str
) -> tuple[float, ...]:
    """Seconds a step of each, one or two, in turn: the best of each, on the slowest rank.

    Infinitely many for the second one if it fails on some rank; for both if the first one fails.

    The ranks meet for each step anew: the watchdog has as much patience with each as with any other wait.
    """
    left: list[Compiled | None] = [*rivals]
    times: list[list[int]] = [[] for _ in rivals]
    for turn in range(_WARM_UP + _STEPS):
        for place, compiled in enumerate(left):
            if compiled is None:
                continue
            elapsed = together(label, lambda control, its=compiled: time_step(its, traced, leaves, world, control))
            if isinstance(elapsed, int):
                if turn >= _WARM_UP:
                    times[place].append(elapsed)
            elif place == 0:
                _tell(world, f"`{traced.name}` is not cut, as it fails on copies: {elapsed}")
                return (math.inf,) * len(rivals)
            else:
                _tell(world, f"`{traced.name}` with `{label}` fails on copies, and is not taken: {elapsed}")
                left[1] = None
    best = np.array([-min(found, default=0) for found in times], np.int64)
    slowest = -together(label, lambda control: control.allreduce_min(best))
    pairs = zip(left, slowest, strict=True)
    return tuple(math.inf if compiled is None else float(elapsed) / 1e9 for compiled, elapsed in pairs)


def _tell(world: World, text: str) -> None:
    if world.rank == 0:
        _log.warning("%s", text)


class CutCache:
    """What was found before, in JAX's folder of compiled programs. Read and written by rank 0's file system alone."""

    def __init__(self, key: str) -> None:
        folder = compilation_cache_dir()
        self._file = None if folder is None else folder / "jaxcross-cuts.json"
        self._key = key

    def read(self) -> tuple[int, float] | None:
        """The number of pieces, and the seconds of an uncut step when it was found."""
        match self._all().get(self._key):
            case [int(pieces), float(uncut_s)] if type(pieces) is int and pieces in PIECES and uncut_s > 0:
                return pieces, uncut_s
        return None

    def write(self, pieces: int, uncut_s: float) -> None:
        if self._file is None:
            return
        draft = self._file.with_suffix(f".{id(self)}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({**self._all(), self._key: [pieces, uncut_s]}, indent=1))
            draft.replace(self._file)
        except OSError as error:
            _log.warning("The cut that was found cannot be kept in `%s`: %s", self._file, error)

    def _all(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            if self._file.stat().st_size > _LARGEST_BYTES:
                return {}
            found = json.loads(self._file.read_text())
        except (ValueError, OSError, RecursionError):
            return {}  # not there, damaged, or not for us: measured again
        return found if isinstance(found, dict) else {}
