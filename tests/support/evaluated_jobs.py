"""Jobs with evaluations, on ranks that are threads: the loop, its log, and the files it leaves."""

import json

import numpy as np

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import BrokenError, batches, ending, init, make_step
from tests.support.fakes import run_ranks

STEPS = 12
SCORES = {2: 0.5, 4: 0.25, 6: 0.875, 8: 0.5, 10: 0.75, 12: 0.625}
"""What the evaluation of each step returns."""


def scores(step):
    """The metrics of the evaluation at a step."""
    return {"score": SCORES[step]}


def train(
    ranks,
    folder,
    *,
    after=None,
    fails_at=None,
    early=None,
    best=None,
    keep=2,
    save_every=3,
    evaluate=scores,
    rank=None,
    metrics=None,
    n=2,
    steps=STEPS,
    own=False,
):
    """Runs job `a`. Returns, by rank, its context and the steps that were evaluated there.

    Args:
        after: Number of batches after which the data raises.
        fails_at: Step whose evaluation raises, on the last rank that evaluates.
        early: Arguments of `stop_early`.
        best: Mode in which the best state is kept.
        evaluate: Step -> metrics.
        rank: The only rank that evaluates; None for all.
    """

    def work(world):
        called = []

        def fn(job):
            def evaluation(state):
                called.append(job.step)
                if job.step == fails_at and world.rank == (
                    world.size - 1 if rank is None else rank
                ):
                    raise BrokenError
                values = evaluate(job.step)
                return (
                    {**values, "w": float(np.sum(state["w"]))}
                    if isinstance(values, dict)
                    else values
                )

            state = job.restore(init(world, own=own), mode="local" if own else "check")
            job.every(n, evaluation, rank=rank)
            if early is not None:
                job.stop_early("eval/score", **early)
            step = make_step(world)
            data = batches(world) if after is None else ending(batches(world), after)
            for batch in job.batches(data, steps):
                state = step(state, batch)
                job.state = state
                job.log({"loss": float(job.step)})
                if job.step % save_every == 0:
                    job.save(state)
            return state

        options = {} if best is None else {"best": "eval/score", "mode": best}
        checkpoints = None if folder is None else Checkpoints(folder, keep=keep, **options)
        runner = Runner(world, checkpoints=checkpoints, metrics=metrics)
        job = runner.add("a", fn)
        try:
            runner.run()
        except JobError as error:
            if "BrokenError" not in str(error):
                raise
        return job, called

    return run_ranks(ranks, work)


def evaluations(job):
    """The evaluations that a job logged, as `(step, metrics)`."""
    return [(step, values["eval"]) for step, values in job.history if "eval" in values]


def lines(folder):
    """Every line of metrics on disk, without its time."""
    found = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    return sorted(
        ((line["step"], {k: v for k, v in line.items() if k != "time"}) for line in found), key=str
    )


def steps_on_disk(folder):
    return [
        int(path.name[:12])
        for path in sorted((folder / "a").glob("0*/"))
        if list(path.glob("*/part.json"))
    ]
