"""Decides into how many pieces to cut the jobs of a group, and which shares to give them.

The goal is for all jobs together to make as many steps as possible, without any of them starving.
That's hard because they share the exchange lane, whose order is fixed before anyone knows which
exchange will be ready first, since all ranks must run the same exchanges in the same order. If it's
a job's turn but the job is still computing, the lane waits, even if another job's exchange is
ready.

So it's not enough to give every job the same share of the link, i.e. the same number of bytes per
second. Consider a job that computes for a long time and exchanges little. It would nearly always
have sent the fewest bytes, making it nearly always that job's turn, and all other jobs would be
left waiting for its computation.

Instead, we first choose how fast each job should be, and derive its share from that:

1. A linear program (`_Group.targets`) finds the speeds with the most progress at which neither lane
   is overloaded and every job is fast enough.
2. There are two ways to achieve these speeds. Either the jobs get unequal shares of the link
   (`_Group.weighted`), or they take turns round-robin with their steps cut into different numbers
   of pieces (`_Group.by_turns`), since a job gets one turn per piece.
3. The linear program knows nothing about the order of turns, so the actual speeds are lower. The
   twin, a simulation with the real scheduler, predicts them. If a job ends up slower than the
   floor, we solve the linear program again with a higher demand for that job.
4. If none of this is good enough, we cut the steps more finely and try again. Short simulations
   will do during the search, since they're far cheaper, if inaccurate; a long simulation then
   confirms the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxcross.interleave import Contention, Policy, RoundRobin, Weighted
from jaxcross.jobs import JobMemory, memory_limit, needed_bytes
from jaxcross.plan.twin import VOTE_S, check_vote_s, step_rates
from jaxcross.step import Profile

PIECES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The numbers of pieces that we try for a job with only a profile of its whole step."""
COARSE = 5
LONG = 15
"""How long to simulate, as the number of steps that a job at the floor makes in that time: `COARSE`
during the search, `LONG` to confirm a result.
"""
MOST_STEPS = 20_000
"""Maximum number of steps of all jobs in a confirming simulation. If it would take more, because
some jobs' steps are so much shorter than others', we don't let the jobs share ranks.
"""
_LOSS = 1.2  # at first, demand this many times the floor, because some speed is lost to turns
_MARGIN = 1.02  # the same, once the twin has shown how much speed is lost to turns
_ENOUGH = 0.9  # we end the search for a cut at this share of the linear program's progress
_GOOD = 0.8  # we stop at a cut that reaches this share of the linear program's progress
_LAST = 4  # number of near misses that we try to balance before we refuse the jobs
_AS_FAST = 1.03  # we prefer a coarser cut if it takes at most this many times as long
_TURNS = 3  # number of attempts to adjust the shares for one cut

Cuts = Mapping[int, Profile]
"""A job's profiles, by the number of pieces into which its step is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How to run a group of jobs, and how fast that makes them.

    Attributes:
        pieces: Number of pieces of each job's step. 1 means that the step isn't cut.
        policy: `RoundRobin()`, or `Weighted` with a share for each job.
        speeds: The predicted speed of each job, relative to its speed alone; empty if no speeds
            were predicted.
        alone_s: Seconds per step of each job when it runs alone, with the cut that's fastest alone.
        floor: The lowest acceptable speed of a job.
        refusal: Why the jobs shouldn't run together; empty if they can.
    """

    pieces: tuple[int, ...]
    policy: Policy
    speeds: tuple[float, ...]
    alone_s: tuple[float, ...]
    floor: float
    refusal: str = ""

    @property
    def progress(self) -> float:
        """The sum of the jobs' speeds, each relative to the job's speed alone."""
        return math.fsum(self.speeds)

    @property
    def is_fair(self) -> bool:
        """Whether every job reaches the floor."""
        return min(self.speeds, default=0.0) >= self.floor


def cuts_of(profile: Profile) -> Cuts:
    """Returns a job's profile, plus estimates for finer cuts if its step has a single exchange."""
    exchanges = len(profile.graph.collectives)
    if exchanges == 1:
        return {n: profile.cut_evenly(n) for n in PIECES}
    return {max(exchanges, 1): profile}


def choose_rates(
    jobs: Sequence[Cuts],
    *,
    contention: Contention | None = None,
    floor: float | None = None,
    memory: int | str | None = None,
    vote_s: float = VOTE_S,
) -> Rates:
    """Chooses pieces and shares such that no job is slower than the floor.

    A cut says into how many pieces each job's step is divided. We start with coarse cuts (few
    pieces), since they send fewer messages. Once all jobs reach the floor with some cut and a
    longer simulation has confirmed it, we only try a single finer cut, or none at all if the jobs'
    total progress is already good.

    The result depends only on the arguments.

    Args:
        jobs: The profiles of each job, with one or several cuts. Names must differ.
        contention: How much the lanes slow each other down. If None, they don't.
        floor: Lowest acceptable speed of a job, relative to its speed alone. Defaults to 1 / k for
            k jobs.
        memory: Device memory of a rank, in bytes or as `"80GB"`; no limit if None.
        vote_s: Seconds that a vote takes.

    Raises:
        TypeError: `memory` is neither a number nor a text, or `vote_s` isn't a number.
        ValueError: There are no jobs, a job has no profile, its step takes no time, `memory` isn't
            a number of bytes, or `vote_s` is negative or not finite.
    """
    limit = memory_limit(memory)
    check_vote_s(vote_s)
    if not jobs or not all(jobs):
        raise ValueError(
            "`jobs` must have at least one job, and at least one profile per job, got "
            f"{len(jobs)} jobs with {[len(cuts) for cuts in jobs]!s:.60} profiles"
        )
    if limit is not None:  # a finer cut may need more memory
        jobs = [_fitting(cuts, limit) for cuts in jobs]
    group = _Group.of(jobs, contention, 1 / len(jobs) if floor is None else floor, limit, vote_s)
    if len(jobs) == 1:
        return Rates(
            pieces=(fastest_alone(jobs[0], contention, vote_s)[1],),
            policy=RoundRobin(),
            speeds=(1.0,),
            alone_s=group.alone_s,
            floor=group.floor,
        )
    unlike = group.unlike()
    if unlike:
        return group.not_tried(unlike)
    # The linear program ignores that jobs have to wait their turn, so its progress is an upper
    # limit for any real schedule. If a schedule gets close to that limit, there isn't much to gain
    # from a finer cut.
    good = _GOOD * sum(group.targets([group.floor] * len(jobs)))
    fair: list[Rates] = []
    unfair: list[Rates] = []
    for pieces in filter(group.fits, _cuts(jobs, group.alone_s)):
        was_fair = bool(fair)
        # The options from `search` are based on short simulations, which are cheap but inaccurate.
        # Confirm them with long simulations, starting with the option that makes the most progress,
        # until one turns out to be fair (i.e. no job is slower than the floor).
        options = sorted(group.search(pieces), key=lambda option: -option.progress)
        unfair += [option for option in options if not option.is_fair]
        for option in options:
            if option.is_fair:
                confirmed = group.tried(option.pieces, option.policy, LONG)
                (fair if confirmed.is_fair else unfair).append(confirmed)
                if confirmed.is_fair:
                    break
        # After the first cut that's fair to all jobs, try a single finer cut, in case it makes more
        # progress. If progress is already good, don't bother: a finer cut sends more messages, and
        # takes longer to simulate.
        if was_fair or any(option.progress >= good for option in fair):
            break
    # No cut was fair, but the options that came closest may only need a slight shift of shares.
    for option in [] if fair else sorted(unfair, key=lambda option: -min(option.speeds))[:_LAST]:
        balanced = group.balanced(option)
        if balanced.is_fair:
            return balanced
        unfair.append(balanced)
    return max(fair, key=lambda option: option.progress) if fair else group.refused(unfair)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The jobs to run together, and everything that doesn't depend on the cut.

    `uses` has a row for the device and a row for the link. Each row contains a number for every
    job: the fraction of time for which it would keep the device (or the link) busy if it ran as
    fast as it does alone.
    """

    jobs: tuple[Cuts, ...]
    contention: Contention | None
    floor: float
    memory_bytes: int | None
    vote_s: float
    alone_s: tuple[float, ...]
    uses: tuple[tuple[float, ...], tuple[float, ...]]
    nbytes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        jobs: Sequence[Cuts],
        contention: Contention | None,
        floor: float,
        memory_bytes: int | None,
        vote_s: float,
    ) -> _Group:
        alone_s = tuple(fastest_alone(cuts, contention, vote_s)[0] for cuts in jobs)
        coarsest = [cuts[min(cuts)] for cuts in jobs]
        return cls(
            jobs=tuple(jobs),
            contention=contention,
            floor=floor,
            memory_bytes=memory_bytes,
            vote_s=vote_s,
            alone_s=alone_s,
            uses=(
                tuple(
                    profile.compute_s / own for profile, own in zip(coarsest, alone_s, strict=True)
                ),
                tuple(
                    profile.exchange_s / own for profile, own in zip(coarsest, alone_s, strict=True)
                ),
            ),
            nbytes=tuple(sum(profile.graph.nbytes) for profile in coarsest),
        )

    def fits(self, pieces: Sequence[int]) -> bool:
        """Whether the jobs fit into memory with these cuts. Unknown sizes count as nothing."""
        memory = [cuts[n].memory or JobMemory() for cuts, n in zip(self.jobs, pieces, strict=True)]
        return self.memory_bytes is None or needed_bytes(memory) <= self.memory_bytes

    def unlike(self) -> str:
        """Returns why simulating these jobs would take too long; empty if it wouldn't."""
        long_s = max(self.alone_s)
        short_s = min(self.alone_s)
        until_s = LONG * long_s / self.floor
        if math.fsum(until_s / own for own in self.alone_s) <= MOST_STEPS:
            return ""
        return (
            f"the longest step takes {long_s / short_s:.0f} times as long as the shortest: too "
            "unlike for a prediction"
        )

    def tried(self, pieces: tuple[int, ...], policy: Policy, steps: int) -> Rates:
        """Predicts the jobs' speeds by simulation."""
        rates = step_rates(
            [cuts[n] for cuts, n in zip(self.jobs, pieces, strict=True)],
            policy=policy,
            until_s=steps * max(self.alone_s) / self.floor,
            contention=self.contention,
            vote_s=self.vote_s,
        )
        speeds = tuple(own * rate for own, rate in zip(self.alone_s, rates, strict=True))
        return Rates(
            pieces=pieces, policy=policy, speeds=speeds, alone_s=self.alone_s, floor=self.floor
        )

    def search(self, pieces: tuple[int, ...]) -> Iterator[Rates]:
        """Yields ways to run the jobs with these cuts, until one of them makes enough progress."""
        enough = _ENOUGH * sum(self.targets([self.floor] * len(pieces)))
        wanted = [self.floor * _LOSS] * len(pieces)
        # If no step is cut, start with plain round-robin, the simplest policy.
        if max(pieces) == 1:
            found = self.tried(pieces, RoundRobin(), COARSE)
            yield found
            if found.is_fair and found.progress >= enough:
                return
        for _ in range(_TURNS if all(self.nbytes) else 0):
            targets = self.targets(wanted)
            found = self.tried(pieces, self.weighted(targets), COARSE)
            yield found
            if found.is_fair and found.progress >= enough:
                return
            # Jobs lose time while other jobs have their turn, so they only reach the fraction
            # `kept` of their target speed. Ask the linear program for correspondingly more speed.
            # The 0.1 keeps the demand finite if a job made almost no progress.
            kept = [speed / target for speed, target in zip(found.speeds, targets, strict=True)]
            wanted = [self.floor * _MARGIN / max(part, 0.1) for part in kept]
        if max(pieces) > 1:
            yield self.tried(self.by_turns(pieces, self.targets(wanted)), RoundRobin(), COARSE)

    def balanced(self, option: Rates) -> Rates:
        """Shifts shares from faster-than-average jobs to slower-than-average jobs.

        This is the last resort before we refuse to run the jobs together.
        """
        found = option
        if not all(self.nbytes) or min(option.speeds) <= 0:
            return found
        shares = self.weighted(option.speeds).shares
        for _ in range(_TURNS):
            mean = found.progress / len(shares)
            shares = tuple(
                share * mean / speed for share, speed in zip(shares, found.speeds, strict=True)
            )
            found = self.tried(option.pieces, Weighted(shares), LONG)
            if found.is_fair or min(found.speeds) <= 0:
                break
        return found

    def targets(self, wanted: Sequence[float]) -> list[float]:
        """Returns the speeds that add up to the most, with each job at least as fast as wanted.

        Neither the device nor the link can be busy for more than 100% of the time. How long a job
        keeps them busy is proportional to its speed, which makes this a linear constraint on the
        speeds, and finding the best speeds a linear program. If even the wanted speeds would take
        more than 100%, we scale all of them down by the same factor.
        """
        from scipy.optimize import linprog

        loads = [
            math.fsum(use * low for use, low in zip(lane, wanted, strict=True))
            for lane in self.uses
        ]
        # Stay slightly below 100% of a lane, so that rounding can't make the problem infeasible.
        part = min(1.0, 0.999 / max(loads), 1 / max(wanted))
        bounds = [(low * part, 1.0) for low in wanted]
        found = linprog([-1.0] * len(wanted), A_ub=self.uses, b_ub=[1.0, 1.0], bounds=bounds)
        return found.x.tolist() if found.success else [low for low, _ in bounds]

    def weighted(self, targets: Sequence[float]) -> Weighted:
        """Returns the policy under which the jobs run at these speeds.

        The policy divides the link's bytes among the jobs in proportion to their shares. So the
        right share for a job is the number of bytes per second that it sends at its target speed.
        """
        rows = zip(self.nbytes, targets, self.alone_s, strict=True)
        shares = [nbytes * target / own for nbytes, target, own in rows]
        return Weighted(tuple(float(f"{share / min(shares):.4g}") for share in shares))

    def by_turns(self, pieces: Sequence[int], targets: Sequence[float]) -> tuple[int, ...]:
        """Returns the numbers of pieces that make the jobs run at these speeds under round-robin.

        Under round-robin, all jobs get the same number of turns, and each turn runs one piece of a
        job's step. So cutting a job's step into twice as many pieces halves the number of steps it
        makes.
        """
        # At a job's target speed, its step takes `turns` seconds. All jobs get equally many turns
        # per second, so a step that takes twice as long gets twice as many turns, and should be cut
        # into twice as many pieces. In other words, the number of pieces must be proportional to
        # the seconds.
        turns = [own / target for own, target in zip(self.alone_s, targets, strict=True)]
        wanted = [max(pieces) * each / max(turns) for each in turns]
        return tuple(
            min(cuts, key=lambda n: abs(math.log(n / max(want, 0.5))))
            for cuts, want in zip(self.jobs, wanted, strict=True)
        )

    def refused(self, unfair: Sequence[Rates]) -> Rates:
        """Returns the option that came closest to the floor, marked as refused with a reason."""
        if not unfair:
            return self.not_tried("together they do not fit into the memory")
        nearest = max(unfair, key=lambda option: min(option.speeds))
        slowest = min(range(len(self.jobs)), key=nearest.speeds.__getitem__)
        name = self.jobs[slowest][nearest.pieces[slowest]].name
        reason = (
            f"`{name}` would run at {nearest.speeds[slowest]:.3f} of its speed alone, below the "
            f"floor of {self.floor:.3f}, in the fairest way that was found"
        )
        return replace(nearest, refusal=reason)

    def not_tried(self, refusal: str) -> Rates:
        """Returns a refusal that isn't based on a prediction."""
        return Rates(
            pieces=tuple(map(min, self.jobs)),
            policy=RoundRobin(),
            speeds=(),
            alone_s=self.alone_s,
            floor=self.floor,
            refusal=refusal,
        )


def _fitting(cuts: Cuts, memory_bytes: int) -> Cuts:
    """Returns the cuts with which the job alone fits into memory, or all cuts if none does."""
    fitting = {
        n: p for n, p in cuts.items() if needed_bytes([p.memory or JobMemory()]) <= memory_bytes
    }
    return fitting or cuts


def fastest_alone(cuts: Cuts, contention: Contention | None, vote_s: float) -> tuple[float, int]:
    """Returns the seconds per step of a job that runs alone, and the number of pieces to use.

    To save time, we only simulate a few cuts, from coarse to fine. The seconds are those of the
    fastest cut. If a cut with fewer pieces is nearly as fast, though, we return its number of
    pieces, since it sends fewer messages and needs less memory.
    """
    order = sorted(cuts)
    found = []
    for pieces in dict.fromkeys(
        [order[0], order[len(order) // 4], order[len(order) // 2], order[-1]]
    ):
        profile = cuts[pieces]
        whole_s = profile.compute_s + profile.exchange_s + profile.host_s
        if not whole_s > 0:
            raise ValueError(
                f"a step of `{profile.name}` takes no time in its profile, so it can't be planned. "
                "Pass a measured profile, or one with times above 0."
            )
        until_s = 4.5 * (whole_s + 2 * vote_s) * (contention.compute if contention else 1.0)
        (rate,) = step_rates(
            [profile], policy=RoundRobin(), until_s=until_s, contention=contention, vote_s=vote_s
        )
        found.append((1 / rate, pieces))
    # Prefer a coarser cut, since it sends fewer messages and needs less memory.
    fastest_s = min(found)[0]
    return fastest_s, next(pieces for seconds, pieces in found if seconds <= _AS_FAST * fastest_s)


def _cuts(jobs: Sequence[Cuts], alone_s: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Yields the cuts to try, from coarse to fine.

    We start out without cutting any steps. Next, we cut them such that no piece takes longer than
    the shortest job's step, and after that, no longer than 1/2, 1/4 and 1/8 of it. Long pieces hold
    up all other jobs, so a short job can only be fast if the pieces of the long jobs are short as
    well.
    """
    found = [tuple(min(cuts) for cuts in jobs)]
    for parts in (1, 2, 4, 8):
        longest_s = min(alone_s) / parts
        found.append(
            tuple(
                min((n for n in cuts if own / n <= longest_s), default=max(cuts))
                for cuts, own in zip(jobs, alone_s, strict=True)
            )
        )
    yield from dict.fromkeys(found)
