"""Does the interleaver keep its promises in every possible order of a few jobs on a few ranks?

    python benchmarks/model_check.py [--json FILE] [--smoke]

`explore` explores each case completely: every move of every thread in every order, on real
interleavers. It stops if a rule is broken, if ranks enter different slots, if a rank gets stuck, or
if a thread is left behind, and then prints the moves that led there. The benchmark also fails if a
case ends in an unexpected way. We inject failures on one rank: in every segment, both at dispatch
and later, and in the training loop. We report:
  states    the states of one rank
  meetings  the sets of states in which ranks enter a slot of the exchange lane together
  joint     a lower bound on the number of states of all ranks together that these represent
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads import parser, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checker isn't part of the package
from jaxcross.interleave import messages as m
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.simulator import Add, Batch, Call, Fail, Prepare, Sync
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from tests.model.explore import explore
from tests.model.model_case import Case, Script

SHORT = StepGraph(kinds=("compute", "collective"), needs=((), (0,)), signature=1, text="short")
PLAIN = StepGraph(
    kinds=("compute", "collective", "compute"),
    needs=((), (0,), (0, 1)),
    after_commit=frozenset({2}),
    signature=2,
    text="plain",
)
TWICE = StepGraph(
    kinds=("compute", "collective", "compute", "collective", "compute"),
    needs=((), (0,), (1,), (2,), (0, 3)),
    after_commit=frozenset({4}),
    signature=3,
    text="twice",
)
LOCAL = StepGraph(kinds=("compute",), needs=((),))
POLICIES = {
    "round-robin": RoundRobin(),
    "weighted": Weighted((1.0, 3.0, 2.0)),
    "sequential": Sequential(),
}

INTERRUPT = ((m.StopRequested(),), (), (), ())  # on rank 0, at any moment

Expected = set[str]  # how the jobs may end, in their order


def step(graph: StepGraph, **fails: str) -> Call:
    """One call. With `step(PLAIN, s2="complete")`, segment 2 fails on the device."""
    return Call(graph, (0.0,) * len(graph.kinds), {int(key[1:]): how for key, how in fails.items()})


def fed(batches: int, graph: StepGraph) -> Script:
    """A loop over batches that are prepared in the meantime."""
    prepared = tuple(Prepare(0, 0, n + 1, n + 1 == batches) for n in range(batches))
    return (
        *prepared,
        *(a for n in range(batches) for a in (Batch(0, n), step(graph))),
        Batch(0, batches),
    )


def alike(ranks: int, *jobs: Script, **options: Any) -> Case:
    """The same jobs on all ranks."""
    return Case(scripts=(jobs,) * ranks, **options)


def one_bad(ranks: int, bad: Script, *good: Script, **options: Any) -> Case:
    """The same jobs on all ranks, except that the first job is `bad` on rank 0."""
    return Case(scripts=((bad, *good[1:]), *((good,) * (ranks - 1))), **options)


def cases(smoke: bool) -> Iterator[tuple[str, Case, Expected]]:
    """Yields each case's name, the case, and how it may end."""
    ended = {"ended"}
    for ranks in (2,) if smoke else (2, 3, 4):
        yield f"{ranks} ranks, 1 job, 2 steps", alike(ranks, (step(PLAIN), step(PLAIN))), ended
        yield (
            f"{ranks} ranks, 1 job, an interrupt",
            alike(ranks, (step(PLAIN),), outside=INTERRUPT[:ranks]),
            {
                "ended",
                "stopped",
            },
        )
    for segment in (0,) if smoke else (0, 2, 4):
        for how in ("dispatch", "complete"):
            graph = PLAIN if smoke else TWICE
            bad, good = (
                (step(graph, **{f"s{segment}": how}), step(graph)),
                (step(graph), step(graph)),
            )
            yield (
                f"2 ranks, 1 job, segment {segment} fails, {how}",
                one_bad(2, bad, good),
                {"failed"},
            )
    yield (
        "2 ranks, 1 job, its loop raises",
        one_bad(2, (step(PLAIN), Fail("x")), (step(PLAIN),) * 2),
        {"failed"},
    )
    yield (
        "2 ranks, 1 job, one rank ends early",
        one_bad(2, (step(PLAIN),), (step(PLAIN),) * 2),
        {"failed"},
    )
    if smoke:
        return
    yield "2 ranks, 1 job, unequal data", one_bad(2, fed(1, PLAIN), fed(2, PLAIN)), ended
    yield "3 ranks, 1 job, unequal data", one_bad(3, fed(1, SHORT), fed(2, SHORT)), ended
    mixed = (Sync("restore"), step(PLAIN), step(LOCAL), step(PLAIN), Sync("save"))
    yield "3 ranks, 1 job, syncs and work without exchanges", alike(3, mixed), ended
    for name, policy in POLICIES.items():
        for ranks in (2, 3):
            two = alike(ranks, (step(SHORT),), (step(SHORT),), policy=policy)
            yield f"{ranks} ranks, 2 jobs, {name}", two, {"ended, ended"}
    yield "2 ranks, 2 jobs with updates", alike(2, (step(PLAIN),), (step(PLAIN),)), {"ended, ended"}
    yield (
        "2 ranks, 2 jobs, 2 steps",
        alike(2, (step(SHORT),) * 2, (step(SHORT),) * 2),
        {"ended, ended"},
    )
    yield (
        "2 ranks, 2 jobs, an interrupt",
        alike(2, (step(SHORT),), (step(SHORT),), outside=INTERRUPT[:2]),
        {
            "ended, ended",
            "stopped, stopped",
            "ended, stopped",
            "stopped, ended",
        },
    )
    for segment, how in ((0, "dispatch"), (0, "complete"), (2, "dispatch"), (2, "complete")):
        bad, good, other = (step(PLAIN, **{f"s{segment}": how}),), (step(PLAIN),), (step(SHORT),)
        yield (
            f"2 ranks, 2 jobs, segment {segment} fails, {how}",
            one_bad(2, bad, good, other),
            {"failed, ended"},
        )
    requested = [
        (m.JobRequested(0, "", request),)
        for request in (JobRequest.STOP, JobRequest.PAUSE, JobRequest.RESUME)
    ]
    yield (
        "2 ranks, 1 job, a wish to stop",
        alike(2, (step(PLAIN),) * 2, outside=(requested[0], ())),
        {"ended", "stopped"},
    )
    yield (
        "2 ranks, 1 job, a rest",
        alike(2, (step(SHORT),) * 2, outside=((*requested[1], *requested[2]), ())),
        ended,
    )
    for ranks in (2, 3):
        joins = alike(ranks, (Add("new", (step(SHORT),)), step(SHORT)))
        yield f"{ranks} ranks, a job adds another", joins, {"ended, ended"}
    late = alike(2, (step(SHORT),), outside=((Add("new", (step(SHORT),)),),) * 2)
    yield "2 ranks, one is added from outside", late, {"ended", "ended, ended"}
    both = Case(
        scripts=(
            ((Add("a", ()), Add("b", ()), step(SHORT)),),
            ((Add("b", ()), Add("a", ()), step(SHORT)),),
        )
    )
    yield "2 ranks, two are added in unlike orders", both, {"ended, ended, ended"}
    alone = alike(
        2,
        (step(SHORT),),
        outside=((m.TextSubmitted("new"),), ()),
        submitted=(("new", (step(SHORT),)),),
    )
    yield "2 ranks, rank 0 submits one", alone, {"ended", "ended, ended"}
    failing = Case(
        scripts=(
            ((Add("new", (Fail("x"),)), step(SHORT)),),
            ((Add("new", (step(SHORT),)), step(SHORT)),),
        )
    )
    yield "2 ranks, one that was added fails", failing, {"ended, failed"}
    again = alike(1, (Add("a", ()), step(SHORT), Add("b", (step(SHORT),)), step(SHORT)))
    yield "1 rank, one joins after another has left", again, {"ended, ended, ended"}
    for what, end in (("skip", "ended"), ("eject", "ejected"), ("raise", "failed")):
        infinite = one_bad(2, (step(PLAIN, s1=what), step(PLAIN)), (step(PLAIN), step(PLAIN)))
        yield f"2 ranks, 1 job, infinite values on one: {what}", infinite, {end}
    raises = one_bad(2, (step(SHORT), Fail("x")), (step(SHORT),) * 2, (step(SHORT),))
    yield "2 ranks, 2 jobs, one raises", raises, {"failed, ended"}
    yield from on_three_ranks(requested)
    yield (
        "2 ranks, 3 jobs in sequence",
        alike(2, *[(step(SHORT),)] * 3, policy=Sequential()),
        {"ended, ended, ended"},
    )
    yield "1 rank, 3 jobs", alike(1, *[(step(SHORT),)] * 3), {"ended, ended, ended"}


def on_three_ranks(requested: list[tuple[m.JobRequested]]) -> Iterator[tuple[str, Case, Expected]]:
    """Faults and requests of one rank that two other ranks have to handle.

    `requested` has the requests to stop, to pause and to resume.
    """
    good, stop, rest = (step(PLAIN),), requested[0], (*requested[1], *requested[2])
    for segment in (0, 2):
        for how in ("dispatch", "complete"):
            bad = (step(PLAIN, **{f"s{segment}": how}),)
            yield (
                f"3 ranks, 1 job, segment {segment} fails, {how}",
                one_bad(3, bad, good),
                {"failed"},
            )
    yield (
        "3 ranks, 1 job, its loop raises",
        one_bad(3, (step(PLAIN), Fail("x")), good * 2),
        {"failed"},
    )
    yield "3 ranks, 1 job, one rank ends early", one_bad(3, good, good * 2), {"failed"}
    for what, end in (("skip", "ended"), ("eject", "ejected"), ("raise", "failed")):
        infinite = one_bad(3, (step(PLAIN, s1=what),), good)
        yield f"3 ranks, 1 job, infinite values on one: {what}", infinite, {end}
    yield (
        "3 ranks, 1 job, a wish to stop",
        alike(3, (step(SHORT),) * 2, outside=(stop, (), ())),
        {"ended", "stopped"},
    )
    yield "3 ranks, 1 job, a rest", alike(3, (step(SHORT),), outside=(rest, (), ())), {"ended"}
    raises = one_bad(3, (step(SHORT), Fail("x")), (step(SHORT),) * 2, (step(SHORT),))
    yield "3 ranks, 2 jobs, one raises", raises, {"failed, ended"}


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--limit",
        type=int,
        default=400_000,
        help="states of one rank, or meetings (default %(default)s)",
    )
    args = options.parse_args()
    result: dict[str, Any] = {"rows": []}
    for name, case, expected in cases(args.smoke):
        begin = time.perf_counter()
        try:
            found = explore(case, args.limit)
        except MemoryError as error:
            print(f"{name}: not explored: {error}", flush=True)
            result["rows"].append({"case": name, "explored": False})
            write_json(args.json, __doc__, result)
            continue
        ends = {", ".join(left[0] for _, _, left in jobs) for jobs, _ in found.outcomes}
        if not ends <= expected:
            raise SystemExit(f"{name}: ended as {ends}, not {expected}")
        row = {
            "case": name,
            "explored": True,
            "states": found.states,
            "moves": found.moves,
            "meetings": found.meetings,
            "joint_states": found.joint_states,
            "ends": sorted(ends),
            "s": time.perf_counter() - begin,
        }
        result["rows"].append(row)
        print(
            (
                f"{name:50} {found.states:>8} states {found.moves:>8} moves {found.meetings:>7} "
                f"meetings {found.joint_states:>12} joint  {row['s']:7.1f} s"
            ),
            flush=True,
        )
        write_json(args.json, __doc__, result)
    done = [row for row in result["rows"] if row["explored"]]
    print(f"{len(done)} cases, {sum(row['states'] for row in done)} states, no rule broken")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
