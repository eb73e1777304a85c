"""Tests the links that runs can emulate, and how a real link is described."""

import threading

import pytest

from jaxcross._link import Link, current_link, described_link
from jaxcross.lab import emulated_link

SLOW, FAST = Link.parse("1mbit"), Link.parse("1gbit")


def test_the_innermost_emulated_link_counts():
    assert current_link() is None
    with emulated_link(SLOW):
        assert current_link() == SLOW
        with emulated_link(FAST):
            assert current_link() == FAST
        with emulated_link(None):
            assert current_link() is None
        assert current_link() == SLOW
    assert current_link() is None


def test_equal_links_may_be_nested():
    with emulated_link(SLOW), emulated_link(FAST):
        with emulated_link(SLOW):
            assert current_link() == SLOW
        assert current_link() == FAST


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("500mbit",), r"^`mbps` of `Link` must be a number, got '500mbit'\. `Link.parse` reads"),
        ((True,), "^`mbps` of `Link` must be a number, got True"),
    ],
)
def test_a_rate_is_a_number(arguments, error):
    with pytest.raises(TypeError, match=error):
        Link(*arguments)


def test_links_print_their_latency_and_equal_ones_print_alike():
    assert str(Link(500, latency_s=0.1)) == "emulated link 500mbit, 100 ms"
    assert repr(Link(500)) == repr(Link(500.0, latency_s=0))


def test_a_rate_is_finite():
    with pytest.raises(ValueError, match="^`mbps` of a `Link` must be above 0"):
        Link(float("inf"))


def test_a_failure_ends_the_emulation():
    with pytest.raises(KeyError), emulated_link(SLOW):
        raise KeyError
    assert current_link() is None


def test_a_link_is_emulated_in_every_thread():
    found = []
    with emulated_link(SLOW):
        thread = threading.Thread(target=lambda: found.append(current_link()))
        thread.start()
        thread.join()
    assert found == [SLOW]


def test_blocks_of_several_threads_may_end_in_any_order():
    first, second = emulated_link(SLOW), emulated_link(FAST)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert current_link() == FAST
    second.__exit__(None, None, None)
    assert current_link() is None


@pytest.mark.parametrize("wrong", [Link, "500mbit", 5])
def test_only_a_link_is_emulated(wrong):
    with pytest.raises(TypeError, match="^`link` must be a `Link`, .* got "), emulated_link(wrong):
        pass
    assert current_link() is None


def test_the_environment_describes_a_real_link():
    assert described_link({}) == ""
    assert described_link({"JAXCROSS_LINK": " a cable "}) == "a cable"
