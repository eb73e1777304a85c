"""A custom policy and a custom instrument."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jaxcross


@dataclass(frozen=True)
class Priority:
    """Gives the job that was added first twice the share of any other job."""

    name: str = "priority"

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs)

    def next(self, candidates: Collection[int], turns: jaxcross.Turns) -> int:
        return min(candidates, key=lambda job: (turns.start_tag(job), turns.distance(job)))

    def share(self, job: int) -> float:
        return 2.0 if job == 0 else 1.0


class Waits(jaxcross.Instrument):
    """Records the seconds that each job has waited for its turns."""

    def __init__(self) -> None:
        self.waited_s: Counter[str] = Counter()
        self.losses: list[tuple[str, int, object]] = []

    def span(self, span: jaxcross.Span) -> None:
        if span.kind == "compute":
            self.waited_s[span.job] += (span.start_ns - span.ready_ns) // 10**9

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        if kind == "status":
            print(job, step, value)

    def metrics(self, *, job: str, step: int, values: object) -> None:
        self.losses.append((job, step, values))


jaxcross.initialize()
policy: jaxcross.Policy = Priority()
waits = Waits()


@jaxcross.crossover(axes="batch")
def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return w + jax.lax.pmean(x, "batch"), {}


jobs = [jaxcross.Job(name, step, jnp.zeros(1), [jnp.ones(1)] * 3) for name in "ab"]
jaxcross.run(jobs, policy=policy, instruments=(waits,))
print(waits.waited_s.most_common(1))
