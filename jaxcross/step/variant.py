"""A step for one set of argument types: its trace, programs and executables.

Just the data; `prepare` fills it in.
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
    """A cut chosen by `cut="auto"`.

    Attributes:
        n_segments: Number of segments; 0 for the default cut.
        signature: Hash of the program's exchanges in this cut.
    """

    n_segments: int
    signature: int


@dataclass(slots=True, eq=False)
class StepRecord:
    """State shared by all variants of a step.

    Attributes:
        cut, bucket_bytes: As passed to `crossover`.
        profiles: The profiles the cut is based on, if any. They must belong to this step.
        warned: The warnings logged so far, e.g. about loops or `optax.MultiSteps`.
        chosen_cuts: The cut first chosen by `cut="auto"` in this process, by signature of the
            default program. It's stored here and not in a variant because shapes can change on just
            one rank. If that rank started a new search for its new variant, the other ranks
            wouldn't join in.
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
    """A traced step with its programs and executables.

    If a step contains a `cond` whose branch is decided on the host before the step runs, each
    branch has its own program. In that case, the variant itself has no programs; instead, there's a
    child variant for each branch.

    With `cut="auto"`, several jobs may run the same step in different cuts, but each job keeps its
    cut until it ends. The choice only depends on what all ranks report about that particular job.
    We don't want a job to adopt a cut stored here by another job: job threads may get here in a
    different order on each rank, so the ranks could end up with different cuts.

    Attributes:
        traced: The step for one set of argument types.
        record: State shared by all variants of the step.
        world: Communicators and executables.
        cache_key: Everything but argument types that distinguishes the step's variants: the
            arguments' structure, static arguments and JAX's configuration.
        trial_args: Flat arguments for timing cuts; dropped once a cut has been chosen.
        children: The child variant for each branch, if the host decides which branch of a `cond` to
            run.
        branch_of: Maps the flat arguments to the number of the branch to run. None if the host has
            nothing to decide.
        default: The program in the given `cut`. With `"auto"`, the program to run alongside other
            jobs.
        signature: Hash of the exchanges of `default`.
        program: The program run by the latest call; `default` before the first call.
        arg_types: The argument types to compile for.
        is_unit: Whether `default` calls mpi4jax.
        tunes_cut: Whether there's a cut to choose.
        refusal: Why a profile given as `cut` doesn't fit this step; None if it fits. Raised as an
            error once the ranks have compared it.
        compiled: Executables by number of segments, with 0 for `default`.
        of_host: Executables by job or standalone step, if they may differ between these.
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
        # This variant lives as long as the step does. If it held on to the arrays of the first
        # call, these would stay in memory the whole time, so drop them. We only put them back
        # (below) if the variant still has to choose a cut, because it needs real arguments to time
        # the candidates.
        leaves = self.trial_args or ()
        self.trial_args = None
        if self.traced.undecided is not None:
            # We can't cut the step until we know the branch, so each branch gets its own variant.
            self.branch_of = _on_host(self.traced.undecided)
            return
        program = stages.cut(self.traced, self.record.cut, bucket_bytes=self.record.bucket_bytes)
        if program.exchanges:
            try:
                check_profiles(self.record.profiles, program, self.world.size)
            except CutError as error:
                if program.is_unit:
                    raise
                # The user passed a profile that doesn't fit this step. We can't raise yet: if only
                # this rank was given such a profile, the other ranks would be left waiting for us
                # in the agreement. So we include the error in what the ranks compare, and raise
                # afterwards.
                self.refusal = str(error)
        self.program = self.default = program
        # Every call needs these and they're slow to compute, so keep them as attributes.
        self.is_unit = program.is_unit
        self.signature = list_hash(self.world, program) if self.is_unit else program.exchange_hash()
        self.arg_types = _without_values(self.traced, leaves)
        # There's no point in searching for the fastest cut if none of the exchanges involves
        # another rank (all cuts take the same time) or if the step calls mpi4jax (there's only one
        # way to cut it).
        exchanges = any(not program.is_single_rank(s) for s in program.collectives)
        self.tunes_cut = self.record.cut == "auto" and not self.is_unit and exchanges
        if self.tunes_cut:
            self.trial_args = leaves
        advise(self.traced, program, self.record.warned)

    @property
    def cut_note(self) -> str:
        """A note about the cut that the ranks compare along with their exchanges.

        Says that a profile doesn't fit, or that the ranks are going to search for a cut; empty
        otherwise.
        """
        if self.refusal:
            return f" ({self.refusal})"
        return ' (`cut="auto"`)' if self.tunes_cut else ""

    def choose(self, leaves: Sequence[object]) -> Variant:
        """Returns the variant to run for these arguments.

        That's this variant itself, unless the host decides which branch of a `cond` to run; in that
        case, it's the variant for that branch.
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
        """Returns the program cut into `n_segments` collective segments; `default` if 0."""
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

    It maps the step's flat arguments to the number of the branch.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    evaluate = jax.jit(jaxpr_as_fun(undecided.jaxpr))

    def branch_of(leaves: Sequence[object]) -> int:
        with jax.default_device(cpu):
            (index,) = evaluate(*(np.asarray(leaves[p]) for p in undecided.inputs))
        # Clamp an index that's out of range, like `lax.switch`.
        return min(max(int(index), 0), undecided.branches - 1)

    return branch_of


def _without_values(traced: Traced, leaves: Sequence[object]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the arguments, including their shardings.

    We may recompile the step with a different cut much later, long after the arrays of this call
    have been donated. Compiling doesn't need their values, so we only keep their types.
    """
    places = [x.sharding if isinstance(x, jax.Array) and x.committed else None for x in leaves]
    return tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p)
        for a, p in zip(traced.in_avals, places, strict=True)
    )


_ALIKE_BYTES = 64  # tolerance, on top of 1%: an extra metric doesn't make it a different step


def check_profiles(profiles: Sequence[Profile], program: Program, ranks: int) -> None:
    """Checks that profiles belong to this step and number of ranks. Does not communicate.

    We assume that a profile belongs to this step if both exchange about the same number of bytes.
    Batch sizes can't be compared, because a profile doesn't say anything about the arguments. If
    the host decides between branches with different exchanges (e.g. a step that only exchanges
    something on every eighth call), we don't compare bytes either, because a profile only covers
    one branch.

    Raises:
        CutError: A profile belongs to a different number of ranks, or to a step that exchanges a
            different number of bytes.
    """
    exchanged = sum(segment.nbytes for segment in program.segments)
    branches = program.traced is not None and program.traced.choices
    for profile in profiles:
        measured = sum(profile.graph.nbytes)
        if profile.ranks != ranks:
            raise CutError(
                f"The profile `{profile.name}` was measured on {profile.ranks} ranks, and "
                f"`{program.name}` runs on {ranks}. Pass a profile of a run on {ranks}, or a "
                "number of segments as `cut`."
            )
        if (
            measured
            and not branches
            and abs(measured - exchanged) > _ALIKE_BYTES + 0.01 * exchanged
        ):
            raise CutError(
                f"The profile `{profile.name}` is of a step that exchanges {measured} bytes "
                f"({human_bytes(measured)}), and `{program.name}` exchanges {exchanged}, so it "
                "must be of another step. Measure this step, or pass a number of segments as `cut`."
            )
