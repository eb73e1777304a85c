"""Arguments of `Runner`, `run` and `Job` are checked immediately, with what to pass instead."""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross.interleave import compute_queue
from jaxcross.interleave.instrument import SpanLog
from jaxcross.interleave.policy import Turns
from jaxcross.jobs.arguments import RunOptions, checked_interval, checked_names
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks

POLICIES = r"`jaxcross.Sequential\(\)`, `jaxcross.RoundRobin\(\)` or `jaxcross.Weighted\(shares\)`"
INSTRUMENTS = r"an iterable of objects of classes derived from `Instrument`, such as `\[log\]`"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "sequential"}, TypeError, f"`policy` must be {POLICIES}, got 'sequential'."),
    (
        {"policy": jaxcross.RoundRobin},
        TypeError,
        f"`policy` must be {POLICIES}, got the class `RoundRobin`.",
    ),
    (
        {"progress": "no"},
        TypeError,
        "`progress` must be True, False, the seconds between lines, or None, got 'no'.",
    ),
    (
        {"progress": 0},
        ValueError,
        "`progress` must be more than 0 seconds between lines, False for none, got 0.",
    ),
    (
        {"progress": float("nan")},
        ValueError,
        "`progress` must be more than 0 seconds between lines, False for none, got nan.",
    ),
    (
        {"memory": "80 GBit"},
        ValueError,
        "`memory` must be a number of bytes with a unit, .* got '80 GBit'.",
    ),
    ({"memory": 0}, ValueError, "`memory` must be above 0 bytes, got 0."),
    (
        {"memory": 1.5e9},
        TypeError,
        "`memory` must be a whole number of bytes, .* got 1500000000.0.",
    ),
    ({"instruments": SpanLog()}, TypeError, f"`instruments` must be {INSTRUMENTS}, got <"),
    (
        {"instruments": [SpanLog]},
        TypeError,
        f"`instruments` must be {INSTRUMENTS}, got the class `SpanLog`.",
    ),
    ({"instruments": [print]}, TypeError, f"`instruments` must be {INSTRUMENTS}, got <built-in"),
    ({"instruments": None}, TypeError, f"`instruments` must be {INSTRUMENTS}, got None."),
    (
        {"checkpoints": "folder"},
        TypeError,
        "`checkpoints` must be `jaxcross.Checkpoints.* got 'folder'.",
    ),
    ({"events": 3}, TypeError, "`events` must be the path of a folder, or None, got 3."),
    ({"events": ""}, ValueError, "`events` must be the path of a folder, or None, got an empty"),
]


def test_a_folder_of_events_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    def work(world: Any) -> None:
        with pytest.raises(
            ValueError,
            match=f"^`events` is `{file / 'events'}`, but this rank cannot write its events there",
        ):
            Runner(world, events=file / "events")

    run_ranks(1, work)


@pytest.mark.parametrize("given", [Runner, functools.partial(run, [])], ids=["Runner", "run"])
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    WRONG,
    ids=[f"{n}-{next(iter(options))}" for n, (options, *_) in enumerate(WRONG)],
)
def test_arguments_of_a_runner(
    given: Callable[..., Any], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    def work(world: Any) -> None:
        with pytest.raises(kind, match=f"^{message}"):
            given(world=world, **options)

    run_ranks(1, work)


def test_the_world_of_a_runner() -> None:
    def work(world: Any) -> None:
        with pytest.raises(
            TypeError,
            match=r"^`world` must be what `jaxcross.initialize\(\)` returned, or None, got R",
        ):
            Runner(jaxcross.RoundRobin())  # type: ignore[arg-type]
        Runner(world, None, instruments=iter([SpanLog()]))

    run_ranks(1, work)


class Own:
    """A user-defined policy with the attributes that every policy has."""

    name = "own"

    def running(self, jobs: Sequence[int]) -> tuple[int, ...]:
        return tuple(jobs)

    def next(self, candidates: Collection[int], turns: Turns) -> int:
        return min(candidates)

    def share(self, job: int) -> float:
        return 1.0


def test_depth_is_that_of_the_backend() -> None:
    """Unless the policy sets it, the depth is 2, or whatever was measured to be better."""
    policies = (None, Own(), jaxcross.RoundRobin(depth=1))

    def work(world: Any) -> None:
        with mock.patch.object(compute_queue, "_OF_BACKEND", {"other": 5}):
            assert [Runner(world, each)._depth for each in policies] == [2, 2, 1]
        with mock.patch.object(compute_queue, "_OF_BACKEND", {jax.default_backend(): 3}):
            assert [Runner(world, each)._depth for each in policies] == [3, 3, 1]

    run_ranks(1, work)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("depth", 1.5, TypeError, "`depth` of a policy must be a whole number or None, got 1.5."),
        ("depth", 0, ValueError, "`depth` of a policy must be at least 1, got 0."),
        ("start", "later", ValueError, "`start` of a policy must be one of 'together', 'as_ready'"),
    ],
)
def test_the_depth_and_start_of_a_users_policy_are_checked(
    name: str, value: object, kind: type[Exception], message: str
) -> None:
    policy = Own()
    setattr(policy, name, value)

    def work(world: Any) -> None:
        with pytest.raises(kind, match=f"^{message}"):
            Runner(world, policy)

    run_ranks(1, work)


def test_the_options_of_a_run_are_those_of_a_runner() -> None:
    parameters = inspect.signature(Runner).parameters
    assert set(RunOptions.__annotations__) == set(parameters)
    assert get_type_hints(RunOptions) == {
        name: hint for name, hint in get_type_hints(Runner.__init__).items() if name != "return"
    }


def step(state: Any, batch: Any) -> Any:
    return state, batch


class Loaded:
    """Data with only an index operator, like a PyTorch data set."""

    def __getitem__(self, index: int) -> float:
        return [1.0, 2.0][index]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (
            (1, step, 0.0, []),
            {},
            TypeError,
            ("`name` must be a text that is unique among the jobs, got 1."),
        ),
        (("", step, 0.0, []), {}, ValueError, "`name` must not be empty"),
        (
            ("a", 1, 0.0, []),
            {},
            TypeError,
            ("`step` of job `a` must be a function of `.state, batch.`, got 1."),
        ),
        (
            ("a", lambda state, x, y: (state, {}), 0.0, []),
            {},
            TypeError,
            (
                "`step` of job `a` must take `.state, batch.`, got a function of `.state, x, y.`. "
                "Put everything that a step needs into each element"
            ),
        ),
        (
            ("a", lambda state: state, 0.0, []),
            {},
            TypeError,
            "`step` of job `a` must take `.state, batch.`, got",
        ),
        (
            ("a", jaxcross.crossover(lambda s, x, y: (s, {}), axes="batch"), 0.0, []),
            {},
            TypeError,
            "`step` of job `a` must take `.state, batch.`, got a function of `.s, x, y.`",
        ),
        (
            ("a", step, 0.0, 5),
            {},
            TypeError,
            ("`batches` of job `a` must be an iterable of batches, got a `int`."),
        ),
        (
            ("a", step, 0.0, {"x": 1.0}),
            {},
            TypeError,
            (
                "`batches` of job `a` must be an iterable of batches, got a `dict`; "
                "this looks like a single batch."
            ),
        ),
        (
            ("a", step, 0.0, []),
            {"steps": 2.5},
            TypeError,
            "`steps` of job `a` must be a whole number, got 2.5.",
        ),
        (
            ("a", step, 0.0, []),
            {"steps": -1},
            ValueError,
            "`steps` of job `a` must be at least 0, got -1.",
        ),
    ],
)
def test_arguments_of_a_job(
    arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        Job(*arguments, **options)


@pytest.mark.parametrize(
    "valid",
    [
        step,
        functools.partial(lambda rate, state, batch: (state, batch), 0.1),
        jaxcross.crossover(step, axes="batch"),
        lambda state, batch, rate=0.1: (state, batch),
        lambda *arguments: arguments,
        print,
    ],
)
def test_steps_that_take_a_state_and_a_batch_are_jobs(valid: Callable[..., Any]) -> None:
    Job("a", valid, 0.0, Loaded())  # type: ignore[arg-type]


def makes_a_generator(job: Any) -> Any:
    yield job


async def makes_a_coroutine(job: Any) -> Any:
    return job


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (
            Job("a", step, 0.0, []),
            {},
            r"Job `a` needs a function `fn\(job, \*\*kwargs\)`, got a `Job`\.",
        ),
        (
            lambda: None,
            {},
            r"Job `a` calls its function as `fn\(job\)`, which .*: too many positional arguments\.",
        ),
        (
            lambda job: None,
            {"lr": 1},
            r"Job `a` calls its function as `fn\(job, lr=...\)`, which .*: got an unexpected",
        ),
        (
            step,
            {},
            (
                r"Job `a` calls its function as `fn\(job\)`, which its signature does not allow: "
                r"missing a required argument: 'batch'\."
            ),
        ),
        (
            makes_a_generator,
            {},
            "Job `a` needs a function that trains .*, got one that returns a generator,",
        ),
        (
            functools.partial(makes_a_coroutine),
            {},
            "Job `a` needs a function that trains .*, got one that returns a coroutine,",
        ),
        (lambda job, lr: None, 0.1, "`kwargs` of job `a` must be a mapping .* got 0.1."),
        (lambda job, **_: None, {1: 2}, "`kwargs` of job `a` must be .* texts, .* got {1: 2}."),
    ],
)
def test_job_functions_are_checked_when_added(function: Any, kwargs: Any, message: str) -> None:
    def work(world: Any) -> None:
        with pytest.raises(TypeError, match=f"^{message}"):
            Runner(world).add("a", function, kwargs)

    run_ranks(1, work)


@pytest.mark.parametrize(
    "function", [print, lambda job, lr=1: None, functools.partial(step, batch=1), lambda *a: None]
)
def test_functions_that_take_a_job_can_be_added(function: Any) -> None:
    run_ranks(1, lambda world: Runner(world).add("a", function))  # type: ignore[arg-type]


def test_jobs_do_not_share_an_iterator() -> None:
    data = iter([1.0, 2.0])
    with pytest.raises(
        ValueError,
        match="^`batches` of jobs `a` and `c` are the same iterator, .* its own iterator.$",
    ):
        run([Job("a", step, 0.0, data), Job("b", step, 0.0, [1.0]), Job("c", step, 0.0, data)])


def test_numbers_of_steps_may_be_numpys() -> None:
    assert type(checked_interval("`check_replicas`", np.int32(2))) is int
    for wrong in (0, -1, True, "3", 1.5, np.float32(2)):
        with pytest.raises(
            ValueError,
            match="^`check_replicas` must be the number of steps from one comparison to the",
        ):
            checked_interval("`check_replicas`", wrong)


def test_rank_local_holds_names() -> None:
    assert checked_names("`rank_local`", "mask") == ("mask",)
    for wrong in (5, (1,), ("mask", None)):
        with pytest.raises(
            TypeError,
            match="^`rank_local` must be texts that name leaves, such as `.'mask',.`, got ",
        ):
            checked_names("`rank_local`", wrong)
    with pytest.raises(TypeError, match="^`rank_local` of job `a` must be texts"):
        Job("a", step, 0.0, [], rank_local=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [Job("a", step, 0.0, []), [step], [("a", step)], 3, None])
def test_run_takes_jobs(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^`jobs` must be a list of `jaxcross.Job`s, got "):
        run(wrong)


@pytest.mark.parametrize(
    "wrong", [4, "41", ("4", 1), [None], {"a": 4, "b": 1}, {4, 1}, (True, 1), None]
)
def test_shares_are_numbers_in_order(wrong: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"^`Weighted` takes a number for each job, as in `Weighted\(\(4, 1\)\)`, ",
    ):
        jaxcross.Weighted(wrong)
    with pytest.raises(TypeError, match=r"^`Weighted` takes a number .*`joining='2'`\.$"):
        jaxcross.Weighted((4, 1), joining="2")  # type: ignore[arg-type]


def test_shares_may_be_numpys_and_jaxs() -> None:
    for shares in (np.array([4, 1]), [np.float32(4), jnp.float32(1)]):
        assert jaxcross.Weighted(shares) == jaxcross.Weighted((4, 1))  # type: ignore[arg-type]
