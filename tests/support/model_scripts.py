"""Step graphs, scripts and small cases for the model checker, and how a case's jobs can end."""

from dataclasses import replace

import pytest

from jaxcross.interleave import messages as m
from jaxcross.interleave.simulator import Batch, Call, Prepare
from jaxcross.interleave.step_graph import StepGraph
from tests.model.explore import explore
from tests.model.model_case import Case

PLAIN = StepGraph(
    kinds=("compute", "collective", "compute"),
    needs=((), (0,), (0, 1)),
    after_commit=frozenset({2}),
    signature=1,
    text="x",
)
TWICE = StepGraph(
    kinds=("compute", "collective", "compute", "collective"),
    needs=((), (0,), (1,), (2,)),
    signature=2,
    text="y",
)
SHORT = StepGraph(kinds=("compute", "collective"), needs=((), (0,)), signature=3, text="z")
WIDE = StepGraph(
    kinds=("compute", "compute", "collective"), needs=((), (), (0, 1)), signature=4, text="w"
)
TRAIN, EVALUATE = (replace(SHORT, function=name) for name in ("train", "evaluate"))
LOCAL = StepGraph(kinds=("compute",), needs=((),))
BETWEEN = StepGraph(kinds=("compute",), needs=((),), local_step=True)

EXHAUSTIVE = pytest.mark.exhaustive  # seconds each; benchmarks/model_check.py has larger ones


def step(graph, **fails):
    """`step(PLAIN, s0="dispatch")`: segment 0 fails when it is dispatched."""
    return Call(graph, (0.0,) * len(graph.kinds), {int(key[1:]): how for key, how in fails.items()})


def fed(batches, graph=PLAIN):
    """A loop over `batches` batches, which are prepared while the loop runs."""
    loop = [action for n in range(batches) for action in (Batch(0, n), step(graph))]
    prepared = [Prepare(0, 0, n + 1, n + 1 == batches) for n in range(batches)] or [
        Prepare(0, 0, 0, True)
    ]
    return (*prepared, *loop, Batch(0, batches))


def loops(*reads):
    """Two batches from each of several loops. All but the first start when they are first read."""
    script, index = [], {}
    for stream in reads:
        if stream not in index:
            script.append(Prepare(0, stream, 2, True))
        index[stream] = index.get(stream, -1) + 1
        script.append(Batch(stream, index[stream]))
    return tuple(script)


def alike(ranks, *jobs, **options):
    return Case(scripts=(tuple(jobs),) * ranks, **options)


def unlike(*ranks, **options):
    """One job with a different script on each rank."""
    return Case(scripts=tuple((script,) for script in ranks), **options)


def ends(case):
    """The ways the jobs can end, as (steps, how) per job. Who reported what is tested elsewhere."""
    return {
        tuple((steps, left[0]) for _, steps, left in jobs) for jobs, _ in explore(case).outcomes
    }


def request(what):
    return m.JobRequested(0, "", what)
