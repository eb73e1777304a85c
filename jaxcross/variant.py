"""What becomes of a step for one set of argument types: its program, agreed by all ranks, then its executables."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jaxcross.cut_search import search
from jaxcross.errors import ExchangeError
from jaxcross.program.agreement import disagreement
from jaxcross.program.compile import Once
from jaxcross.program.cut import Cut
from jaxcross.program.execution import Compiled
from jaxcross.program.flatten import Predicate
from jaxcross.program.segments import Program
from jaxcross.program.trace import Traced
from jaxcross.runtime import job as runtime
from jaxcross.world import World
from jaxcross.world.control import Control

_log = logging.getLogger("jaxcross")


@dataclass(slots=True)
class Variant:
    """A traced step, its program and its executables; with a `cond` that the host decides, one child a branch.

    Attributes:
        traced: The step for one set of argument types.
        cut, bucket_bytes: As given to `crossover`.
        told: Loops whose exchanges were spoken of; shared by all variants of a step.
        pieces: What `cut="auto"` found without a job, by `signature`: a number and its program's signature. Shared by
            all variants of a step, since shapes may change on one rank alone, and the others would not come to search.
        leaves: Arguments to compile for; dropped then.
        world: Whose communicators and executables.
    """

    traced: Traced
    cut: Cut
    bucket_bytes: int
    told: set[str]
    pieces: dict[int, tuple[int, int]]
    leaves: tuple[Any, ...]
    world: World
    children: Once = field(default_factory=Once)
    predicate: Callable[[Sequence[Any]], int] | None = None
    program: Program | None = None
    compiled: Compiled | None = None
    signature: int | None = field(init=False, default=None)  # of the program before `auto` has searched
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.traced.undecided is not None:
            self.predicate, self.leaves = _on_host(self.traced.undecided), ()
            return
        self.program = self.traced.cut(self.cut, bucket_bytes=self.bucket_bytes)
        self.signature = self.program.exchange_hash()
        _advise(self.program, self.told)

    def choose(self, leaves: Sequence[Any]) -> Variant:
        """The node whose program these arguments run."""
        if self.predicate is None:
            return self
        index = self.predicate(leaves)

        def make() -> Variant:
            return Variant(
                traced=self.traced.decide(index), cut=self.cut, bucket_bytes=self.bucket_bytes, told=self.told,
                pieces=self.pieces, leaves=tuple(leaves), world=self.world,
            )  # fmt: skip

        return self.children.get(index, make).choose(leaves)

    def agree(self, call: int) -> None:
        """Makes sure that all ranks are about to make the same exchanges, outside a runner. Waits for all ranks.

        Raises:
            ExchangeError: They are not; on every rank.
        """
        assert self.program is not None
        # Where the host takes branches, ranks may be at unlike calls of it, with equal exchanges.
        agree_alone(self.world, self.program, call, by_call=bool(self.traced.choices))

    def compiled_for(self, job: runtime.JobContext | None) -> Compiled:
        """The executables. At a job's first use waits until all ranks are known to want the same exchanges.

        The ranks agree (without a job: by `agree`) before anything is compiled. Jobs agree each for themselves, making
        their communicators: which of two like jobs compiles first may differ between ranks.
        """
        program = self.program
        assert program is not None
        if job is not None:
            self._agree_in(job, program)
        if self.compiled is not None:
            return self.compiled
        if self.cut == "auto" and (job is None or job.sole) and any(not program.silent(s) for s in program.collectives):
            if job is not None or (known := self._known()) is None:
                return self._search(job)
            self.program = program = known
        with self._compiling(job, program.name), self.lock:
            compiled = self.compiled or program.compile(self.leaves, cache=self.world.executables)
            self.compiled, self.leaves = compiled, ()
        return compiled

    def _known(self) -> Program | None:
        """The cut that was found for other shapes, if the exchanges are the same."""
        assert self.signature is not None
        if (found := self.pieces.get(self.signature)) is None:
            return None
        pieces, signature = found
        program = self.traced.cut(pieces, bucket_bytes=self.bucket_bytes)
        return program if program.exchange_hash() == signature else None

    @contextmanager
    def _compiling(self, job: runtime.JobContext | None, name: str) -> Iterator[None]:
        whose, step = (name, 0) if job is None else (job.name, job.step)
        with (
            self.world.flight.during("compile", job=whose, step=step),
            nullcontext() if job is None else job.measure("compile", name),
        ):
            yield

    def _agree_in(self, job: runtime.JobContext, program: Program) -> None:
        if program.exchanges and job.first_use(program):
            # The label is compared by all ranks: behind its first line it holds all that they must have in common.
            label = f"first call of `{program.name}`\n{program.exchange_signature()}"

            def agree(control: Control) -> None:
                job.check_alike(control)
                # Not while they compile: there, a rank that fails would not come.
                self.world.wire().meet(program.exchanges, dict(program.axes))

            job.together(label, agree)

    def _search(self, job: runtime.JobContext | None) -> Compiled:
        """The fastest cut: measured, where nothing else runs beside this step."""
        world = self.world

        def build(program: Program) -> Compiled:
            if job is not None:
                self._agree_in(job, program)
            else:
                agree_alone(world, program, call=0)
            with self._compiling(job, program.name):
                return program.compile(self.leaves, cache=world.executables)

        pieces, self.compiled = search(
            self.traced, self.leaves, world=world, build=build,
            cut=lambda pieces: self.traced.cut(pieces, bucket_bytes=self.bucket_bytes),
            together=(lambda _, work: work(world.control)) if job is None else job.together,
            found={} if job is None else job.cuts,
        )  # fmt: skip
        self.program, self.leaves = self.compiled.program, ()
        if job is None:
            assert self.signature is not None
            self.pieces[self.signature] = pieces, self.program.exchange_hash()
        return self.compiled


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
    own = (program.exchange_hash() + call * by_call) % 2**62
    with world.watching(job=program.name, step=call, segment=-1, what="agreement"):
        low, high = world.control.allreduce_min(np.array([own, -own], np.int64))
        if low != -high:
            told = [t.partition("\n") for t in world.control.allgather_text(f"{call}\n{program.exchange_signature()}")]
            texts = [text for *_, text in told]
            if len(set(texts)) == 1:
                calls = ", ".join(f"rank {rank} in call {number}" for rank, (number, *_) in enumerate(told))
                raise ExchangeError(
                    f"`{program.name}` takes a branch with exchanges at different calls: {calls}. What decides it must"
                    " be the same on every rank: look at counters in the states that ranks started from."
                )
            raise ExchangeError(disagreement(program.name, texts))


def _on_host(undecided: Predicate) -> Callable[[Sequence[Any]], int]:
    """The predicate of a `cond` as a function of the flat arguments, computed on the host's CPU device."""
    cpu = jax.local_devices(backend="cpu")[0]
    evaluate = jax.jit(jaxpr_as_fun(undecided.jaxpr))

    def predicate(leaves: Sequence[Any]) -> int:
        with jax.default_device(cpu):
            (index,) = evaluate(*(np.asarray(leaves[p]) for p in undecided.inputs))
        return min(max(int(index), 0), undecided.branches - 1)

    return predicate


def _advise(program: Program, told: set[str]) -> None:
    """Says what is legal but rarely meant; about one loop once, however often the step is compiled."""
    if not program.exchanges and not program.local_step:
        axes = ", ".join(f"`{n}`" for n, _ in program.axes)
        warnings.warn(
            f"`{program.name}` has no exchange over {axes}: every rank computes alone. If it is a train step, it lacks"
            ' something like `grads = jax.lax.pmean(grads, "batch")`; if it is not, plain `jax.jit` will do.',
            stacklevel=2,
        )
    loops: dict[str, str] = {}
    for x in program.exchanges:
        if (loop := dict(x.params).get("loop")) is not None:
            loops.setdefault(loop, x.source)
    for loop, source in loops.items():
        if loop in told:
            continue
        told.add(loop)
        _log.warning(
            "`%s` exchanges inside a %s at %s: it is correct, but the whole loop runs on the exchange lane and hides"
            " nothing. Unroll the loop or move the exchange out of it.", program.name, loop.split()[0], source,
        )  # fmt: skip
