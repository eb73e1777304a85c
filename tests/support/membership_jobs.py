"""Jobs on ranks that are threads, which join and leave a run, and their results without others."""

import numpy as np


def loop(job, step, data, state=0.0):
    state = job.restore(state)
    for batch in job.batches(data):
        state = step(state, batch)
    return state


def solo(ranks, batches, state=0.0):
    for batch in batches:
        state += ranks * (state + batch)
    return state


def endless(job, step):
    state = 0.0
    while True:
        state = step(state, 1e-3)


def all_see(job, what):
    """Whether `what()` holds on all ranks; identical across ranks."""
    return bool(
        job.run_on_all_ranks(
            "all", lambda control: control.allreduce_min(np.array([what()], np.int64))
        )[0]
    )


def until(job, step, what):
    """Steps until `what()` holds on all ranks."""
    while not all_see(job, what):
        step(0.0, 1e-3)
