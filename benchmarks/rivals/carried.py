"""jaxcross: jobs whose exchange runs within a step, is carried to the next one, or is left out."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rivals.crossed import (
    AXIS,
    Collectives,
    taxed,
    world,
)  # first: it starts the world, before the first JAX array

import jax  # isort: skip
import jax.numpy as jnp
import optax
import workloads
from jax.extend.core import jaxpr_as_fun

import jaxcross
from jaxcross import exchange
from jaxcross.program import stages
from jaxcross.testing import decide
from rivals import jax_work
from rivals.cases import EVERY, Spec
from rivals.serving import arguments, own_jobs, serve

ALONE = "alone"
"""An axis with a single rank, so nothing is sent over it."""
FRAGMENTS, BITS = 4, 8
DELAY = EVERY // FRAGMENTS
"""Steps over which a fragment's exchange is spread. It ends when the next fragment's exchange
begins, so the link is never idle.
"""


def optimizer_of(variant: str) -> optax.GradientTransformation:
    """Returns a variant's optimizer, which includes the exchange."""
    if variant in ("blocking", "carried", "work"):
        # The outer optimizer is the paper's. Without a delay, the exchange runs in the step that
        # needs its result.
        outer, delay = (
            optax.sgd(0.7, momentum=0.9, nesterov=True),
            0 if variant == "blocking" else DELAY,
        )
        axis = ALONE if variant == "work" else AXIS
        return exchange.streaming_diloco(
            workloads.momentum(),
            outer,
            axis,
            every=EVERY,
            fragments=FRAGMENTS,
            delay=delay,
            bits=BITS,
        )
    if variant == "delayed":
        return exchange.delayed_mean(workloads.momentum(), AXIS)
    if variant == "mean":
        return optax.chain(exchange.mean(AXIS), workloads.momentum())
    return workloads.momentum()  # jit, compute


class Branches:
    """Records which branches of a step's conditions are taken, and decides each one only once."""

    def __init__(self, traced: Any) -> None:
        self._known: dict[tuple[int, ...], Any] = {(): traced}

    def take(self, arguments: Any) -> None:
        """Notes the branches that these arguments take."""
        leaves, path = jax.tree.leaves(arguments), ()
        while (condition := self._known[path].undecided) is not None:
            (index,) = jaxpr_as_fun(condition.jaxpr)(
                *(jnp.asarray(leaves[place]) for place in condition.inputs)
            )
            taken = (*path, min(max(int(index), 0), condition.branches - 1))
            if taken not in self._known:
                self._known[taken] = self._known[path].decide(taken[-1])
            path = taken

    @property
    def decided(self) -> list[Any]:
        """The programs without conditions that the recorded branches lead to."""
        return [traced for traced in self._known.values() if traced.undecided is None]


class Jobs:
    """One model in all variants. Each job has its own state, which it keeps from run to run."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._work = jax_work.workload(spec)
        self._steps: dict[str, Any] = {}
        self._states: dict[tuple[str, int], Any] = {}
        self._collectives: dict[str, Collectives] = {}

    def forget(self) -> None:
        """Discards all states. They are initialised again on their next use."""
        self._states.clear()

    def prepare(self, variant: str, number: int, steps: int) -> dict[str, Any]:
        """Runs some steps, which compile and allocate memory, and returns how many bytes they need.

        `peak_bytes` is the peak of live bytes over the variant's programs, `state_bytes` the size
        of its state, and `pending_bytes` the part of the state that is still being exchanged.
        """
        if variant == "jit":
            self.loop(number, 2)
            return {}
        state, batch = self._arguments(variant, number)
        branches = Branches(self._step(variant).trace(state, batch))
        del state
        self._together(
            [variant],
            [number],
            [steps],
            jaxcross.RoundRobin(),
            lambda now: branches.take((now, batch)),
        )
        leaves = jax.tree.leaves(self._arguments(variant, number))
        programs = [stages.cut(traced) for traced in branches.decided]
        compiled = [
            stages.compile(program, leaves, cache=world.executables) for program in programs
        ]
        pending = jax.tree.leaves(self._states[self._key(variant, number)], is_leaf=_has_pending)
        return {
            "programs": len(programs),
            "peak_bytes": max(each.peak_live_bytes() for each in compiled),
            "state_bytes": sum(
                x.nbytes for x in jax.tree.leaves(self._states[self._key(variant, number)])
            ),
            "pending_bytes": sum(
                x.nbytes
                for node in pending
                if _has_pending(node)
                for x in jax.tree.leaves(node.pending)
            ),
        }

    def run(self, variants: Sequence[str], steps: Sequence[int], policy: str) -> dict[str, Any]:
        """Runs one job per variant, in crossover or one after the other."""
        if variants == ["jit"]:
            return self.loop(0, steps[0])
        policies = {"crossover": jaxcross.RoundRobin, "sequential": jaxcross.Sequential}
        numbers = [variants[:place].count(variant) for place, variant in enumerate(variants)]
        return self._together(variants, numbers, steps, policies[policy]())

    def loop(self, number: int, steps: int) -> dict[str, Any]:
        """Runs the step without its exchange under `jax.jit`, in a plain loop."""
        state, batch = self._arguments("jit", number)
        loop = jax_work.Loop(self._step("jit"), state, batch)
        del state
        self._states.pop(self._key("jit", number))  # the first step donates it
        world.control.allgather_text("")
        start = time.perf_counter()
        loop.run(steps)
        seconds = time.perf_counter() - start
        self._states[self._key("jit", number)] = loop.state
        return {"wall_s": seconds}

    def exchange(self, variant: str, times: int) -> dict[str, Any]:
        """Measures the variant's exchanges alone."""
        collectives = self._exchanges(variant)
        collectives.timed(1)
        return {"raw": collectives.timed(times)[0]}

    def beside(self, variant: str, exchanges: int) -> dict[str, Any]:
        """Measures the variant's exchanges alongside a computation, and that computation."""
        collectives = self._exchanges(variant)
        state, batch = self._arguments("jit", 0)
        loop = jax_work.Loop(self._step("jit"), state, batch)
        del state
        self._states.pop(self._key("jit", 0))
        loop.run(2)
        world.control.allgather_text("")
        found = taxed(loop, collectives, exchanges)
        self._states[self._key("jit", 0)] = loop.state
        return found

    def _together(
        self,
        variants: Sequence[str],
        numbers: Sequence[int],
        steps: Sequence[int],
        policy: Any,
        note: Any = None,
    ) -> dict[str, Any]:
        places = list(zip(variants, numbers, strict=True))
        ends: list[list[float]] = [[] for _ in places]
        for variant, number in places:
            jax.block_until_ready(self._arguments(variant, number))
        world.control.allgather_text("")
        begin = time.perf_counter()

        def train(job: Any, place: int) -> None:
            variant, number = places[place]
            key, step = self._key(variant, number), self._step(variant)
            state, batch = self._arguments(variant, number)
            del self._states[key]  # the first step donates it
            for each in itertools.repeat(batch, steps[place]):
                if note is not None:
                    note(state)
                state, _ = step(state, each)
                ends[place].append(time.perf_counter() - begin)
            self._states[key] = jax.block_until_ready(state)

        with jaxcross.Runner(world, policy) as runner:
            for place in range(len(places)):
                runner.add(f"job{place}", train, {"place": place})
            report = runner.run()
        seconds = time.perf_counter() - begin
        return {"wall_s": seconds, "ends": ends, "summary": report.summary()}

    def _key(self, variant: str, number: int) -> tuple[str, int]:
        return "inner" if variant in ("jit", "compute") else variant, number

    def _arguments(self, variant: str, number: int) -> tuple[Any, Any]:
        key = self._key(variant, number)
        if key not in self._states:
            params, stats, _ = jax_work.state_of(self._work, number)
            self._states[key] = params, stats, optimizer_of(variant).init(params)
        return self._states[key], jax_work.batch_of(self._work, number, world.rank)

    def _step(self, variant: str) -> Any:
        if variant not in self._steps:
            work = workloads.resnet(
                self._spec.model, **self._spec.sizes(), tx=optimizer_of(variant)
            )
            step = work.make(lambda tree: tree)  # the optimizer exchanges
            axes = {AXIS: world.size, ALONE: 1} if variant == "work" else AXIS
            self._steps[variant] = (
                jax.jit(step, donate_argnums=0)
                if variant == "jit"
                else jaxcross.crossover(step, axes=axes, donate_argnums=0)
            )
        return self._steps[variant]

    def _exchanges(self, variant: str) -> Collectives:
        if variant not in self._collectives:
            arguments = self._arguments(variant, 0)
            leaves = jax.tree.leaves(arguments)
            program = stages.cut(decide(self._step(variant).trace(*arguments), leaves))
            self._collectives[variant] = Collectives(
                stages.compile(program, leaves, cache=world.executables)
            )
        return self._collectives[variant]


def _has_pending(node: Any) -> bool:
    return hasattr(node, "pending") and isinstance(node, tuple)


def main() -> int:
    args = arguments(__doc__)
    ((_, spec), *_) = own_jobs(args)
    jobs = Jobs(spec)
    actions = {
        name: getattr(jobs, name) for name in ("forget", "prepare", "run", "exchange", "beside")
    }
    return serve(args, world.rank, actions)


if __name__ == "__main__":
    raise SystemExit(main())
