from hypothesis import given
from hypothesis import strategies as st

from jaxcross.interleave.vote import Ballot, JobBallot, JobRequest, point_hash, tally

BALLOTS = st.builds(
    JobBallot,
    point=st.none() | st.integers(0, 2**62 - 1),
    good=st.booleans(),
    stream=st.integers(-1, 3),
    prepared=st.integers(0, 5),
    limit=st.none() | st.integers(0, 5),
    request=st.sampled_from(JobRequest),
    finite=st.booleans(),
    received_commit=st.booleans(),
)


def cast(stop, jobs):
    ballot = Ballot(len(jobs))
    for job, said in enumerate(jobs):
        ballot.set_job(job, said)
    if stop:
        ballot.stop()
    return ballot.cast()


@given(
    st.integers(1, 4).flatmap(
        lambda k: st.lists(st.tuples(st.booleans(), st.tuples(*[BALLOTS] * k)), min_size=1)
    )
)
def test_the_minimum_answers_every_question(ranks):
    verdict = tally([cast(stop, jobs) for stop, jobs in ranks])
    assert verdict.stop == any(stop for stop, _ in ranks)
    for number in range(len(ranks[0][1])):
        said, mine = verdict.job(number), [jobs[number] for _, jobs in ranks]
        assert said.waiting == all(b.point is not None for b in mine)
        if said.waiting:
            assert said.same_point == (len({b.point for b in mine}) == 1)
        assert said.good == all(b.good for b in mine)
        streams = {b.stream for b in mine}
        assert said.stream == (streams.pop() if len(streams) == 1 else None)
        assert said.prepared == min(b.prepared for b in mine)
        limits = [b.limit for b in mine if b.limit is not None]
        assert said.limit == (min(limits) if limits else None)
        assert said.request == min(b.request for b in mine)
        assert said.finite == all(b.finite for b in mine)
        assert said.received_commit == all(b.received_commit for b in mine)


def test_one_rank_hears_what_it_said():
    verdict = tally(
        [cast(False, (JobBallot(point=7, stream=1, prepared=3, limit=4), JobBallot(good=False)))]
    )
    first, second = verdict.job(0), verdict.job(1)
    assert (first.waiting, first.same_point, first.good, first.prepared, first.limit) == (
        True,
        True,
        True,
        3,
        4,
    )
    assert (second.waiting, second.good, second.limit) == (False, False, None)


def test_ballot_persists_and_a_cast_one_is_unchanged():
    """A ballot keeps its contents from vote to vote. Later changes don't affect a copy already
    cast.
    """
    ballot = Ballot(3)
    before = ballot.cast()
    ballot.set_job(1, JobBallot(point=5))
    assert tally([ballot.cast()]).changed_rows(tally([before])) == [1]
    assert not tally([before]).job(1).waiting


def test_point_hashes_can_be_negated():
    hashes = {point_hash("step", n) for n in range(1000)}
    assert len(hashes) == 1000
    assert all(0 <= h < 2**62 for h in hashes)
