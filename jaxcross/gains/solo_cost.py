"""Measures what a single step costs by itself: seconds per segment, wire bytes, and memory.

All ranks measure together, because a step's exchanges involve all of them. If any rank can't
measure, all of them raise an error.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, TypeVar, final

import jax
from jax.errors import JaxRuntimeError

from jaxcross._arguments import check_type
from jaxcross.errors import CutError, ExchangeError, clause, first_line
from jaxcross.jobs import JobEngine, JobMemory, device_limit_bytes, memory_of, step_graph_of
from jaxcross.plan import Estimate, MachineContention, StepCost, estimate_of
from jaxcross.program import Compiled, Exchange, Program, Segment, Traced, stages
from jaxcross.runtime import Standalone, StepHost, describe
from jaxcross.step import (
    Profile,
    StepRecord,
    Variant,
    agree_once,
    check_profiles,
    gather_failures,
    summary,
    time_segments,
)
from jaxcross.wire import wire_bytes
from jaxcross.world import Control, World, gather

T = TypeVar("T")

EXCHANGE_SEGMENTS = 4
"""Number of collective segments in the cut that we measure in addition to the uncut step."""

_WARM_UP_STEPS = 2  # the first steps have to get memory from the kernel
_ONE_RANK_STANDS_FOR = 2  # ranks, if `mbps` is given on a single rank
_WIDE = ("float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a measurement, the same on every rank.

    Attributes:
        jobs: Number of jobs that the estimate is for.
        steps: Number of steps to time.
        mbps: Link rate in Mbit/s to assume for the exchanges. None for the actual link.
        memory_bytes: Bytes that a rank may use. None for whatever the device or the machine has.
        profiles: Profiles of the step to use instead of timing it. If empty, the step is timed.
        contention: The contention measured on this machine. None for that of two-core hosts.

    Raises:
        TypeError, ValueError: A setting makes no sense.
    """

    jobs: int = 2
    steps: int = 3
    mbps: float | None = None
    memory_bytes: int | None = None
    profiles: tuple[Profile, ...] = ()
    contention: MachineContention | None = None

    def __post_init__(self) -> None:
        for name, value in (("jobs", self.jobs), ("steps", self.steps)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"`{name}` must be a whole number, got {value!r}.")
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.mbps is not None:
            if not isinstance(self.mbps, int | float) or isinstance(self.mbps, bool):
                raise TypeError(f"`mbps` must be a number, or None, got {self.mbps!r}.")
            if not 0 < self.mbps < float("inf"):
                raise ValueError(f"`mbps` must be above 0 and finite, got {self.mbps!r}.")
        check_type(self.contention, MachineContention | None, "`contention`")
        if self.profiles and self.mbps is not None:
            raise ValueError(
                f"`mbps` is {self.mbps!r}, but cannot be used together with `profiles`, because a "
                "profile already contains the times of exchanges on its own link. Leave one of "
                "them out."
            )

    def as_data(self) -> dict[str, Any]:
        """Returns all settings as plain data, which ranks can compare."""
        plain = asdict(replace(self, profiles=(), contention=None))
        if self.contention is None:
            del plain["contention"]
        else:
            plain["contention"] = self.contention.to_json()
        if not self.profiles:
            del plain["profiles"]
            return plain
        texts = [json.dumps(each.as_data(), sort_keys=True) for each in self.profiles]
        return {**plain, "profiles": [f"{zlib.crc32(text.encode()):08x}" for text in texts]}


@final
class SoloCost:
    """Measures one step on copies of its arguments, leaving the originals unchanged.

    Args:
        traced: The step.
        leaves: Its flat arguments.
        host: The job or the standalone step that this belongs to.
        world: All ranks.
        settings: Must be the same on every rank.
        bucket_bytes: As for `crossover`.
    """

    def __init__(
        self,
        traced: Traced,
        leaves: Sequence[Any],
        *,
        host: StepHost,
        world: World,
        settings: Settings,
        bucket_bytes: int,
    ) -> None:
        self._leaves = leaves
        self._host = host
        self._world = world
        self._settings = settings
        # The record stores what we've found out about a step, such as its cut. Measurements get a
        # separate record, so they don't affect any training that follows.
        record = StepRecord(cut="whole", bucket_bytes=bucket_bytes)
        self._variant = Variant(traced, record, world, trial_args=tuple(leaves)).choose(leaves)
        self._sizes = dict(traced.axes)
        if world.size == 1 and settings.mbps is not None:
            self._sizes = dict.fromkeys(traced.axes, _ONE_RANK_STANDS_FOR)

    def check(self) -> None:
        """Checks that this rank's step can be measured. Does not communicate.

        Raises:
            CutError: The step exchanges nothing, or calls mpi4jax, or a profile belongs to a
                different step or number of ranks.
        """
        program = self._variant.default
        if self._variant.is_unit:
            raise CutError(
                f"`{program.name}` calls mpi4jax, so its exchanges cannot be timed separately from "
                "the computation between them. Write it with named-axis collectives, such as "
                "`lax.pmean`."
            )
        if not program.exchanges:
            raise CutError(
                f"`{program.name}` exchanges nothing with these arguments, so there is no exchange "
                "to hide. Pass the train step, which averages its gradients over ranks, e.g. by "
                '`lax.pmean(grads, "batch")`.'
            )
        check_profiles(self._settings.profiles, program, self._world.size)

    def measure(self, *, where: str = "") -> StepCost:
        """Returns the step's cost, identical on every rank.

        Waits for all ranks, whose steps must all be measurable (see `check`).

        Args:
            where: See `StepCost`.

        Raises:
            ExchangeError: The ranks have different steps, or the step fails on some rank; raised on
                every rank.
        """
        program = self._variant.default
        given = self._settings.profiles
        if given:
            agree_once(self._variant, self._host, program, candidate=True)
            whole, *finer = sorted(given, key=lambda profile: len(profile.graph.collectives))
            whole = replace(whole, name=program.name)
            cut = finer[0] if finer else None
            memory = whole.memory or memory_of(self._built(program))
        else:
            compiled = self._built(program)
            found = self._profile(compiled)
            if isinstance(found, str):
                raise ExchangeError(
                    f"`{program.name}` cannot be measured, as it fails on copies of its arguments: "
                    f"{found}"
                )
            whole = found
            cut = self._cut_profile(program, found)
            memory = memory_of(compiled)
        wide, narrow = self._wire_bytes(program.exchanges)
        limit = self._settings.memory_bytes or device_limit_bytes(
            jax.local_devices()[0], self._world.local_size
        )
        own = [asdict(memory), limit]
        ranks = self._together(lambda control: gather(control, own))
        limits = [limit for _, limit in ranks if limit is not None]
        return StepCost(
            whole=replace(
                whole, memory=JobMemory.largest([JobMemory.from_data(each) for each, _ in ranks])
            ),
            cut=cut,
            where=where,
            steps=0 if given else self._settings.steps,
            wire_bytes=wide,
            narrow_wire_bytes=narrow,
            link_mbps=self._settings.mbps,
            limit_bytes=min(limits, default=None),
            shares_processor=jax.default_backend() == "cpu",
            contention=self._settings.contention,
        )

    def _together(self, work: Callable[[Control], T]) -> T:
        return run_watched(self._host, self._world, self._variant.default.name, work)

    def _built(self, program: Program) -> Compiled:
        compiled = self._build(program)
        if isinstance(compiled, str):
            raise ExchangeError(
                f"`{program.name}` cannot be measured, as it cannot be compiled: {compiled}"
            )
        return compiled

    def _build(self, program: Program) -> Compiled | str:
        """Returns the executables, or an error text on all ranks if any rank failed to compile.

        Waits for all ranks.
        """
        agree_once(self._variant, self._host, program, candidate=True)
        compiled = None
        error_text = ""
        try:
            with self._host.compiling(program.name):
                compiled = stages.compile(
                    program, self._variant.arg_types, cache=self._world.executables
                )
        except JaxRuntimeError as error:
            error_text = summary(error)
        failed = self._together(lambda control: gather_failures(control, error_text))
        if failed:
            return failed
        assert compiled is not None
        return compiled

    def _profile(self, compiled: Compiled) -> Profile | str:
        """Times each segment, or returns the same error text on all ranks if any rank failed.

        Waits for all ranks.
        """
        timed: list[list[int]] = []

        def work(control: Control) -> list[int] | str:
            return time_segments(compiled, self._variant.traced, self._leaves, self._world, control)

        for turn in range(_WARM_UP_STEPS + self._settings.steps):
            found = self._together(work)
            if isinstance(found, str):
                return found
            if turn >= _WARM_UP_STEPS:
                timed.append(found)
        own = [median(times_ns) for times_ns in zip(*timed, strict=True)]
        ranks = self._together(lambda control: gather(control, own))
        slowest = [max(times_ns) / 1e9 for times_ns in zip(*ranks, strict=True)]
        program = compiled.program
        exchange_s = {
            segment.index: self._exchange_s(program, segment, s)
            for segment, s in zip(program.segments, slowest, strict=True)
            if segment.kind != "compute"
        }
        rank_seconds = tuple(
            tuple(
                exchange_s[index] if index in exchange_s else ns / 1e9
                for index, ns in enumerate(times_ns)
            )
            for times_ns in ranks
        )
        return Profile(
            name=program.name,
            graph=step_graph_of(program),
            seconds=tuple(map(max, zip(*rank_seconds, strict=True))),
            ranks=self._world.size,
            rank_seconds=rank_seconds if self._world.size > 1 else (),
        )

    def _exchange_s(self, program: Program, segment: Segment, measured_s: float) -> float:
        measured_s = 0.0 if program.is_single_rank(segment) else measured_s
        if self._settings.mbps is None:
            return measured_s
        nbytes, _ = self._wire_bytes(segment.exchanges)
        return max(measured_s, 8e-6 * nbytes / self._settings.mbps)

    def _cut_profile(self, program: Program, whole: Profile) -> Profile | None:
        """Profiles the step when it's cut into four collective segments.

        Returns None if the cut has no more collective segments than the uncut step, or if it fails.
        """
        if not whole.exchange_s:
            return None
        cut = self._variant.program_in(EXCHANGE_SEGMENTS)
        if len(cut.collectives) <= len(program.collectives):
            return None
        compiled = self._build(cut)
        found = compiled if isinstance(compiled, str) else self._profile(compiled)
        return None if isinstance(found, str) else found

    def _wire_bytes(self, exchanges: Sequence[Exchange]) -> tuple[int, int]:
        """Returns the bytes a rank receives, both as is and with wide floats sent as 16 bits."""
        narrow = (replace(x, dtype="bfloat16") if x.dtype in _WIDE[:2] else x for x in exchanges)
        wide_bytes = sum(wire_bytes(x, self._sizes) for x in exchanges)
        return wide_bytes, sum(wire_bytes(x, self._sizes) for x in narrow)


def run_watched(host: StepHost, world: World, name: str, work: Callable[[Control], T]) -> T:
    """Runs `work(control)` on every rank, under the watchdog. Waits for all ranks."""

    def watched(control: Control) -> T:
        with world.monitor(job=name, step=0, segment=-1, what="estimate"):
            return work(control)

    return host.run_on_all_ranks("estimate", watched)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A step to measure, and how to measure it.

    Attributes:
        traced: The step.
        leaves: Its flat arguments.
        bucket_bytes: As for `crossover`.
        settings: How to measure.
    """

    traced: Traced
    leaves: Sequence[Any]
    bucket_bytes: int
    settings: Settings


def measure_on_all_ranks(
    make_subject: Callable[[], Subject], name: str, *, world: World, job: JobEngine | None
) -> Estimate:
    """Measures a step and returns an estimate, identical on every rank. Waits for all ranks.

    Args:
        make_subject: Called once. If it raises on any rank, all ranks raise before exchanging
            anything.
        name: The step's name.
        world: All ranks.
        job: The job that calls this, or None outside a run.

    Raises:
        ExchangeError: Another rank has failed, but not this rank. Also raised under the same
            conditions as in `SoloCost.measure`.
        Exception: Whatever `make_subject` raises.
    """
    with ExitStack() as turn:
        host: StepHost
        if job is None:
            owner = world.exchange_owner
            owner.check_not_stray(name)
            turn.enter_context(owner.step(name))
            host = Standalone(world, name)
        else:
            host = job
        solo = None
        settings = None
        failure = None
        try:
            subject = make_subject()
            settings = subject.settings
            solo = SoloCost(
                subject.traced,
                subject.leaves,
                host=host,
                world=world,
                settings=settings,
                bucket_bytes=subject.bucket_bytes,
            )
            solo.check()
        except Exception as error:  # compared over ranks, and raised below
            failure = error
        _begin_together(host, world, name, settings, failure)
        assert solo is not None and settings is not None
        return estimate_of(
            solo.measure(where="" if job is None else f"job `{job.name}`"), settings.jobs
        )


def _begin_together(
    host: StepHost, world: World, name: str, settings: Settings | None, failure: Exception | None
) -> None:
    """Checks that all ranks can measure, and with the same settings. Waits for all ranks."""
    error_text = "" if failure is None else clause(first_line(describe(failure)))
    mine = [error_text, None if settings is None else settings.as_data()]
    ranks = run_watched(host, world, name, lambda control: gather(control, mine))
    if failure is not None:
        raise failure
    for rank, (text, _) in enumerate(ranks):
        if text:
            raise ExchangeError(f"`{name}` cannot be measured, as rank {rank} failed: {text}.")
    for rank, (_, theirs) in enumerate(ranks):
        if theirs != ranks[0][1]:
            raise ExchangeError(
                f"Ranks 0 and {rank} ask for different estimates of `{name}`: {ranks[0][1]} and "
                f"{theirs}. Pass the same arguments on every rank."
            )
