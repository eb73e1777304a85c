"""The twin of a run: predicts the run by driving the real interleaver with a virtual clock.

How long will a round of several jobs take? Formulas such as the bound tell us what's possible at
best, but not what will actually happen: votes fix the order of exchanges before it's known which
exchange will be ready first, so a lane may sit idle even though there's work to do.

Instead of modelling this, we run it. The interleaver is a pure state machine without threads or
clocks, which lets the twin use the same class and the same policy as a real run, and make every
decision that the real run would make. Only the durations are inputs:

- A simulated job repeats its step over and over. The duration of each of its segments comes from
  the job's profile.
- `Simulation` advances a virtual clock from one event to the next.
- Contention slows computation and exchange down while they overlap.
- How long a vote takes is an assumption (`VOTE_S`).

The simulation records the same kind of spans as a real run (when each segment began and ended), and
they're analysed by the same code, so you can compare a prediction and a report number by number.
The twin needs neither a device nor ranks.

Ranks that are about equally fast run in lockstep, so we only simulate one of them. If a rank is
clearly slower, e.g. because it has an older GPU, we simulate the ranks separately, each with its
own interleaver and compute lane. As in a real run, an exchange or a vote then starts when the last
rank arrives, and the other ranks wait for it. Profiles only contain mean times, so the twin can't
predict how long ranks wait for each other because of jitter.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

from jaxcross._arguments import check_type
from jaxcross.errors import quoted, shortened
from jaxcross.interleave import (
    DEFAULT_DEPTH,
    Call,
    Contention,
    Policy,
    RoundRobin,
    Script,
    Sequential,
    Simulation,
    Span,
    Think,
    Weighted,
    checked_depth,
)
from jaxcross.plan.difference import Difference, difference
from jaxcross.report import (
    JobSummary,
    Report,
    SlowRank,
    TimeBreakdown,
    break_down,
    plural,
    seconds,
    slowest,
)
from jaxcross.step import Profile

VOTE_S = 0.0005
"""Seconds that a vote (in which the ranks agree on what to run next) takes on a local network. A
vote sends few bytes, so only latency matters. The cost of votes becomes noticeable when steps take
less than about 20 ms.
"""
ALIKE = 1.05
"""Ranks count as equally fast if a step that takes the slowest rank's time in each segment computes
at most this many times as long as on the fastest rank. Repeated measurements of the same rank
differ by about as much.
"""
MOST_RANKS = 8
"""Maximum number of ranks to simulate if they aren't equally fast."""
MAX_STEPS = 100_000
"""Maximum number of steps of all jobs together in a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of a run.

    Attributes:
        rounds: The breakdown of the run's time, as in a report.
        steps: Number of steps of each job.
        spans: The predicted spans, e.g. to draw a picture.
        wall_s: Seconds from the start of the run to its end, including the beginning, when only
            some of the lanes have work.
        profiles, policy, contention, vote_s: The inputs of the prediction; see `predict`.
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
        """Predicts the same steps of the same jobs again, with different costs."""
        return predict(
            profiles,
            policy=self.policy,
            contention=contention,
            steps=self.steps,
            vote_s=self.vote_s,
        )

    def difference(self, run: Report) -> Difference:
        """Compares a run with this prediction, like `report.against`.

        Raises:
            ValueError: The jobs, the policy or the segments differ, or either the run or the
                prediction has no steady state.
        """
        return difference(self, run)

    def __repr__(self) -> str:
        jobs = plural(len(self.steps), "job")
        steps = plural(sum(self.steps), "step")
        return (
            f"<Prediction of {jobs}, {self.policy.name}: {steps} in {seconds(self.wall_s)}; "
            "print() shows the table>"
        )

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    @property
    def s_per_step(self) -> float:
        """Seconds per job-step over the whole run."""
        return self.wall_s / sum(self.steps)

    @property
    def slow_rank(self) -> SlowRank | None:
        """The rank that computes the longest, if it's clearly slower than the median rank.

        To find out what this rank costs, we predict the same steps again, without any rank that's
        slower than the median rank. The cost is the share of `wall_s` that this saves. None if the
        rank isn't clearly slower, or costs less than a twentieth.
        """
        times_s = [
            [steps * own for own in profile.rank_compute_s]
            for profile, steps in zip(self.profiles, self.steps, strict=True)
            if profile.rank_seconds
        ]
        found = slowest([math.fsum(each) for each in zip(*times_s, strict=True)])
        if found is None:
            return None
        ranks, factor = found
        evened = [profile.evened() for profile in self.profiles]
        saved_s = self.wall_s - self.again(profiles=evened, contention=self.contention).wall_s
        return SlowRank.if_costly(ranks, factor, saved_s / self.wall_s)

    @property
    def report(self) -> Report:
        """The prediction as the report of a run, e.g. to show its table or picture.

        It has the ranks that were simulated: just one if all ranks are about equally fast.
        """
        wall_ns = (0, round(self.wall_s * 1e9))
        return Report(
            spans=self.spans,
            jobs=tuple(job.facts for job in self.rounds.jobs),
            wall_ns=dict.fromkeys(sorted({span.rank for span in self.spans}), wall_ns),
            policy=self.policy.name,
            link="predicted",
        )

    def to_gantt(self, path: str | Path, *, headline: str | None = None) -> Path:
        """Draws the predicted lanes over time as a PNG.

        Raises:
            MissingExtraError: matplotlib is not installed. The extra `plot` installs it.
        """
        from jaxcross.report import draw_gantt

        return draw_gantt(self.report, Path(path), headline=headline)


def predict(
    profiles: Sequence[Profile],
    *,
    policy: Policy | None = None,
    contention: Contention | None = None,
    steps: int | Sequence[int] = 20,
    vote_s: float = VOTE_S,
) -> Prediction:
    """Predicts a run in which these jobs run together. Needs neither a device nor ranks.

    If the profiles say that some ranks compute more slowly than others, each rank is simulated with
    its own times. If there are more than eight ranks, we only simulate eight of them, from the
    slowest to the fastest.

    Args:
        profiles: The jobs, in the order in which a runner would add them. Names must differ.
        policy: The policy, as for a `Runner`. Defaults to `RoundRobin()`.
        contention: How much the lanes slow each other down. If None, they don't.
        steps: Number of steps of each job. A single number applies to the job with the longest
            step; all other jobs make as many steps as they could make alone in the same time.
        vote_s: Seconds that a vote takes.

    Raises:
        TypeError: `vote_s` isn't a number.
        ValueError: There are no jobs, two jobs have the same name, a job would make fewer than 2
            steps, all jobs together would make more than 100,000, `vote_s` is negative or not
            finite, the policy doesn't have a share for each job, or the profiles have the times of
            different numbers of ranks.
    """
    made = _checked(profiles, policy, steps, vote_s)
    policy = policy if policy is not None else RoundRobin()
    contention = contention if contention is not None else Contention()
    ranks = _simulated_ranks(profiles)
    simulation = _simulation(profiles, ranks, made, policy, contention, vote_s)
    # The simulation identifies jobs and ranks by their positions, whereas the spans of a real run
    # have the jobs' names and the ranks' numbers, so fill those in.
    spans = tuple(
        replace(span, rank=rank, job=profiles[int(span.job)].name)
        for rank, result in zip(ranks, simulation.run(events=1_000 * MAX_STEPS), strict=True)
        for span in result.spans
    )
    summaries = [
        JobSummary(name=profile.name, steps=count)
        for profile, count in zip(profiles, made, strict=True)
    ]
    wall_ns = max((span.end_ns for span in spans), default=0)
    rounds = break_down(
        spans, summaries, dict.fromkeys(ranks, wall_ns), in_turn=isinstance(policy, Sequential)
    )
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
    """Predicts each job's steps per second while all jobs are running.

    This is cheaper than `predict`, and better suited to jobs whose step lengths differ a lot: here
    all jobs keep running until the end, whereas in `predict` a job may finish early, letting the
    others run faster than they would alongside it.

    If a job doesn't complete a step within `until_s` seconds, all rates are 0.

    Args:
        profiles: As in `predict`.
        policy: As in `predict`.
        until_s: How many seconds of the run to simulate.
        contention: As in `predict`.
        vote_s: As in `predict`.

    Raises:
        TypeError: `vote_s` isn't a number.
        ValueError: There are no jobs, two jobs have the same name, `vote_s` is negative or not
            finite, the policy doesn't have a share for each job, or the profiles have the times of
            different numbers of ranks.
    """
    _check_jobs(profiles, policy, vote_s)
    forever = [None] * len(profiles)
    ranks = _simulated_ranks(profiles)
    simulation = _simulation(profiles, ranks, forever, policy, contention, vote_s)
    # All ranks make the same steps at nearly the same time, because every exchange involves all of
    # them. So it doesn't matter which rank's spans we look at.
    spans = simulation.run(events=1_000 * MAX_STEPS, until_s=until_s)[0].spans
    # The simulation stops after `until_s` seconds, which may be in the middle of some steps. Only
    # count the steps whose segments have all ended.
    ends: list[dict[int, list[float]]] = [{} for _ in profiles]
    for span in spans:
        ends[int(span.job)].setdefault(span.step, []).append(span.end_ns / 1e9)
    whole = [
        sorted(max(found) for found in of_job.values() if len(found) == len(profile.graph.kinds))
        for of_job, profile in zip(ends, profiles, strict=True)
    ]
    if not all(whole):
        return tuple(0.0 for _ in profiles)
    # Measure within a window that begins once every job has completed its first step, and ends
    # before any job completes its last. Start and stop at step ends of the slowest job: its steps
    # are the longest, so counting a fraction of a step would distort its rate the most.
    low = max(found[0] for found in whole)
    high = min(found[-1] for found in whole)
    slowest = [end for end in min(whole, key=len) if low <= end <= high]
    # The slowest job didn't make a single whole step in the window. The best we can do is count all
    # steps of the simulation and divide by its length.
    if len(slowest) < 2:
        return tuple((len(found) - 1) / until_s for found in whole)
    low = slowest[0]
    high = slowest[-1]
    return tuple((_progress(found, high) - _progress(found, low)) / (high - low) for found in whole)


def _progress(ends: Sequence[float], at_s: float) -> float:
    """Returns how many steps were made since the end of the first, including a fraction."""
    index = min(bisect_right(ends, at_s), len(ends) - 1) - 1
    begin = ends[index]
    end = ends[index + 1]
    return index + (at_s - begin) / (end - begin)


def _simulated_ranks(profiles: Sequence[Profile]) -> tuple[int, ...]:
    """Returns the ranks to simulate: only rank 0 if all of them are about equally fast."""
    unlike = [profile.rank_compute_s for profile in profiles if _is_unlike(profile)]
    if not unlike:
        return (0,)
    total_s = [math.fsum(each) for each in zip(*unlike, strict=True)]
    order = sorted(range(len(total_s)), key=lambda rank: -total_s[rank])
    if len(order) <= MOST_RANKS:
        return tuple(sorted(order))
    # The bound is computed from the mean over the simulated ranks, so that mean should be close to
    # the mean over all ranks. To get there, sort the ranks by speed and pick evenly spaced ones.
    last = len(order) - 1
    return tuple(sorted(order[round(n * last / (MOST_RANKS - 1))] for n in range(MOST_RANKS)))


def _is_unlike(profile: Profile) -> bool:
    """Whether some rank computes this job's step clearly faster than `seconds` say.

    Those are each segment's slowest rank. Even if all ranks take equally long for the whole step,
    they may be slow in different segments.
    """
    times_s = profile.rank_compute_s
    return bool(times_s) and profile.compute_s > ALIKE * min(times_s)


def _simulation(
    profiles: Sequence[Profile],
    ranks: Sequence[int],
    steps: Sequence[int | None],
    policy: Policy,
    contention: Contention | None,
    vote_s: float,
) -> Simulation:
    depth = checked_depth(getattr(policy, "depth", None))
    # A single simulated rank stands for all of them, so it takes the times of the slowest.
    scripts = [
        [
            _script(profile, profile.on_rank(rank) if len(ranks) > 1 else profile.seconds, count)
            for profile, count in zip(profiles, steps, strict=True)
        ]
        for rank in ranks
    ]
    return Simulation(
        scripts,
        policy=policy,
        depth=DEFAULT_DEPTH if depth is None else depth,
        exchange_s=lambda job, step, segment: profiles[job].seconds[segment],
        vote_s=vote_s,
        contention=contention,
        # Checking the interleaver's invariants after every event is for tests.
        check=False,
    )


def _script(profile: Profile, seconds: tuple[float, ...], steps: int | None) -> Script:
    """Yields what a job does on one rank in `steps` steps, or forever if `steps` is None."""
    step = Call(profile.graph, seconds)
    for _ in itertools.repeat(None) if steps is None else range(steps):
        if profile.host_s:
            yield Think(profile.host_s)
        yield step


def check_vote_s(vote_s: float) -> None:
    """Checks the number of seconds per vote.

    Raises:
        TypeError: It isn't a number.
        ValueError: It's negative or not finite.
    """
    check_type(vote_s, Real, "`vote_s`")
    if not 0 <= vote_s < math.inf:
        raise ValueError(f"`vote_s` must be finite and not negative, got {vote_s}")


def _check_jobs(profiles: Sequence[Profile], policy: Policy | None, vote_s: float) -> None:
    check_vote_s(vote_s)
    if not profiles:
        raise ValueError("`profiles` is empty: pass the profile of at least one job")
    twice = [
        name for name, count in Counter(profile.name for profile in profiles).items() if count > 1
    ]
    if twice:
        raise ValueError(f"two jobs have the name `{twice[0]}`. Give each job a different name.")
    counts = sorted({len(profile.rank_seconds) for profile in profiles} - {0})
    if len(counts) > 1:
        raise ValueError(
            f"the profiles have the times of different numbers of ranks: "
            f"{', '.join(map(str, counts))}. Pass profiles from runs on the same number."
        )
    if isinstance(policy, Weighted) and len(policy.shares) != len(profiles):
        raise ValueError(
            f"`Weighted` has {len(policy.shares)} shares, but there are {len(profiles)} jobs. Give "
            "it one share per job."
        )


def _checked(
    profiles: Sequence[Profile],
    policy: Policy | None,
    steps: int | Sequence[int],
    vote_s: float,
) -> tuple[int, ...]:
    """Checks the arguments of `predict`. Returns the number of steps of each job."""
    _check_jobs(profiles, policy, vote_s)
    made = tuple(steps) if isinstance(steps, Sequence) else tuple(_equally_long(profiles, steps))
    if len(made) != len(profiles) or min(made) < 2:
        raise ValueError(
            f"`steps` must give each of the {len(profiles)} jobs at least 2 steps, got {steps}"
        )
    if sum(made) > MAX_STEPS:
        raise ValueError(
            f"Jobs {shortened(quoted(profile.name for profile in profiles), 300)}: predicting them "
            f"takes {sum(made)} steps, and at most {MAX_STEPS} are supported. Pass fewer `steps`. "
            "If the jobs' step times differ a lot, predict fewer of them together."
        )
    return made


def _equally_long(profiles: Sequence[Profile], steps: int) -> Iterator[int]:
    alone_s = [profile.compute_s + profile.exchange_s + profile.host_s for profile in profiles]
    for own_s in alone_s:
        yield math.ceil(steps * (max(alone_s) / own_s)) if own_s else steps
