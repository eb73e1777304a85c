import pytest

from jaxcross.runtime.policy import RoundRobin, Sequential


@pytest.mark.parametrize(
    ("last", "candidates", "expected"), [(0, {0, 1, 2}, 1), (2, {0, 2}, 0), (1, {1}, 1), (2, {1, 0}, 0)]
)
def test_round_robin_takes_the_next_job_cyclically(last, candidates, expected):
    assert RoundRobin().next(last, candidates, 3) == expected


def test_round_robin_runs_all_unfinished_jobs():
    assert RoundRobin().running([True, False, False]) == (1, 2)


def test_sequential_runs_the_first_unfinished_job_only():
    assert Sequential().running([True, False, False]) == (1,)
    assert Sequential().running([True, True]) == ()
    assert Sequential().next(1, {2, 1}, 3) == 1


def test_policies_are_values():
    assert RoundRobin() == RoundRobin()
    assert Sequential().name == "sequential"
    with pytest.raises(AttributeError):
        RoundRobin().name = "other"  # type: ignore[misc]
