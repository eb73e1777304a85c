"""Tests the functions that jobs can be submitted with."""

from __future__ import annotations

import pytest

from jaxcross.jobs import submissions
from jaxcross.jobs.submissions import RegisteredFunctions
from tests.support.interleavings import interrupted


def test_function_may_be_registered_during_a_refusal() -> None:
    """Another thread may register a function at any point. The error still lists the others."""
    inside, at = True, 0
    while inside:
        at += 1
        functions = RegisteredFunctions()
        functions.add("a", print)
        functions.add("b", print)

        def request(functions: RegisteredFunctions = functions) -> None:
            with pytest.raises(
                ValueError,
                match="^Job `job`: no function is registered as `c`. Registered are `a`, `b`",
            ):
                functions.request("c", "job", {})

        def register(functions: RegisteredFunctions = functions) -> None:
            functions.add("d", print)

        _, inside = interrupted(request, at, register, module=submissions)
    assert at > 20
