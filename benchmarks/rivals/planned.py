"""jaxcross: runs jobs alone, whose profiles we predict from, and several jobs together."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rivals.crossed import (
    AXIS,
    exchange,
    world,
)  # first: it starts the world, before the first JAX array

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
from plan_cases import kind_of

import jaxcross
from jaxcross.commands.contention_rank import Measurement
from jaxcross.step.profile import Profile
from rivals import jax_work
from rivals.cases import Spec
from rivals.serving import arguments, serve


class Jobs:
    """A step per kind of job, and a state per model and number that is kept from run to run."""

    def __init__(self, *, smoke: bool) -> None:
        self._smoke = smoke
        self._works: dict[Spec, Any] = {}
        self._steps: dict[str, Any] = {}
        self._states: dict[tuple[Spec, int], Any] = {}
        self._contention: dict[float, Measurement] = {}
        self._alone: Any = None

    def run(
        self, jobs: Sequence[dict[str, Any]], shares: Sequence[float], mbps: float, out: str
    ) -> dict[str, Any]:
        """Runs jobs together. If there's only one, the answer also has its profile.

        Each job is given as `{"name", "kind", "number", "steps"}`. Rank 0 writes the report to the
        file `out`.
        """
        ends: dict[str, list[float]] = {job["name"]: [] for job in jobs}
        for job in jobs:  # so that all arrays are on the device before the clock starts
            jax.block_until_ready(self._arguments(job["kind"], job["number"]))
        policy = jaxcross.Weighted(tuple(shares)) if shares else jaxcross.RoundRobin()
        world.control.allgather_text("")
        begin = time.perf_counter()
        with jaxcross.Runner(world, policy) as runner:
            for job in jobs:
                runner.add(
                    job["name"],
                    self._train,
                    {"facts": job, "ends": ends[job["name"]], "begin": begin},
                )
            report = runner.run()
        jax.block_until_ready(list(self._states.values()))
        at_work = [span for span in report.spans if span.in_step]
        walls = [
            max(span.end_ns for span in own) - min(span.start_ns for span in own)
            for own in ([span for span in at_work if span.rank == rank] for rank in report.ranks)
        ]
        if world.rank == 0:
            report.to_json(out)
        # The lab's own description is of the rate that it started with.
        link = f"real link {mbps:g}mbit"
        summary = report.summary() | {"link": link}
        found = {"wall_s": max(walls) / 1e9, "ends": ends, "summary": summary}
        if len(jobs) == 1:
            profile = Profile.of(report, jobs[0]["name"], mbps=mbps)
            found["profile"] = replace(profile, link=link).as_data()
        return found

    def estimate(self, kind: str, jobs: int, contention: list[Any]) -> dict[str, Any]:
        """Returns `jaxcross.estimate` for a kind of job at the link's current rate."""
        found = jaxcross.estimate(
            self._step(kind),
            *self._arguments(kind, 0),
            jobs=jobs,
            contention=jaxcross.plan.MachineContention.from_json(contention),
        )
        return {"estimate": found.as_dict()}

    def contention(self, kind: str, mbps: float, window_s: float) -> dict[str, Any]:
        """Measures one round of contention at the link's current rate, with this kind's model."""
        if self._alone is None:
            work = self._work(kind_of(kind, smoke=self._smoke).spec)
            step = jax.jit(work.make(lambda tree: tree), donate_argnums=0)
            batch = jax_work.batch_of(work, 0, world.rank)
            held = [jax_work.state_of(work, 0)]

            def alone(_: Any) -> Any:  # all rates share the state, which each step donates
                held[0], metrics = step(held[0], batch)
                return metrics

            self._alone = alone
        if mbps not in self._contention:
            training = self._alone, self._alone(None)
            self._contention[mbps] = Measurement(world, window_s, training)
        measurement = self._contention[mbps]
        return {"megabytes": measurement.megabytes, **asdict(measurement.round())}

    def _train(
        self, job: jaxcross.JobContext, *, facts: dict[str, Any], ends: list[float], begin: float
    ) -> None:
        key = kind_of(facts["kind"], smoke=self._smoke).spec, facts["number"]
        state, batch = self._arguments(facts["kind"], facts["number"])
        step = self._step(facts["kind"])
        del self._states[key]  # the first step donates it
        for each in itertools.repeat(batch, facts["steps"]):
            state, _ = step(state, each)
            ends.append(time.perf_counter() - begin)
        self._states[key] = state

    def _arguments(self, kind: str, number: int) -> tuple[Any, Any]:
        found = kind_of(kind, smoke=self._smoke)
        spec = found.spec
        work = self._work(spec)
        if (spec, number) not in self._states:
            self._states[spec, number] = jax_work.state_of(work, number)
        batch = jax_work.batch_of(work, number, world.rank)
        if world.rank == 1:
            batch = jax.tree.map(lambda x: jnp.concatenate([x] * found.rank_1_batches), batch)
        return self._states[spec, number], batch

    def _step(self, name: str) -> Any:
        if name not in self._steps:
            kind = kind_of(name, smoke=self._smoke)
            step = self._work(kind.spec).make(exchange(kind.wire))
            self._steps[name] = jaxcross.crossover(step, axes=AXIS, cut=kind.cut, donate_argnums=0)
        return self._steps[name]

    def _work(self, spec: Spec) -> Any:
        if spec not in self._works:
            self._works[spec] = jax_work.workload(spec)
        return self._works[spec]


def main() -> int:
    args = arguments(__doc__)
    jobs = Jobs(smoke=args.smoke)
    return serve(
        args,
        world.rank,
        {"run": jobs.run, "estimate": jobs.estimate, "contention": jobs.contention},
    )


if __name__ == "__main__":
    raise SystemExit(main())
