"""A step for one set of argument types: its trace, its programs and their executables.

This is data, which `prepare` fills in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jaxcross.errors import CutError
from jaxcross.program import (
    Compiled,
    Cut,
    Predicate,
    Program,
    SingleFlightCache,
    Traced,
    human_bytes,
    stages,
)
from jaxcross.runtime import StepHost
from jaxcross.step.advice import advise
from jaxcross.step.mpi4jax_agreement import Units, list_hash
from jaxcross.step.profile import Profile
from jaxcross.world import World


class ChosenCut(NamedTuple):
    """The cut that `cut="auto"` chose.

    Attributes:
        n_segments: Number of segments of the cut; 0 for the default cut.
        signature: Hash of the exchanges that the program makes in this cut.
    """

    n_segments: int
    signature: int


@dataclass(slots=True, eq=False)
class StepRecord:
    """State that all variants of a step share.

    Attributes:
        cut, bucket_bytes: As given to `crossover`.
        profiles: The profiles that determined the cut, if any. They must be of this step.
        warned: The warnings that were logged, e.g. about loops or `optax.MultiSteps`.
        chosen_cuts: The cut that `cut="auto"` first chose in this process, for each signature of
            the default program. It's stored here rather than in a variant, because shapes may
            change on one rank only. If this rank then started a new search for its new variant, the
            other ranks wouldn't take part.
        units: The agreements on programs that call mpi4jax.
    """

    cut: Cut
    bucket_bytes: int
    profiles: tuple[Profile, ...] = ()
    warned: set[str] = field(default_factory=set)
    chosen_cuts: dict[int, ChosenCut] = field(default_factory=dict)
    units: Units = field(default_factory=Units)


@dataclass(slots=True, eq=False)
class Variant:
    """A traced step, its programs and their executables.

    A step may contain a `cond` whose branch is decided on the host, before the step runs. Each
    branch then has a program of its own, so the variant itself has no programs, but a child variant
    for each branch.

    With `cut="auto"`, several jobs may run the same step in different cuts, but each job keeps its
    cut until it ends. A job's cut depends only on what all ranks report about that job. If a job
    adopted a cut that another job had stored here, it could end up with different cuts on different
    ranks, because job threads may get here in a different order on each rank.

    Attributes:
        traced: The step for one set of argument types.
        record: State that all variants of the step share.
        world: Communicators and executables.
        cache_key: What distinguishes the step's variants apart from the argument types: structure,
            static arguments and JAX's configuration.
        trial_args: Flat arguments on which to try cuts; dropped once a cut has been chosen.
        children: The child variant for each branch, if the host decides which branch of a `cond`
            runs.
        branch_of: Function that takes the flat arguments and returns the number of the branch to
            run. None if the host has nothing to decide.
        default: The program in the given `cut`. With `"auto"`, the program that runs alongside
            other jobs.
        signature: Hash of the exchanges of `default`.
        program: The program that the latest call ran; `default` before the first call.
        arg_types: The argument types to compile for.
        is_unit: Whether `default` calls mpi4jax.
        tunes_cut: Whether there's a cut to choose.
        refusal: Why a profile given as `cut` doesn't fit this step, or None if it fits. Raised as
            an error after the ranks have compared it.
        compiled: Executables by number of segments, with 0 for `default`.
        of_host: Executables of each job or standalone step, if these may differ between hosts.
    """

    traced: Traced
    record: StepRecord
    world: World
    cache_key: object = None
    trial_args: tuple[object, ...] | None = None
    children: SingleFlightCache = field(default_factory=SingleFlightCache)
    branch_of: Callable[[Sequence[object]], int] | None = None
    default: Program = field(init=False, repr=False)
    signature: int = field(init=False, repr=False)
    program: Program | None = None
    arg_types: tuple[jax.ShapeDtypeStruct, ...] = field(init=False, default=())
    is_unit: bool = field(init=False, default=False)
    tunes_cut: bool = field(init=False, default=False)
    refusal: str | None = field(init=False, default=None)
    compiled: dict[int, Compiled] = field(init=False, default_factory=dict)
    of_host: WeakKeyDictionary[StepHost, Compiled] = field(
        init=False, default_factory=WeakKeyDictionary
    )
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # We keep this variant for as long as the step exists. If it held on to the arrays of the
        # first call, they'd stay in memory for all that time, so we remove them here. The exception
        # is a variant that still has to choose a cut. It gets the arrays back below, because it
        # needs real arguments to time the candidates.
        leaves = self.trial_args or ()
        self.trial_args = None
        if self.traced.undecided is not None:
            # We can't cut the step before we know the branch, so each branch gets its own variant.
            self.branch_of = _on_host(self.traced.undecided)
            return
        program = stages.cut(self.traced, self.record.cut, bucket_bytes=self.record.bucket_bytes)
        if program.exchanges:
            try:
                check_profiles(self.record.profiles, program, self.world.size)
            except CutError as error:
                if program.is_unit:
                    raise
                # The profile that the user passed doesn't fit this step. We can't raise yet: if
                # only this rank was given such a profile, the other ranks would wait for it when
                # they agree on the step. So we add the error text to what the ranks compare, and
                # raise after the comparison.
                self.refusal = str(error)
        self.program = self.default = program
        # Computing these takes time and every call needs them, so they're attributes.
        self.is_unit = program.is_unit
        self.signature = list_hash(self.world, program) if self.is_unit else program.exchange_hash()
        self.arg_types = _without_values(self.traced, leaves)
        # There are two cases in which we needn't search for the fastest cut. If none of the step's
        # exchanges leaves this rank, they take the same time in any cut. If the step calls mpi4jax,
        # it can only be cut in one way.
        exchanges = any(not program.is_single_rank(s) for s in program.collectives)
        self.tunes_cut = self.record.cut == "auto" and not self.is_unit and exchanges
        if self.tunes_cut:
            self.trial_args = leaves
        advise(self.traced, program, self.record.warned)

    @property
    def cut_note(self) -> str:
        """Text about the cut, which the ranks compare in addition to their exchanges.

        It says whether a profile doesn't fit, or whether the ranks search for a cut. Otherwise it's
        empty.
        """
        if self.refusal:
            return f" ({self.refusal})"
        return ' (`cut="auto"`)' if self.tunes_cut else ""

    def choose(self, leaves: Sequence[object]) -> Variant:
        """Returns the variant to run for these arguments.

        That's this variant, unless the host decides which branch of a `cond` runs; then it's the
        variant for that branch.
        """
        if self.branch_of is None:
            return self
        index = self.branch_of(leaves)

        def make() -> Variant:
            traced = self.traced.decide(index)
            return Variant(
                traced, self.record, self.world, cache_key=self.cache_key, trial_args=tuple(leaves)
            )

        return self.children.get(index, make).choose(leaves)

    def program_in(self, n_segments: int) -> Program:
        """Returns the step's program, cut into `n_segments` exchange segments; `default` for 0."""
        if n_segments == 0:
            return self.default
        known = self.compiled.get(n_segments)
        return (
            known.program
            if known
            else stages.cut(self.traced, n_segments, bucket_bytes=self.record.bucket_bytes)
        )


def _on_host(undecided: Predicate) -> Callable[[Sequence[object]], int]:
    """Returns a function that evaluates a `cond`'s predicate on the host's CPU.

    The function takes the step's flat arguments and returns the number of the branch.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    evaluate = jax.jit(jaxpr_as_fun(undecided.jaxpr))

    def branch_of(leaves: Sequence[object]) -> int:
        with jax.default_device(cpu):
            (index,) = evaluate(*(np.asarray(leaves[p]) for p in undecided.inputs))
        # An index that's out of range is clamped, as `lax.switch` does.
        return min(max(int(index), 0), undecided.branches - 1)

    return branch_of


def _without_values(traced: Traced, leaves: Sequence[object]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the arguments, including their shardings.

    We may compile the step again with another cut much later, when the arrays of this call have
    long been donated. Compiling doesn't need their values, so we only store their types.
    """
    places = [x.sharding if isinstance(x, jax.Array) and x.committed else None for x in leaves]
    return tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p)
        for a, p in zip(traced.in_avals, places, strict=True)
    )


_ALIKE_BYTES = 64  # tolerance, plus 1%: with one more metric it's still the same step


def check_profiles(profiles: Sequence[Profile], program: Program, ranks: int) -> None:
    """Makes sure that profiles are of this step on this number of ranks. Does not communicate.

    A profile is taken to be of this step if both exchange about the same number of bytes. We can't
    compare batch sizes, because a profile contains nothing about the arguments. If the host decides
    between branches with different exchanges (e.g. a step that exchanges something only on every
    eighth call), we don't compare the bytes either, because a profile covers only one branch.

    Raises:
        CutError: A profile is of a different number of ranks, or of a step that exchanges a
            different number of bytes.
    """
    exchanged = sum(segment.nbytes for segment in program.segments)
    branches = program.traced is not None and program.traced.choices
    for profile in profiles:
        measured = sum(profile.graph.nbytes)
        if profile.ranks != ranks:
            raise CutError(
                f"The profile `{profile.name}` was measured on {profile.ranks} ranks, and "
                f"`{program.name}` runs on {ranks}. Give the profile of a run on as many ranks, or "
                "a number of segments as `cut`."
            )
        if (
            measured
            and not branches
            and abs(measured - exchanged) > _ALIKE_BYTES + 0.01 * exchanged
        ):
            raise CutError(
                f"The profile `{profile.name}` is of a step that exchanges {measured} bytes "
                f"({human_bytes(measured)}), and `{program.name}` exchanges {exchanged}. It is of "
                "another step: measure this one, or give a number of segments as `cut`."
            )
