"""Predicts a run: an estimate, profiles, a prediction, a plan, and the run that it's for."""

from typing import assert_type

import jax
import jax.numpy as jnp

import jaxcross
from jaxcross import plan

world = jaxcross.initialize()


@jaxcross.crossover(axes="batch", cut="auto")
def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return w - 0.1 * jax.lax.pmean(jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), "batch"), {}


w = jnp.ones((16, 4))
x = jnp.ones((8, 16))
estimate = jaxcross.estimate(train_step, w, x, jobs=3, mbps=1000, memory="16GB")
assert_type(estimate, plan.Estimate)
print(estimate, estimate.recommendation, estimate.of(2).expected)

with jaxcross.lab.emulated_link(jaxcross.Link(500)):
    report = jaxcross.run([jaxcross.Job("a", train_step, w, [x] * 20)])
profiles = [
    plan.Profile.of(report, "a"),
    plan.Profile.whole("b", compute_s=0.2, exchange_s=0.1, ranks=world.size),
]
profiles[0].to_json("a.json")
assert_type(plan.Profile.load("a.json"), plan.Profile)

prediction = plan.predict(profiles, steps=40)
print(prediction, prediction.s_per_step, report.against(prediction))

made = plan.make(profiles, memory="16GB", most=2)
assert_type(made, plan.Plan)
print(made, made.progress)
with jaxcross.Runner(world, made.group_of("a").policy) as runner:
    print(runner.policy.name)

planned = jaxcross.crossover(train_step.step, axes="batch", cut=plan.cut(profiles[:1]))
w, _ = planned(w, x)
