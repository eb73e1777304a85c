"""The search for the fastest cut: what it tries, when it stops, what it keeps. Times are given, not measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxcross import cut_search
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import FakeControl
from jaxcross.testing_wire import LocalRanks

Search = Callable[..., int]


def step(params: list[jax.Array], x: jax.Array) -> Any:
    def loss(params: list[jax.Array]) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return y.sum()

    grads = jax.grad(loss)(params)
    return [w - jax.lax.pmean(g, "batch") for w, g in zip(params, grads, strict=True)]


@pytest.fixture
def traced() -> Traced:
    return trace(step, ([jnp.eye(4)] * 16, jnp.ones((2, 4))), axes={"batch": 2}, wire=LocalRanks())


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, traced: Traced) -> Search:
    """Seconds a step of each number of pieces -> the number that is chosen. `asked` lists what was built."""
    (control,) = FakeControl.group(1)
    world = SimpleNamespace(rank=0, size=2, local_size=2)

    def run(
        seconds: dict[int, float], asked: list[int] | None = None, found: dict[str, int] | None = None
    ) -> int:  # fmt: skip
        def race(rivals: Any, *_: Any) -> tuple[float, ...]:
            return tuple(seconds[r.pieces] for r in rivals)

        def build(program: Any) -> Any:
            pieces = sum(s.kind == "collective" for s in program.segments)
            if asked is not None:
                asked.append(pieces)
            return SimpleNamespace(program=program, pieces=pieces)

        monkeypatch.setattr(cut_search, "_race", race)
        pieces, compiled = cut_search.search(
            traced, [], world=world, cut=lambda n: traced.cut(n, bucket_bytes=0), build=build,
            together=lambda _, work: work(control), found={} if found is None else found,
        )  # fmt: skip
        assert compiled.pieces == pieces
        return pieces

    return run


def test_cuts_are_doubled_while_that_pays(search: Search, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    with caplog.at_level(logging.WARNING, "jaxcross"):
        assert search({1: 3.0, 2: 2.5, 4: 2.0, 8: 2.2, 16: 2.4}, asked) == 4
    assert asked == [1, 2, 4, 8, 16]
    assert caplog.messages == [
        "`step` runs fastest cut into 4 exchange segments: 2 s a step, uncut 3 s (1.50x; tried 1, 2, 4, 8, 16 in 0 s)."
    ]


def test_never_slower_than_uncut(search: Search) -> None:
    assert search({1: 3.0, 2: 3.1, 4: 3.2}) == 1
    assert search({1: 3.0, 2: 2.999, 4: 3.2}) == 1, "what scatter explains is no gain"


def test_one_finer_cut_is_tried_behind_one_that_does_not_pay(search: Search) -> None:
    asked: list[int] = []
    assert search({1: 3.0, 2: 3.1, 4: 2.5, 8: 2.6, 16: 2.6}, asked) == 4 and asked == [1, 2, 4, 8, 16]
    asked.clear()
    assert search({1: 3.0, 2: 3.1, 4: 3.2}, asked) == 1 and asked == [1, 2, 4]


def test_what_a_job_found_before_a_restart_is_taken(search: Search) -> None:
    found: dict[str, int] = {}
    assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}, found=found) == 2
    assert list(found.values()) == [2]
    asked: list[int] = []
    assert search({}, asked, found) == 2 and asked == [2]
    assert search({1: 1.0, 2: 2.0, 4: 2.0}, found=dict.fromkeys(found, 10**9)) == 1, (
        "no number of pieces: measured again"
    )


def test_what_was_found_is_kept_beside_compiled_programs(search: Search, tmp_path: Any) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    try:
        assert search({1: 3.0, 2: 2.0, 4: 2.5, 8: 2.5}) == 2
        asked: list[int] = []
        assert search({1: 3.0, 2: 2.9}, asked) == 2 and asked == [1, 2]
        asked.clear()
        assert search({1: 3.0, 2: 3.1, 4: 3.2}, asked) == 1 and asked == [1, 2, 2, 4], "slower than uncut: another link"
        asked.clear()
        assert search({1: 3.3}, asked) == 1 and asked == [1], "what was found anew is kept"
        assert search({1: 9.0, 2: 7.0, 4: 6.0, 8: 6.0, 16: 6.0}) == 4, "uncut takes thrice as long: another link"
        (tmp_path / "cache" / "jaxcross-cuts.json").write_text("{")
        assert search({1: 1.0, 2: 2.0, 4: 2.0}) == 1, "a damaged file is measured again"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
