"""The twin of a run: the real interleaver on a virtual clock, fed with profiles, broken down like a
real run.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxcross.interleave.compute_queue import DEPTH
from jaxcross.interleave.contention import Contention
from jaxcross.interleave.instrument import Span
from jaxcross.interleave.policy import Policy, RoundRobin, Sequential, Weighted, checked_depth
from jaxcross.interleave.script import Script, Step, Think
from jaxcross.interleave.simulator import Simulation
from jaxcross.plan.difference import Difference, difference
from jaxcross.plan.profile import Profile
from jaxcross.report.report import Report
from jaxcross.report.summary import JobSummary, RunData, TimeBreakdown
from jaxcross.report.time_breakdown import break_down
from jaxcross.report.units import plural, seconds

VOTE_S = 0.0005
"""Seconds of a vote on a local network: latency, not bandwidth. It matters below some 20 ms a
step.
"""
MAX_STEPS = 100_000
"""Steps of all jobs together that a twin makes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted run.

    Attributes:
        rounds: The breakdown of its time, as in a report.
        steps: Steps of each job.
        spans: Its spans, for a picture.
        wall_s: Seconds from its begin to its end, the filling of the pipeline included.
        profiles, policy, contention, vote_s: What it was made from; see `predict`.
    """

    rounds: TimeBreakdown
    steps: tuple[int, ...]
    spans: tuple[Span, ...]
    wall_s: float
    profiles: tuple[Profile, ...]
    policy: Policy
    contention: Contention
    vote_s: float

    def again(self, *, profiles: Sequence[Profile], contention: Contention) -> Prediction:
        """Predicts the same steps from other costs of the same jobs."""
        return predict(
            profiles,
            policy=self.policy,
            contention=contention,
            steps=self.steps,
            vote_s=self.vote_s,
        )

    def difference(self, run: RunData) -> Difference:
        """Explains a run by this prediction, as `report.against` does.

        Raises:
            ValueError: Jobs, policy or segments differ, or one of both has no steady state.
        """
        return difference(self, run)

    def __repr__(self) -> str:
        jobs = plural(len(self.steps), "job")
        steps = plural(sum(self.steps), "step")
        return f"<Prediction of {jobs}, {self.policy.name}: {steps} in {seconds(self.wall_s)}>"

    @property
    def s_per_step(self) -> float:
        """Seconds a job-step over the whole run."""
        return self.wall_s / sum(self.steps)

    @property
    def report(self) -> Report:
        """The same as the report of a run on one rank, for its table, trace and picture."""
        return Report(
            spans=self.spans,
            jobs=tuple(job.facts for job in self.rounds.jobs),
            wall_ns={0: (0, round(self.wall_s * 1e9))},
            policy=self.policy.name,
            link="predicted",
        )

    def to_gantt(self, path: str | Path, *, headline: str | None = None) -> Path:
        """Draws the predicted lanes over time as PNG.

        Raises:
            MissingExtraError: matplotlib is not installed, which the extra `plot` brings.
        """
        from jaxcross.report.gantt import draw

        return draw(self.report, Path(path), headline=headline)


def predict(
    profiles: Sequence[Profile],
    *,
    policy: Policy | None = None,
    contention: Contention | None = None,
    steps: int | Sequence[int] = 20,
    vote_s: float = VOTE_S,
) -> Prediction:
    """Predicts a run of these jobs together. Uses no device and no ranks; all ranks are taken to be
    equally fast.

    Args:
        profiles: The jobs, in the order in which a runner would have them; names must differ.
        policy: As in `Runner`; `RoundRobin()` if None.
        contention: How much lanes slow each other down; not at all if None.
        steps: Steps of each job, or of the slowest: the others make as many as fit into the same
            time alone.
        vote_s: Seconds of a vote.

    Raises:
        ValueError: There are no jobs, two have one name, `steps` is below 2, or the policy has not
            a share for each.
    """
    made = _checked(profiles, policy, steps)
    policy = policy if policy is not None else RoundRobin()
    contention = contention if contention is not None else Contention()
    scripts = [_script(profile, count) for profile, count in zip(profiles, made, strict=True)]
    simulation = _simulation(profiles, scripts, policy, contention, vote_s)
    result = simulation.run(events=1_000 * MAX_STEPS)[0]
    spans = tuple(replace(span, job=profiles[int(span.job)].name) for span in result.spans)
    summaries = [
        JobSummary(name=profile.name, steps=count)
        for profile, count in zip(profiles, made, strict=True)
    ]
    wall_ns = max((span.end_ns for span in spans), default=0)
    rounds = break_down(spans, summaries, {0: wall_ns}, in_turn=isinstance(policy, Sequential))
    return Prediction(
        rounds=rounds,
        steps=made,
        spans=spans,
        wall_s=wall_ns / 1e9,
        profiles=tuple(profiles),
        policy=policy,
        contention=contention,
        vote_s=vote_s,
    )


def step_rates(
    profiles: Sequence[Profile],
    *,
    policy: Policy,
    until_s: float,
    contention: Contention | None = None,
    vote_s: float = VOTE_S,
) -> tuple[float, ...]:
    """Predicts the steps a second of each job while all of them go on; 0 for a job that makes none
    in steady state.

    Cheaper than `predict`, and the right measure for unlike jobs: none of them ends before the
    others.

    Args:
        profiles: As in `predict`.
        policy: Likewise.
        until_s: Seconds of the run that are looked at.
        contention: As in `predict`.
        vote_s: Likewise.

    Raises:
        ValueError: There are no jobs, two have one name, or the policy has not a share for each.
    """
    _check_jobs(profiles, policy)
    scripts = [_script(profile, None) for profile in profiles]
    simulation = _simulation(profiles, scripts, policy, contention, vote_s)
    spans = simulation.run(events=1_000 * MAX_STEPS, until_s=until_s)[0].spans
    ends: list[dict[int, list[float]]] = [{} for _ in profiles]
    for span in spans:
        ends[int(span.job)].setdefault(span.step, []).append(span.end_ns / 1e9)
    whole = [
        sorted(max(found) for found in of_job.values() if len(found) == len(profile.graph.kinds))
        for of_job, profile in zip(ends, profiles, strict=True)
    ]
    if not all(whole):
        return tuple(0.0 for _ in profiles)
    # Whole steps of the slowest job, past each job's first step and before each job's last one.
    low = max(found[0] for found in whole)
    high = min(found[-1] for found in whole)
    slowest = [end for end in min(whole, key=len) if low <= end <= high]
    if len(slowest) < 2:
        return tuple((len(found) - 1) / until_s for found in whole)
    low = slowest[0]
    high = slowest[-1]
    return tuple((_progress(found, high) - _progress(found, low)) / (high - low) for found in whole)


def _progress(ends: Sequence[float], at_s: float) -> float:
    """Returns the steps since the end of the first one, with the part of the step that is under
    way.
    """
    index = min(bisect_right(ends, at_s), len(ends) - 1) - 1
    begin = ends[index]
    end = ends[index + 1]
    return index + (at_s - begin) / (end - begin)


def _simulation(
    profiles: Sequence[Profile],
    scripts: Sequence[Script],
    policy: Policy,
    contention: Contention | None,
    vote_s: float,
) -> Simulation:
    depth = checked_depth(getattr(policy, "depth", None))
    # Ranks that are equally fast do the same at the same time: one of them shows what all do.
    return Simulation(
        [scripts],
        policy=policy,
        depth=DEPTH if depth is None else depth,
        exchange_s=lambda job, step, segment: profiles[job].seconds[segment],
        vote_s=vote_s,
        contention=contention,
        check=False,
    )


def _script(profile: Profile, steps: int | None) -> Script:
    """Yields so many steps; without end if None."""
    step = Step(profile.graph, profile.seconds)
    for _ in itertools.repeat(None) if steps is None else range(steps):
        if profile.host_s:
            yield Think(profile.host_s)
        yield step


def _check_jobs(profiles: Sequence[Profile], policy: Policy | None) -> None:
    if not profiles:
        raise ValueError("a prediction needs the profile of at least one job")
    twice = [
        name for name, count in Counter(profile.name for profile in profiles).items() if count > 1
    ]
    if twice:
        raise ValueError(f"two jobs have the name `{twice[0]}`")
    if isinstance(policy, Weighted) and len(policy.shares) != len(profiles):
        raise ValueError(
            f"`Weighted` has {len(policy.shares)} shares, there are {len(profiles)} jobs"
        )


def _checked(
    profiles: Sequence[Profile], policy: Policy | None, steps: int | Sequence[int]
) -> tuple[int, ...]:
    """Returns the number of steps of each job."""
    _check_jobs(profiles, policy)
    made = tuple(steps) if isinstance(steps, Sequence) else tuple(_equally_long(profiles, steps))
    if len(made) != len(profiles) or min(made) < 2:
        raise ValueError(f"each of the {len(profiles)} jobs makes at least 2 steps, got {steps}")
    if sum(made) > MAX_STEPS:
        raise ValueError(
            f"the jobs are too unlike: {sum(made)} steps of all together, at most {MAX_STEPS}"
        )
    return made


def _equally_long(profiles: Sequence[Profile], steps: int) -> Iterator[int]:
    alone_s = [profile.compute_s + profile.exchange_s + profile.host_s for profile in profiles]
    for own_s in alone_s:
        yield math.ceil(steps * (max(alone_s) / own_s)) if own_s else steps
