"""What becomes of a step for one set of argument types: its program, agreed by all ranks, then its executables."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jaxcross.errors import ExchangeError
from jaxcross.jobs import context as job_context
from jaxcross.program.compile import SingleFlightCache
from jaxcross.program.conditional import Predicate
from jaxcross.program.cut import Cut
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Exchange, Program
from jaxcross.program.mini_steps import repeated_exchanges
from jaxcross.program.mismatch import branch_call_mismatch, signature_mismatch
from jaxcross.program.trace import Traced
from jaxcross.step.cut_tuner import CutHint, Together, key_of, recall, search
from jaxcross.step.exchange_order import agree_on_order, check_order, order_hash
from jaxcross.step.unit_agreement import Units, list_hash, without_calls
from jaxcross.world import World
from jaxcross.world.control_plane import Control

_log = logging.getLogger("jaxcross")


@dataclass(slots=True)
class Variant:
    """A traced step, its programs and their executables; with a `cond` that the host decides, one child a branch.

    Under `cut="auto"` jobs may run it cut in unlike ways, each in one way for good. Their threads come here in an order
    of each rank's own: how a job's is cut follows from what all ranks say of that job, not from what another one left.

    Attributes:
        traced: The step for one set of argument types.
        cut, bucket_bytes: As given to `crossover`.
        told: Loops and `optax.MultiSteps` whose exchanges were spoken of; shared by all variants of a step.
        pieces: Into how many `cut="auto"` cut the step first in this process, 0 for `default`, and that program's
            signature; by `signature`. Shared by all variants of a step, since shapes may change on one rank alone, and
            the others would not come to search.
        leaves: Arguments to try cuts on; dropped once one was chosen.
        world: Whose communicators and executables.
        units: What was agreed of programs that call mpi4jax. Shared by all variants of a step.
        asked: What else than types told the step's variants apart: structure, static arguments, configuration.
        program: What the latest call ran; `default` before that.
        default: As `cut` says, under `"auto"` beside other jobs.
        compiled: By number of pieces; 0: `default`.
    """

    traced: Traced
    cut: Cut
    bucket_bytes: int
    told: set[str]
    pieces: dict[int, tuple[int, int]]
    leaves: tuple[Any, ...] | None
    world: World
    units: Units = field(default_factory=Units)
    asked: Any = None
    children: SingleFlightCache = field(default_factory=SingleFlightCache)
    predicate: Callable[[Sequence[Any]], int] | None = None
    program: Program | None = None
    default: Program = field(init=False, repr=False, compare=False)
    signature: int = field(init=False, repr=False, compare=False)  # of `default`
    kinds: tuple[Any, ...] = field(init=False, default=())  # to compile for: `leaves` without their values
    is_unit: bool = field(init=False, default=False)  # whether `default` calls mpi4jax; asked at every step
    chooses: bool = field(init=False, default=False)  # whether there is a cut to choose
    compiled: dict[int, Compiled] = field(init=False, default_factory=dict)
    alone: Compiled | None = field(init=False, default=None)  # chosen outside a runner
    of_job: WeakKeyDictionary[job_context.JobContext, Compiled] = field(init=False, default_factory=WeakKeyDictionary)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        leaves, self.leaves = self.leaves or (), None
        if self.traced.undecided is not None:
            self.predicate = _on_host(self.traced.undecided)
            return
        program = self.program = self.default = self.traced.cut(self.cut, bucket_bytes=self.bucket_bytes)
        self.is_unit = program.is_unit
        self.signature = list_hash(self.world, program) if self.is_unit else program.exchange_hash()
        self.kinds = _without_values(self.traced, leaves)
        self.chooses = (
            self.cut == "auto" and not self.is_unit and any(not program.is_single_rank(s) for s in program.collectives)
        )
        if self.chooses:
            self.leaves = leaves
        _advise(program, self.told)
        _advise_on_accumulation(self.traced, self.told)

    def choose(self, leaves: Sequence[Any]) -> Variant:
        """The node whose program these arguments run."""
        if self.predicate is None:
            return self
        index = self.predicate(leaves)

        def make() -> Variant:
            return Variant(
                traced=self.traced.decide(index), cut=self.cut, bucket_bytes=self.bucket_bytes, told=self.told,
                units=self.units, asked=self.asked, pieces=self.pieces, leaves=tuple(leaves), world=self.world,
            )  # fmt: skip

        return self.children.get(index, make).choose(leaves)

    @property
    def is_current(self) -> bool:
        """Whether the ranks need not agree again on these types of arguments, if this rank exchanges as it did."""
        return not self.is_unit or self.units.is_current(self.world, self.default, self.asked)

    def agree(self, call: int) -> None:
        """Makes sure that all ranks are about to make the same exchanges, outside a runner. Waits for all ranks.

        Raises:
            ExchangeError: They are not; on every rank.
        """
        if self.is_unit:
            self.units.agree_alone(self.world, self.default, self.asked)
            return
        # Where the host takes branches, ranks may be at unlike calls of it, with equal exchanges.
        agree_alone(self.world, self.default, call, by_call=bool(self.traced.choices))

    def compiled_for(self, job: job_context.JobContext | None) -> Compiled:
        """The executables. At a job's first use waits until all ranks are known to want the same exchanges.

        The ranks agree (without a job: by `agree`) before anything is compiled. Jobs agree each for themselves, making
        their communicators: which of two like jobs compiles first may differ between ranks.
        """
        if self.is_unit and job is not None:
            compiled = self._unit_in(job)
        elif not self.chooses:
            if job is not None:
                self._agree_in(job, self.default)
            compiled = self.compiled.get(0) or self._compile(job, 0, self.default)
        elif job is None:
            compiled = self.alone = self.alone or self._choose_alone()
        elif (known := self.of_job.get(job)) is not None:
            compiled = known
        else:
            compiled = self.of_job[job] = self._choose_in(job)
        self.program = compiled.program
        return compiled

    def _unit_in(self, job: job_context.JobContext) -> Compiled:
        if (known := self.of_job.get(job)) is None:
            program = self.units.agree_in(job, self.world, self.default, self.asked)
            with self._compiling(job, program.name):
                known = self.of_job[job] = program.compile(self.kinds, cache=self.world.executables)
        return known

    def _choose_alone(self) -> Compiled:
        """What runs outside a runner, for good. Waits for all ranks, unless they know."""
        known = self._known()
        if known is not None or self.leaves is None:
            compiled = self._compile(None, *(known or (0, self.default)))
        else:
            together: Together = lambda _, work: work(self.world.control)  # noqa: E731
            recalled = recall(key_of(self.default, self.world), rank=self.world.rank, together=together)
            pieces, compiled = self._search(None, self.leaves, together, recalled)
            self.pieces[self.signature] = pieces, compiled.program.exchange_hash()
        self.leaves = None
        return compiled

    def _known(self) -> tuple[int, Program] | None:
        """The cut that was chosen before, perhaps for other shapes, if the exchanges are the same."""
        if (found := self.pieces.get(self.signature)) is None:
            return None
        pieces, signature = found
        program = self._program(pieces)
        return (pieces, program) if program.exchange_hash() == signature else None

    def _choose_in(self, job: job_context.JobContext) -> Compiled:
        """What a job runs for all of its steps: the same cut on every rank. Waits for all ranks."""
        self._agree_in(job, self.default)
        # Before they meet again: a job that joins in that meeting may be here before this one goes on.
        leaves, (before, _) = self.leaves or (), self.pieces.get(self.signature, (None, 0))
        key = key_of(self.default, self.world)
        recalled = recall(
            key, rank=self.world.rank, together=job.together, ran=job.cuts.get(key), before=before,
            steps=job.steps_left,
        )  # fmt: skip
        sole = job.sole  # in that meeting, hence the same on all ranks
        pieces = recalled.ran if recalled.ran is not None else recalled.before if sole else 0
        if pieces is None and recalled.first:
            pieces, compiled = self._search(job, leaves, job.together, recalled)
        else:
            pieces = pieces or 0
            program = self._program(pieces)
            self._agree_in(job, program)
            compiled = self._compile(job, pieces, program)
        # At most one job of a run is sole and the first. So what stays here is the same on ranks where jobs come in
        # unlike orders.
        if sole and recalled.first:
            self.pieces[self.signature] = pieces, compiled.program.exchange_hash()
        else:
            self.pieces.setdefault(self.signature, (0, self.signature))
        job.cuts[key], self.leaves = pieces, None
        return compiled

    def _program(self, pieces: int) -> Program:
        if pieces == 0:
            return self.default
        known = self.compiled.get(pieces)
        return known.program if known else self.traced.cut(pieces, bucket_bytes=self.bucket_bytes)

    def _compile(self, job: job_context.JobContext | None, pieces: int, program: Program) -> Compiled:
        with self._compiling(job, program.name), self.lock:
            if (compiled := self.compiled.get(pieces)) is None:
                compiled = self.compiled[pieces] = program.compile(self.kinds, cache=self.world.executables)
        return compiled

    @contextmanager
    def _compiling(self, job: job_context.JobContext | None, name: str) -> Iterator[None]:
        whose, step = (name, 0) if job is None else (job.name, job.step)
        with (
            self.world.flight.during("compile", job=whose, step=step),
            nullcontext() if job is None else job.measure("compile", name),
        ):
            yield

    def _agree_in(self, job: job_context.JobContext, program: Program) -> None:
        if program.exchanges and job.first_use(program, self.pieces):
            # The label is compared by all ranks: behind its first line it holds all that they must have in common.
            order = order_hash(program) if self.world.size > 1 else 0  # not while the exchange lane waits for it
            label = f"first call of `{program.name}`\n{program.exchange_signature()}"

            def agree(control: Control) -> None:
                job.check_alike(control)
                agree_on_order(control, program, order)
                # Not while they compile: there, a rank that fails would not come.
                self.world.wire().create_communicators(program.exchanges, dict(program.axes))

            job.together(label, agree)

    def _search(
        self, job: job_context.JobContext | None, leaves: Sequence[Any], together: Together, recalled: CutHint
    ) -> tuple[int, Compiled]:
        """The fastest cut: measured. Nothing else runs beside this step as that begins."""
        world = self.world

        def build(program: Program) -> Compiled:
            if job is not None:
                self._agree_in(job, program)
            else:
                agree_alone(world, program, call=0)
            with self._compiling(job, program.name):
                return program.compile(self.kinds, cache=world.executables)

        pieces, compiled = search(
            self.traced, leaves, world=world, cut=self._program, build=build, together=together, recalled=recalled
        )
        return pieces, self.compiled.setdefault(pieces, compiled)


def agree_alone(world: World, program: Program, call: int, *, by_call: bool = False) -> None:
    """Makes sure that all ranks are about to make the same exchanges, outside a runner. Waits for all ranks.

    Args:
        world: All ranks.
        program: What this rank is about to run.
        call: The how-many-th of the step.
        by_call: It must be the same call of it on all ranks.

    Raises:
        ExchangeError: They are not; on every rank.
    """
    if not program.exchanges:
        return
    own, order = (program.exchange_hash() + call * by_call) % 2**62, order_hash(program)
    with world.watching(job=program.name, step=call, segment=-1, what="agreement"):
        low, high, first, last = world.control.allreduce_min(np.array([own, -own, order, -order], np.int64))
        if low != -high:
            told = [t.partition("\n") for t in world.control.allgather_text(f"{call}\n{program.exchange_signature()}")]
            texts = [text for *_, text in told]
            if any(not text for text in texts):  # calls of mpi4jax, which have no number before them
                raise ExchangeError(without_calls(program.name, [r for r, text in enumerate(texts) if text]))
            if len(set(texts)) == 1:
                raise ExchangeError(branch_call_mismatch(program.name, [f"call {number}" for number, *_ in told]))
            raise ExchangeError(signature_mismatch(program.name, texts))
        if first != -last:
            check_order(world.control, program)


def _on_host(undecided: Predicate) -> Callable[[Sequence[Any]], int]:
    """The predicate of a `cond` as a function of the flat arguments, computed on the host's CPU device."""
    cpu = jax.local_devices(backend="cpu")[0]
    evaluate = jax.jit(jaxpr_as_fun(undecided.jaxpr))

    def predicate(leaves: Sequence[Any]) -> int:
        with jax.default_device(cpu):
            (index,) = evaluate(*(np.asarray(leaves[p]) for p in undecided.inputs))
        return min(max(int(index), 0), undecided.branches - 1)

    return predicate


def _without_values(traced: Traced, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a program is compiled for. It may be so long after the arrays themselves were donated."""
    places = [x.sharding if isinstance(x, jax.Array) and x.committed else None for x in leaves]
    return tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p) for a, p in zip(traced.in_avals, places, strict=True)
    )


def _advise(program: Program, told: set[str]) -> None:
    """Says what is legal but rarely meant; about one loop once, however often the step is compiled."""
    if not program.exchanges and not program.local_step:
        axes = ", ".join(f"`{n}`" for n, _ in program.axes)
        warnings.warn(
            f"`{program.name}` has no exchange over {axes}: every rank computes alone. If it is a train step, it lacks"
            ' something like `grads = jax.lax.pmean(grads, "batch")`; if it is not, plain `jax.jit` will do.',
            stacklevel=2,
        )
    loops: dict[str, list[Exchange]] = {}
    for x in program.exchanges:
        if (loop := dict(x.params).get("loop")) is not None:
            loops.setdefault(loop, []).append(x)
    for loop, exchanges in loops.items():
        if loop in told or program.is_unit:
            continue
        told.add(loop)
        votes = program.traced.present and any((x.op, x.dtype, x.shape) == ("pmax", "int32", ()) for x in exchanges)
        _log.warning(
            "`%s` exchanges inside a %s at %s: the whole loop runs on the exchange lane and hides nothing. Unroll the"
            " loop or move the exchange out of it.%s", program.name, loop.split()[0], exchanges[0].source,
            " Ranks may be through with it after different numbers of iterations, and vote before each, by 4 bytes,"
            " whether to go on." if votes else "",
        )  # fmt: skip


def _advise_on_accumulation(traced: Traced, told: set[str]) -> None:
    """Warns once about each `optax.MultiSteps` that exchanges in every mini-step."""
    for source in repeated_exchanges(traced.whole, traced.axes, traced.wire):
        if source in told:
            continue
        told.add(source)
        _log.warning(
            "`%s` exchanges in every mini-step of `optax.MultiSteps`, at %s: it runs its optimizer each time and keeps"
            " the last result. `jaxcross.exchange.accumulate(optimizer, every=k)` exchanges once for k gradients, with"
            " the same updates to rounding.", traced.name, source,
        )  # fmt: skip
