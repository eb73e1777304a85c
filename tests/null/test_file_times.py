"""A test file that takes too long fails its run: plain tests, integration tests, and slower machines."""

import pytest

from tests.support.file_times import ALL_TESTS_S, FileTimes


def counted(*tests, longest_s=60.0, rest_s=0.0, rest=()):
    """The files that are too long; `rest_s` seconds more are spread over 1,000 other files."""
    times = FileTimes(longest_s)
    for name, seconds, *marks in tests:
        times.add(f"tests/{name}::test_it", seconds, marks)
    for n in range(1000):
        times.add(f"tests/rest_{n}.py::test_it", rest_s / 1000, rest)
    return [line.partition(": speed")[0].removeprefix("tests/") for line in times.too_long()]


@pytest.mark.parametrize("kind", ["plain", "integration"])
def test_tests_of_a_file_add_up(kind):
    marks = () if kind == "plain" else (kind,)
    assert counted(("a.py", 31, *marks), ("b.py", 60, *marks), ("a.py", 30, *marks)) == [
        f"a.py: its {kind} tests took 61 s, more than 60 s"
    ]


def test_plain_and_integration_tests_count_apart():
    """They are run one after the other, so each run has its own limit."""
    assert counted(("a.py", 40), ("a.py", 40, "integration")) == []


def test_exhaustive_tests_have_no_limit():
    assert counted(("a.py", 4000, "exhaustive"), ("b.py", 4000, "exhaustive", "integration")) == []


@pytest.mark.parametrize("kind", ["plain", "integration"])
def test_a_slower_machine_has_a_larger_limit(kind):
    """By as much as all tests of that kind take longer; those of the other kind change nothing."""
    marks = () if kind == "plain" else (kind,)
    twice_s = 2 * ALL_TESTS_S[kind] - 125
    assert counted(("a.py", 125, *marks), rest_s=twice_s, rest=marks) == [
        f"a.py: its {kind} tests took 125 s, more than 120 s"
    ]
    assert counted(("a.py", 119, *marks), rest_s=twice_s, rest=marks) == []
    other = ("integration",) if kind == "plain" else ()
    assert len(counted(("a.py", 61, *marks), rest_s=10 * max(ALL_TESTS_S.values()), rest=other)) == 1


def test_without_the_option_nothing_is_too_long():
    assert counted(("a.py", 4000), longest_s=None) == []


@pytest.mark.parametrize(("seconds", "status"), [(61, pytest.ExitCode.TESTS_FAILED), (59, pytest.ExitCode.OK)])
def test_a_file_over_the_limit_fails_the_run(seconds, status):
    class Session:
        exitstatus = pytest.ExitCode.OK

    times = FileTimes(60)
    times.add("tests/a.py::test_it", seconds, ("integration",))
    times.pytest_sessionfinish(Session)
    assert Session.exitstatus == status
