import numpy as np
import pytest

from jaxcross.interleave.policy import RoundRobin, Sequential, Turns, Weighted
from jaxcross.interleave.simulator import Call, Simulation
from jaxcross.interleave.step_graph import StepGraph


@pytest.mark.parametrize(
    ("last", "candidates", "expected"),
    [(0, {0, 1, 2}, 1), (2, {0, 2}, 0), (1, {1}, 1), (2, {1, 0}, 0)],
)
def test_round_robin_takes_the_next_job_cyclically(last, candidates, expected):
    turns = Turns(RoundRobin(), 3)
    turns.begin(last)
    assert turns.next(candidates) == expected


def test_round_robin_runs_all_unfinished_jobs():
    assert RoundRobin().running([1, 2]) == (1, 2)


def test_sequential_runs_the_first_unfinished_job_only():
    assert Sequential().running([1, 2]) == (1,)
    assert Turns(Sequential(), 3).next({2, 1}) == 1


def test_policies_are_values():
    assert RoundRobin() == RoundRobin()
    assert Sequential().name == "sequential"
    with pytest.raises(AttributeError):
        RoundRobin().name = "other"  # type: ignore[misc]


def shares_of(policy, turns, amounts):
    """Returns each job's share of a lane on which every job always waits."""
    lane, had = Turns(policy, len(amounts)), [0.0] * len(amounts)
    for _ in range(turns):
        job = lane.next(range(len(amounts)))
        lane.begin(job)
        lane.charge(job, amounts[job])
        had[job] += amounts[job]
    return [each / sum(had) for each in had]


def test_weighted_shares_ignore_the_size_of_turns():
    assert shares_of(Weighted((1, 3)), 4000, (10.0, 1.0)) == pytest.approx([0.25, 0.75], abs=0.01)
    assert shares_of(Weighted((1, 1, 2)), 4000, (1.0, 5.0, 2.0)) == pytest.approx(
        [0.25, 0.25, 0.5], abs=0.01
    )
    assert shares_of(RoundRobin(), 4000, (10.0, 1.0)) == pytest.approx([10 / 11, 1 / 11], abs=0.01)


def test_who_was_away_is_owed_nothing_for_it():
    lane = Turns(Weighted((1, 1)), 2)
    for _ in range(100):
        lane.begin(0)
        lane.charge(0, 1.0)
    order = []
    for _ in range(6):
        order.append(lane.next((0, 1)))
        lane.begin(order[-1])
        lane.charge(order[-1], 1.0)
    assert order == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("shares", [(), (1, 0), (1, -2), (float("nan"),), (float("inf"), 1)])
def test_a_share_is_a_positive_number(shares):
    with pytest.raises(
        ValueError,
        match=r"^`shares` of `Weighted` must be positive numbers, one for each job, got \(",
    ):
        Weighted(shares)


POLICIES = [RoundRobin, lambda **options: Weighted((4, 1), **options), Sequential]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_depth_of_a_policy_is_a_number_of_segments(policy):
    assert (policy().depth, policy(depth=3).depth) == (None, 3)
    assert repr(policy(depth=np.int64(3))) == repr(policy(depth=3)) != repr(policy())
    for wrong in (1.5, True, "2"):
        with pytest.raises(TypeError, match=f"^`depth` of a policy .* or None, got {wrong!r}\\.$"):
            policy(depth=wrong)
    with pytest.raises(ValueError, match=r"^`depth` of a policy must be at least 1, got 0\.$"):
        policy(depth=0)


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_the_start_of_a_policy_is_a_word(policy):
    assert (policy().start, policy(start="as_ready").start) == ("together", "as_ready")
    assert repr(policy(start="as_ready")) != repr(policy())
    with pytest.raises(
        ValueError, match=r"^`start` of a policy must be one of 'together', 'as_ready', got 'later'"
    ):
        policy(start="later")


def test_shares_that_are_equal_print_alike():
    assert {repr(Weighted(shares)) for shares in ((4, 1), [4, 1.0], iter((4.0, 1)))} == {
        repr(Weighted((4.0, 1.0)))
    }


def backward(pieces, nbytes):
    """Returns a backward pass in pieces, each followed by its exchange, and then an update."""
    kinds, needs = [], []
    for piece in range(pieces):
        kinds += ["compute", "collective"]
        needs += [(2 * piece - 2,) if piece else (), (2 * piece,)]
    return StepGraph(
        kinds=(*kinds, "compute"),
        needs=(*needs, tuple(range(1, 2 * pieces, 2))),
        signature=pieces,
        after_commit=frozenset({2 * pieces}),
        nbytes=(*[nbytes // pieces] * (2 * pieces), 0),
    )


def rates(policy, jobs, horizon_s=400.0):
    """Returns each job's steps per second on two ranks, on a virtual clock.

    A job is given as (compute seconds, exchange seconds, pieces).
    """
    done = [[] for _ in jobs]

    def loop(number, rank):
        compute_s, exchange_s, pieces = jobs[number]
        graph = backward(pieces, round(exchange_s * 1e6))
        seconds = tuple(
            0.95 * compute_s / pieces if kind == "compute" else 0.0 for kind in graph.kinds[:-1]
        )
        while simulation._now < horizon_s:
            yield Call(graph, (*seconds, 0.05 * compute_s))
            if rank == 0:
                done[number].append(simulation._now)

    simulation = Simulation(
        [[loop(number, rank) for number in range(len(jobs))] for rank in range(2)],
        policy=policy,
        check=False,
        exchange_s=lambda job, step, segment: jobs[job][1] / jobs[job][2] + 0.002,
        vote_s=0.001,
    )
    simulation.run()
    return [
        sum(0.1 * horizon_s < t <= horizon_s for t in each) / (0.9 * horizon_s) for each in done
    ]


@pytest.mark.integration
@pytest.mark.parametrize(("compute_s", "exchange_s"), [(5.0, 5.0), (5.0, 2.5), (2.5, 5.0)])
def test_a_job_ten_times_smaller_keeps_its_share(compute_s, exchange_s):
    def relative(policy, pieces):
        jobs = [(compute_s, exchange_s, pieces), (compute_s / 10, exchange_s / 10, 1)]
        alone = [rates(RoundRobin(), [(c, m, 1)])[0] for c, m, _ in jobs]
        return [rate / solo for rate, solo in zip(rates(policy, jobs), alone, strict=True)]

    lock_step = relative(RoundRobin(), 1)
    assert sum(lock_step) == pytest.approx(1.1, abs=0.02)
    assert lock_step[1] == pytest.approx(0.1, abs=0.01)
    fair = relative(Weighted((1, 1)), 16)
    assert min(fair) >= 0.5
    assert sum(fair) >= 1.4


def seconds_a_round(policy, jobs, steps=20):
    """Returns the mean seconds per round, in which every (compute, exchange, pieces) job makes a
    step.
    """

    def loop(compute_s, exchange_s, pieces):
        graph = backward(pieces, round(exchange_s * 1e6))
        seconds = tuple(
            0.95 * compute_s / pieces if kind == "compute" else 0.0 for kind in graph.kinds[:-1]
        )
        for _ in range(steps):
            yield Call(graph, (*seconds, 0.05 * compute_s))

    simulation = Simulation(
        [[loop(*job) for job in jobs]],
        policy=policy,
        check=False,
        exchange_s=lambda job, step, segment: jobs[job][1] / jobs[job][2],
    )
    (result,) = simulation.run()
    assert result.steps == [steps] * len(jobs)
    return result.end_s / steps


def test_larger_share_lets_a_large_cut_job_overlap():
    """A large job only overlaps with itself if it's cut and also has a large share.

    Uncut, the large job can't be faster than its own c + m. If it's cut but takes turns with the
    small job, segment by segment, it has to wait for a whole step of the small job each time. With
    a share of 4 to 1, it waits less often.
    """
    large, small = (1.4, 1.25), (0.5, 0.7)
    uncut = seconds_a_round(RoundRobin(), [(*large, 1), (*small, 1)])
    in_turn = seconds_a_round(RoundRobin(), [(*large, 4), (*small, 1)])
    by_shares = seconds_a_round(Weighted((4, 1)), [(*large, 4), (*small, 1)])
    assert uncut == pytest.approx(1.4 + 1.25, rel=0.03)
    assert in_turn > 0.95 * uncut
    assert by_shares < 1.1 * (1.25 + 0.7), "all exchanges, one after the other"
