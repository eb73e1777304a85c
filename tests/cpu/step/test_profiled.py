"""Profiles passed instead of numbers: which steps they are accepted for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from jaxcross.errors import CutError
from jaxcross.plan import Profile
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.step.step import crossover
from jaxcross.step.variant import check_profiles
from jaxcross.testing import LocalRanks

X = jnp.ones(100, jnp.float32)
PROFILE = Profile.whole("a", compute_s=1.0, exchange_s=1.0, nbytes=X.nbytes, ranks=2)


def of_all(x: Any) -> Any:
    return lax.psum(x, "batch")


def of_one(x: Any) -> Any:
    return x * lax.psum(x[0], "batch")


@pytest.mark.parametrize("cut", [PROFILE, [PROFILE], (PROFILE, PROFILE)])
def test_profiles_in_place_of_a_cut_name_the_remedy(cut: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^`cut` cannot be a profile .* pass `jaxcross\.plan\.cut\("
    ):
        crossover(of_all, axes="batch", cut=cut)


def test_a_step_of_other_bytes_is_refused() -> None:
    whole, other = (
        stages.cut(trace(f, (X,), axes={"batch": 2}, wire=LocalRanks())) for f in (of_all, of_one)
    )
    check_profiles([PROFILE], whole, 2)
    with pytest.raises(CutError, match="of another step"):
        check_profiles([PROFILE], other, 2)


def test_a_step_may_exchange_less_at_some_steps() -> None:
    """Training must not end at the first step that takes a branch without a profile."""

    def step(n: Any, x: Any) -> Any:
        return lax.cond(n % 8 == 0, of_all, of_one, x)

    traced = trace(step, (jnp.int32(0), X), axes={"batch": 2}, wire=LocalRanks())
    programs = [stages.cut(traced.decide(branch)) for branch in range(2)]
    assert len({sum(x.nbytes for x in program.exchanges) for program in programs}) == 2
    for program in programs:
        check_profiles([PROFILE], program, 2)
        with pytest.raises(CutError, match="measured on 2 ranks"):
            check_profiles([PROFILE], program, 4)
