"""`make`: makes a plan for a set of jobs from their profiles.

A plan has to decide which jobs share ranks (i.e. form a group), into how many pieces each job's
step is cut, and how the jobs of a group take turns. A simulation that we call the twin can predict
how well any such choice will do, but trying all combinations would take far too long. So we decide
in two stages:

1. `groups` chooses the groups. It compares them by a simple formula, the bound on a group's round,
   which ignores pieces, turns and contention but is fast enough for 1,000 jobs.
2. For each group, `rates` chooses pieces and turns with the help of the twin.

The second stage may find that the first was too optimistic. If a job would starve, we take the
slowest job out of the group and plan the rest again (`_planned`), instead of searching for another
grouping. If sharing gains too little, we break up whatever is left of the group.

A job that was taken out runs alone, and the plan says why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from jaxcross._arguments import check_type
from jaxcross.errors import quoted, shortened
from jaxcross.interleave import Contention
from jaxcross.jobs import JobMemory, memory_limit, needed_bytes
from jaxcross.plan.groups import Load, group
from jaxcross.plan.machine_contention import MachineContention
from jaxcross.plan.plan import Plan, PlannedGroup, PlannedJob
from jaxcross.plan.rates import MOST_STEPS, PIECES, Cuts, Rates, choose_rates, cuts_of
from jaxcross.plan.twin import VOTE_S, Prediction, predict
from jaxcross.step import Profile

ROUNDS = 8
"""Number of steps that the slowest job makes in the prediction behind a plan's numbers."""
_WORTH = 1.05  # jobs don't share ranks if they'd gain less, since the twin's error is as large


def make(
    profiles: Iterable[Profile],
    *,
    memory: int | str | None = None,
    most: int = 4,
    steps: Mapping[str, float] | None = None,
    contention: Contention | MachineContention | None = None,
    floor: float | None = None,
    vote_s: float = VOTE_S,
) -> Plan:
    """Plans which jobs share ranks, how their steps are cut, and which shares they get.

    No job starves: sharing ranks slows jobs down, but each of them keeps at least the fraction
    `floor` of the speed it would have alone. The result depends only on the arguments. This
    function needs neither ranks nor a device, and doesn't communicate.

    Grouping takes well under a second for 1,000 jobs. On top of that, it takes a few tenths of a
    second to choose pieces and shares for each distinct group, i.e. for each new combination of
    profiles. That's 3 s in total for 1,000 jobs of 8 kinds, and 80 s for 1,000 jobs that are all
    different.

    Planning takes longer if step lengths vary a lot within a group: tens of seconds if a step takes
    1.5 ms for one job and 0.6 s for another.

    Args:
        profiles: How long each job's step takes alone. Several profiles with the same name belong
            to the same job, and must be of different cuts. If all we have is a profile of a job's
            whole step, we estimate how long its pieces would take.
        memory: Device memory of a rank, in bytes or as `"80GB"`; no limit if None.
        most: Largest number of jobs per group.
        steps: Number of steps that each job has to make. By default, we assume that all jobs would
            take equally long alone.
        contention: How much computation and exchange slow each other down. Pass a
            `MachineContention` to look it up at the link rates named by the profiles, or a
            `Contention` to use the same value for any rate. If None, we assume that they don't slow
            each other down, and the plan says so.
        floor: Lowest acceptable speed of each job, relative to its speed alone. Defaults to 1 / k
            in a group of k jobs.
        vote_s: Seconds that a vote takes.

    Returns:
        The plan. If a job runs alone because the jobs of its group would fall below the floor or
        gain too little, the plan says why.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There are no jobs, a job has two profiles of the same cut or profiles of several
            numbers of ranks, a job doesn't fit into the memory alone, its step takes no time,
            `steps` doesn't name each job, or a number is out of range.

    Example:
        >>> profiles = [
        ...     Profile.whole(name, compute_s=0.1, exchange_s=0.1, nbytes=10**7) for name in "ab"
        ... ]
        >>> plan = jaxcross.plan.make(profiles, memory="80GB")
        >>> print(len(plan.groups), plan.groups[0].policy.name, round(plan.progress, 1))
        1 round-robin 1.7
    """
    jobs = by_job(profiles)
    limit = memory_limit(memory)
    check_type(most, Integral, "`most`")
    check_type(steps, Mapping | None, "`steps`")
    for name, count in (steps or {}).items():
        check_type(count, Real, f"`steps` of `{name}`")
    check_type(contention, Contention | MachineContention | None, "`contention`")
    check_type(floor, Real | None, "`floor`")
    if floor is not None and not 0 < floor <= 1:
        raise ValueError(f"`floor` must be in (0, 1], got {floor}")
    loads = _loads(jobs, steps)
    found: list[PlannedGroup] = []
    known: dict[Any, tuple[Rates, PlannedGroup | None]] = {}
    for names in group(loads, most=most, memory=limit).groups:
        found += _planned(
            {name: jobs[name] for name in names}, limit, contention, floor, vote_s, known
        )
    found.sort(key=lambda planned: -len(planned.jobs))
    return Plan(
        groups=tuple(found), memory_bytes=limit, notes=tuple(_notes(jobs, limit, contention))
    )


def by_job(profiles: Iterable[Profile]) -> dict[str, Cuts]:
    """Returns each job's profiles, by the number of pieces into which the step is cut.

    Raises:
        TypeError: `profiles` isn't an iterable of profiles.
        ValueError: There are no jobs, or a job has two profiles of the same cut, or profiles of
            several numbers of ranks.
    """
    check_type(profiles, Iterable, "`profiles`")
    several: dict[str, dict[int, Profile]] = defaultdict(dict)
    for profile in profiles:
        check_type(profile, Profile, "each of `profiles`")
        cuts = several[profile.name]
        pieces = max(len(profile.graph.collectives), 1)
        if pieces in cuts:
            raise ValueError(
                f"two profiles of `{profile.name}` have the same cut (`cut={pieces}`). Pass one "
                "profile per cut; if they're of different jobs, give each job a different name."
            )
        cuts[pieces] = profile
        ranks = sorted({each.ranks for each in cuts.values()})
        if len(ranks) > 1:
            raise ValueError(
                f"the profiles of `{profile.name}` were measured on different numbers of ranks: "
                f"{', '.join(map(str, ranks))}. Pass profiles from runs on the same number."
            )
    if not several:
        raise ValueError("`profiles` is empty: pass the profile of at least one job")
    return {
        name: cuts_of(*cuts.values()) if len(cuts) == 1 else cuts for name, cuts in several.items()
    }


def predict_group(
    planned: PlannedGroup,
    profiles: Iterable[Profile],
    *,
    contention: Contention | MachineContention | None = None,
    vote_s: float = VOTE_S,
) -> Prediction:
    """Predicts a run of a planned group, in which all jobs end at about the same time.

    Args:
        planned: A group of a plan.
        profiles: The profiles that the plan was made from.
        contention: The contention that the plan was made with.
        vote_s: The seconds per vote that the plan was made with.

    Raises:
        ValueError: A job has no profile with the planned number of pieces or ranks, or the step
            lengths differ too much for a prediction.
    """
    jobs = by_job(profiles)
    missing = [job for job in planned.jobs if job.pieces not in jobs.get(job.name, ())]
    if missing:
        raise ValueError(
            f"there is no profile of `{missing[0].name}` with the planned cut "
            f"(`cut={missing[0].pieces}`). Pass the profiles that the plan was made from."
        )
    cuts = [jobs[job.name][job.pieces] for job in planned.jobs]
    for job, cut in zip(planned.jobs, cuts, strict=True):
        if cut.ranks != planned.ranks:
            raise ValueError(
                f"the group of `{job.name}` is planned for {planned.ranks} ranks, but the job's "
                f"profile was measured on {cut.ranks}. Make a plan from this profile, or pass the "
                f"profile of a run on {planned.ranks} ranks."
            )
    return predict(
        cuts,
        policy=planned.policy,
        contention=_there(contention, cuts),
        steps=_steps_of(planned.jobs),
        vote_s=vote_s,
    )


def _steps_of(jobs: Sequence[PlannedJob]) -> list[int]:
    """Returns how many steps each job makes in the prediction of its group."""
    longest = max(jobs, key=lambda job: job.step_s)
    shortest = min(jobs, key=lambda job: job.step_s)
    if not ROUNDS * sum(longest.step_s / job.step_s for job in jobs) <= MOST_STEPS:
        raise ValueError(
            f"Jobs `{longest.name}` and `{shortest.name}`: their step times differ too much for a "
            f"prediction ({longest.step_s:.3g} s and {shortest.step_s:.3g} s), which would have "
            f"more than {MOST_STEPS} steps. Plan these jobs in different groups."
        )
    return [max(2, math.ceil(ROUNDS * longest.step_s / job.step_s)) for job in jobs]


def _loads(jobs: Mapping[str, Cuts], steps: Mapping[str, float] | None) -> list[Load]:
    if steps is not None and steps.keys() != jobs.keys():
        (name, *_) = sorted(steps.keys() ^ jobs.keys())
        wrong = f"job `{name}` is missing" if name in jobs else f"there is no profile of `{name}`"
        raise ValueError(
            f"`steps` must have one entry for each job, and no others, but {wrong}. The jobs are "
            f"{shortened(quoted(jobs), 300)}."
        )
    loads = []
    for name, cuts in jobs.items():
        whole = cuts[min(cuts)]
        # Groups are chosen before we know how steps will be cut, so use the coarsest cut that was
        # measured, which is usually the whole step.
        alone_s = whole.compute_s + whole.exchange_s + whole.host_s
        if not alone_s > 0:
            raise ValueError(
                f"a step of `{name}` takes no time in its profile, so it can't be planned. Pass a "
                "measured profile, or one with times above 0."
            )
        loads.append(
            Load(
                name=name,
                compute_s=whole.compute_s,
                exchange_s=whole.exchange_s,
                ranks=whole.ranks,
                # A job's weight is the number of its steps in a round. Unless the user specifies
                # how many steps each job makes, we assume that all jobs would take equally long
                # alone, which means that jobs with short steps make correspondingly more of them.
                steps=1 / alone_s if steps is None else steps[name],
                memory=whole.memory or JobMemory(),
            )
        )
    return loads


def _planned(
    jobs: dict[str, Cuts],
    limit: int | None,
    contention: Contention | MachineContention | None,
    floor: float | None,
    vote_s: float,
    known: dict[Any, tuple[Rates, PlannedGroup | None]],
) -> list[PlannedGroup]:
    """Plans one group. Jobs that would starve, or that gain too little, run alone.

    We start by planning all jobs of the group together. If any of them would be slower than the
    floor (the lowest acceptable speed), we take out the slowest job and plan the rest again, and so
    on.
    """
    apart: list[tuple[str, str]] = []
    left = dict(jobs)
    found: list[PlannedGroup] = []
    while left:
        there = _there(contention, [cuts[min(cuts)] for cuts in left.values()])
        # The jobs of a sweep all cost the same, so many groups are identical apart from the names
        # of their jobs. Decide how to run such groups only once: that way, 1,000 jobs of 8 kinds
        # take 3 s, as opposed to 80 s for 1,000 jobs that are all different.
        key = (there, *map(_without_name, left.values()))
        if key not in known:
            chosen = choose_rates(
                list(left.values()),
                contention=there,
                floor=floor,
                memory=limit,
                vote_s=vote_s,
            )
            made = None if chosen.refusal else _group_of(left, chosen, there, vote_s, "")
            known[key] = chosen, made
        rates, like = known[key]
        # There are four cases. If the jobs are refused, take out the slowest and try again with the
        # rest. If they'd gain too little together, all of them run alone. If the others were taken
        # out and only one job is left, it runs alone as well. Otherwise, they share ranks.
        slowest = _first_to_go(list(left), rates)
        others = " and ".join(f"`{name}`" for name in left if name != slowest)
        if len(left) > 1 and rates.refusal:
            reason = f"with {others}, {rates.refusal}"
            if rates.speeds:
                speed = min(rates.speeds)
                reason = (
                    f"alongside {others}, `{slowest}` would run at {speed:.2f} of its speed, below "
                    f"{rates.floor:.2f}"
                )
            apart.append((slowest, reason))
            del left[slowest]
        elif len(left) > 1 and rates.progress < _WORTH:
            reason = (
                f"{others} and `{slowest}` would make only {rates.progress:.2f} times as many "
                "steps together"
            )
            apart += [(name, reason) for name in left]
            left = {}
        elif len(left) == 1 and apart:  # all others were taken out, so this job has no partner left
            apart += [(name, apart[-1][1]) for name in left]
            left = {}
        # The result may have been computed for an identical group, so fill in the right names.
        elif like is not None:
            jobs_here = tuple(
                replace(job, name=name) for job, name in zip(like.jobs, left, strict=True)
            )
            found.append(replace(like, jobs=jobs_here))
            left = {}
    # The jobs that were taken out run alone. `choose_rates` still decides how to cut their steps.
    for name, reason in apart:
        there = _there(contention, [jobs[name][min(jobs[name])]])
        rates = choose_rates([jobs[name]], contention=there, memory=limit, vote_s=vote_s)
        found.append(_group_of({name: jobs[name]}, rates, there, vote_s, reason))
    return found


def _first_to_go(names: Sequence[str], rates: Rates) -> str:
    """Returns the job to take out of a group whose jobs can't run together.

    That's usually the job with the lowest predicted speed. But some groups are refused before we
    predict any speeds, because their step lengths differ too much or the jobs don't fit into
    memory. In that case, it's the job whose step length is furthest from the others'.
    """
    middle = math.fsum(map(math.log, rates.alone_s)) / len(names)
    order = rates.speeds or [-abs(math.log(own) - middle) for own in rates.alone_s]
    return names[order.index(min(order))]


def _without_name(cuts: Cuts) -> tuple[Any, ...]:
    """Returns everything in a job's profiles that a plan depends on, without the name.

    Estimated cuts are left out as well, since they follow from the profile of the whole step.
    """
    profiles = [cuts[1]] if tuple(cuts) == PIECES else cuts.values()
    return tuple(
        (p.ranks, p.graph, p.seconds, p.rank_seconds, p.host_s, p.memory) for p in profiles
    )


def _group_of(
    jobs: Mapping[str, Cuts], rates: Rates, contention: Contention | None, vote_s: float, why: str
) -> PlannedGroup:
    shares = getattr(rates.policy, "shares", (1.0,) * len(jobs))
    cut = [cuts[n] for cuts, n in zip(jobs.values(), rates.pieces, strict=True)]
    planned = tuple(
        PlannedJob(
            name=name,
            pieces=pieces,
            share=share,
            alone_s=alone_s,
            step_s=alone_s / speed,
            compute_s=profile.compute_s,
            exchange_s=profile.exchange_s,
            estimated=pieces > 1 and tuple(cuts) == PIECES,  # as made by `cuts_of`
            rank_compute_s=profile.rank_compute_s,
        )
        for (name, cuts), pieces, share, alone_s, speed, profile in zip(
            jobs.items(), rates.pieces, shares, rates.alone_s, rates.speeds, cut, strict=True
        )
    )
    steps = _steps_of(planned)
    prediction = predict(
        cut, policy=rates.policy, contention=contention, steps=steps, vote_s=vote_s
    )
    rounds = prediction.rounds
    memory = [profile.memory for profile in cut]
    needed = None
    if None not in memory:
        needed = needed_bytes([each for each in memory if each is not None])
    return PlannedGroup(
        jobs=planned,
        ranks=cut[0].ranks,
        turns="weighted" if rates.policy.name == "weighted" else "round-robin",
        period_s=rounds.period_s,
        bound_s=rounds.bound_s,
        lost_s=dict(rounds.lost_s),
        memory_bytes=needed,
        why=why,
        slow_rank=prediction.slow_rank,
    )


def _there(
    contention: Contention | MachineContention | None, profiles: Sequence[Profile]
) -> Contention | None:
    """Returns the contention at the mean of the link rates that the profiles name.

    Returns None if no profile names a rate. A `Contention` applies to any rate, so it's returned as
    is.
    """
    if not isinstance(contention, MachineContention):
        return contention
    rates = [profile.mbps for profile in profiles if profile.mbps]
    return contention.at(sum(rates) / len(rates)) if rates else None


def _notes(
    jobs: Mapping[str, Cuts], limit: int | None, contention: Contention | MachineContention | None
) -> Iterable[str]:
    profiles = [cuts[min(cuts)] for cuts in jobs.values()]
    if contention is None:
        yield (
            "Assumes that computation and exchange do not slow each other down; on CPUs they do: "
            "give the contention."
        )
    elif isinstance(contention, MachineContention) and any(
        not profile.mbps for profile in profiles
    ):
        yield (
            "A group in which no profile names the rate of the link is planned without contention: "
            "give it, as `mbps` of the profile or by `--mbps`."
        )
    unknown = [profile.name for profile in profiles if profile.memory is None]
    if limit is not None and unknown:
        yield (
            f"The memory of {len(unknown)} jobs is not known, and counted as nothing: "
            f"`{unknown[0]}` is one."
        )
