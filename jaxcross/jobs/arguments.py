"""Validates the arguments of runners and jobs as soon as the user passes them.

If we didn't check arguments up front, a bad one would blow up much later, e.g. in a job's thread,
with a traceback that doesn't even mention the line at fault. This module also defines the options
shared by `Runner`, `run` and `sweep` (`policy`, `memory` and so on).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, TypedDict

import jax

from jaxcross._arguments import check_choice, is_whole
from jaxcross._files import check_placeholders
from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import clause, shortened
from jaxcross.health import FlightRecorder
from jaxcross.interleave import (
    Instrument,
    Policy,
    Start,
    Weighted,
    checked_depth,
    checked_start,
    depth_of,
)
from jaxcross.jobs.early_stopping import Best, EarlyStopping, Mode
from jaxcross.jobs.evaluations import Evaluation
from jaxcross.jobs.memory import memory_limit
from jaxcross.world import World


class SharedOptions(TypedDict, total=False):
    """The options common to all runs; see `Runner` for what they mean."""

    world: World | None
    policy: Policy | None
    instruments: Iterable[Instrument]
    memory: int | str | None
    events: str | os.PathLike[str] | None
    progress: bool | float | None


class RunOptions(SharedOptions, total=False):
    """The options of a run that isn't a sweep. A sweep sets the extra two itself."""

    checkpoints: Checkpoints | None
    metrics: str | os.PathLike[str] | None


def check_options(function: str, options: Mapping[str, Any], kind: type[SharedOptions]) -> None:
    """Checks the names of the options passed to a function.

    Raises:
        TypeError: `kind` has no option of that name.
    """
    known = sorted(kind.__optional_keys__)
    for name in options:
        if name not in known:
            raise TypeError(
                f"`{function}` has no argument `{name}`. The options of a run that it takes are "
                f"{', '.join(known)}."
            )


def check_values(options: SharedOptions) -> None:
    """Checks everything that can be checked without a world, and makes `instruments` a tuple.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: `memory`, `events` or `progress` is out of range.
    """
    options["instruments"] = checked_instruments(options.get("instruments", ()))
    memory_limit(options.get("memory"))
    check_folder("`events`", options.get("events"))
    check_progress(options.get("progress"))


def check_world(world: Any) -> None:
    """Checks that `world` is a `World` or None.

    Raises:
        TypeError: It's neither.
    """
    if world is not None and not isinstance(getattr(world, "size", None), int):
        raise _wrong("`world`", "what `jaxcross.initialize()` returned, or None", world)


def check_policy(policy: Any) -> None:
    """Checks that `policy` is an instance of a policy class, or None.

    Raises:
        TypeError: It's neither. For example, it may be the class itself.
    """
    if policy is not None and (isinstance(policy, type) or not isinstance(policy, Policy)):
        expected = "`jaxcross.Sequential()`, `jaxcross.RoundRobin()` or `jaxcross.Weighted(shares)`"
        raise _wrong("`policy`", expected, policy)


def checked_instruments(instruments: Any) -> tuple[Instrument, ...]:
    """Checks the instruments and returns them as a tuple.

    Raises:
        TypeError: They aren't an iterable of `Instrument`s.
        ValueError: Two of them would write to the same file or folder.
    """
    found = tuple(instruments) if isinstance(instruments, Iterable) else (instruments,)
    wrong = [each for each in found if isinstance(each, type) or not isinstance(each, Instrument)]
    if wrong or not isinstance(instruments, Iterable):
        expected = "an iterable of objects of classes derived from `Instrument`, such as `[log]`"
        raise _wrong("`instruments`", expected, wrong[0] if wrong else instruments)
    check_places(found)
    return found


def check_places(instruments: Iterable[Instrument]) -> None:
    """Checks that no two instruments write to the same file or folder.

    Raises:
        ValueError: Two instruments share a file or folder.
    """
    writers: dict[str, Instrument] = {}
    for each in instruments:
        place = each.writes_to()
        if place and place in writers:
            names = f"`{type(writers[place]).__name__}` and `{type(each).__name__}`"
            raise ValueError(
                f"Two instruments, {names}, would write to `{place}`. Give each of them a "
                "different path."
            )
        writers[place] = each


def check_count(what: str, value: Any, *, least: float) -> None:
    """Checks that an argument is a whole number of at least `least`.

    Raises:
        TypeError: It isn't a whole number.
        ValueError: It's too small.
    """
    if not is_whole(value):
        raise _wrong(what, "a whole number", value)
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}.")


def checked_examples(job: str, examples: Any) -> float | None:
    """Returns the number of examples per step as a float, or None if none was given.

    Raises:
        TypeError: It isn't a number.
        ValueError: It isn't positive and finite.
    """
    what = f"`examples_per_step` of job `{job}`"
    if examples is None:
        return None
    if not isinstance(examples, Real) or isinstance(examples, bool):
        raise _wrong(what, "a number", examples)
    if not 0 < float(examples) < math.inf:
        raise ValueError(f"{what} must be above 0, got {examples}.")
    return float(examples)


def depth_and_start(policy: Policy) -> tuple[int, Start]:
    """Returns a policy's depth (or the backend's default) and how its jobs start.

    Both values are checked because users can write their own policies.

    Raises:
        TypeError: The policy's depth isn't a whole number.
        ValueError: The policy's depth is below 1, or its `start` is unknown.
    """
    depth = checked_depth(getattr(policy, "depth", None))
    start = checked_start(getattr(policy, "start", "together"))
    return depth_of(jax.default_backend()) if depth is None else depth, start


def check_folder(what: str, folder: Any) -> None:
    """Checks that an argument is a folder's path or None.

    Raises:
        TypeError: It isn't a path.
        ValueError: It's an empty string, which would mean the current working directory, or it
            contains an unknown placeholder.
    """
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise _wrong(what, "the path of a folder, or None", folder)
    if folder == "":
        raise ValueError(f"{what} must be the path of a folder, or None, got an empty text.")
    if folder is not None:
        check_placeholders(folder)


def record_events(flight: FlightRecorder, folder: str | os.PathLike[str]) -> None:
    """Starts recording this rank's events in a folder.

    Raises:
        ValueError: This rank can't write there.
    """
    try:
        flight.record_to(folder)
    except OSError as error:
        raise ValueError(
            f"`events` is `{os.fspath(folder)}`, but this rank cannot write its events there: "
            f"{clause(str(error))}. Name a folder that every rank can create and write to, or "
            "leave `events` out."
        ) from error


def check_checkpoints(checkpoints: Any) -> None:
    """Checks that `checkpoints` is a `Checkpoints` object or None.

    Raises:
        TypeError: It's neither. For example, it may be just a path.
    """
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise _wrong(
            "`checkpoints`", "`jaxcross.Checkpoints(directory, every=1000)`, or None", checkpoints
        )


def checked_interval(what: str, steps: Any) -> int | None:
    """Returns the interval between replica comparisons, in steps.

    Raises:
        ValueError: It isn't a whole number of at least 1.
    """
    if steps is None:
        return None
    if not is_whole(steps) or steps < 1:
        raise ValueError(
            f"{what} must be the number of steps from one comparison to the next, a whole number "
            f"of at least 1, got {steps!r:.60}."
        )
    return int(steps)  # as text, since that's how ranks compare it


def checked_names(what: str, names: Any) -> tuple[str, ...]:
    """Returns leaf names as a tuple; a lone string counts as a single name.

    Raises:
        TypeError: They aren't all strings.
    """
    found = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise _wrong(what, "texts that name leaves, such as `('mask',)`", names)
    return found


def check_progress(progress: Any) -> None:
    """Checks that `progress` is a bool, a positive number of seconds, or None.

    Raises:
        TypeError: It's none of these.
        ValueError: It isn't positive and finite.
    """
    if progress is None or isinstance(progress, bool):
        return
    if not isinstance(progress, Real):
        raise _wrong("`progress`", "True, False, the seconds between lines, or None", progress)
    if not 0 < float(progress) < math.inf:
        raise ValueError(
            f"`progress` must be more than 0 seconds between lines, False for none, got {progress}."
        )


def check_jobs(count: int, policy: Policy) -> None:
    """Checks the jobs of a run that's about to start.

    Raises:
        ValueError: There are no jobs, or `Weighted` doesn't have one share per job.
    """
    if not count:
        raise ValueError(
            "A runner without jobs has nothing to run. Call `runner.add(name, fn)` on every rank "
            "first."
        )
    if isinstance(policy, Weighted) and len(policy.shares) != count:
        raise ValueError(
            f"`Weighted` has {len(policy.shares)} shares, but the run has {count} jobs. Give it "
            "one share for each job, in the order of the jobs."
        )


def check_trial_policy(policy: Any, concurrent: int, *, prunes: bool) -> None:
    """Checks that a policy works for a sweep, where trials come and go all the time.

    Args:
        policy: A policy, or None.
        concurrent: How many trials run at a time.
        prunes: Whether the sweep has a pruner, which makes trials wait for each other.

    Raises:
        TypeError: `policy` isn't a policy.
        ValueError: The policy has one share per job, or would never schedule a trial that others
            are waiting for.
    """
    check_policy(policy)
    if isinstance(policy, Weighted):
        raise ValueError(
            "`Weighted` has a share for each job of a run, but the trials of a sweep come and go. "
            "Use `RoundRobin()`, or leave `policy` out."
        )
    if policy is not None and prunes and len(policy.running(range(concurrent))) < concurrent:
        raise ValueError(
            f"The policy `{policy.name}` does not run all of the {concurrent} trials at the same "
            "time, but with a pruner, each trial has to wait until the others have reached the "
            "same step, so the sweep would deadlock. Use `RoundRobin()`, pass `concurrent=1`, or "
            "leave the pruner out."
        )


def check_job_name(name: Any) -> None:
    """Checks a job's name.

    Raises:
        ValueError: It isn't a string, or it's empty.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a job must be a text that is not empty, got {name!r}")


def check_kwargs(job: str, kwargs: Any) -> None:
    """Checks that `kwargs` can be passed as keyword arguments.

    Raises:
        TypeError: It isn't a mapping with string keys.
    """
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        expected = "a mapping whose keys are texts, such as `{'lr': 0.1}`"
        raise _wrong(f"`kwargs` of job `{job}`", expected, kwargs)


def check_job(name: str, fn: Any, kwargs: Mapping[str, Any]) -> None:
    """Checks that `fn(job, **kwargs)` is a valid call that actually runs the function.

    Raises:
        ValueError: The name isn't a string, or it's empty.
        TypeError: `fn` doesn't accept these arguments, `fn` is a generator or coroutine function
            (calling it wouldn't run anything), or `kwargs` isn't a mapping with string keys.
    """
    check_job_name(name)
    if not callable(fn):
        raise TypeError(
            f"Job `{name}` needs a function `fn(job, **kwargs)`, got a `{type(fn).__name__}`."
        )
    check_kwargs(name, kwargs)
    if (
        inspect.isgeneratorfunction(fn)
        or inspect.iscoroutinefunction(fn)
        or inspect.isasyncgenfunction(fn)
    ):
        kind = "a coroutine" if inspect.iscoroutinefunction(fn) else "a generator"
        raise TypeError(
            f"Job `{name}` needs a function that trains when it is called, got one that returns "
            f"{kind}, which would never be run. Write it without `yield` and `async`."
        )
    try:
        inspect.signature(fn).bind("job", **kwargs)
    except TypeError as error:
        given = "".join(f", {key}=..." for key in kwargs)
        raise TypeError(
            f"Job `{name}` calls its function as `fn(job{given})`, which its signature does not "
            f"allow: {clause(str(error))}. Change the function's parameters, or the arguments that "
            "you pass for it."
        ) from None
    except ValueError:  # written in C, without a signature
        return


def check_loop(name: Any, step: Any, batches: Any, steps: Any) -> None:
    """Checks the arguments of a plain loop.

    Raises:
        TypeError: `name` isn't a string, `step` can't be called with a state and a batch, `batches`
            isn't an iterable or is a single batch, or `steps` isn't a whole number.
        ValueError: `name` is empty, or `steps` is negative.
    """
    if not isinstance(name, str):
        raise _wrong("`name`", "a text that is unique among the jobs", name)
    if not name:
        raise ValueError(
            "`name` must not be empty, because reports and errors show it. Give each job a "
            "different name."
        )
    if not callable(step):
        raise _wrong(f"`step` of job `{name}`", "a function of `(state, batch)`", step)
    _check_signature(name, step)
    check_batches(name, batches, steps)


def check_batches(name: str, batches: Any, steps: Any) -> None:
    """Checks that a loop can run over these batches for that many steps.

    Raises:
        TypeError: `batches` isn't an iterable or is a single batch, or `steps` isn't a whole
            number.
        ValueError: `steps` is negative.
    """
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, Mapping | str | bytes) or not iterable:
        one = "; this looks like a single batch" if isinstance(batches, Mapping) else ""
        raise TypeError(
            f"`batches` of job `{name}` must be an iterable of batches, got a "
            f"`{type(batches).__name__}`{one}."
        )
    if steps is not None:
        check_count(f"`steps` of job `{name}`", steps, least=0)


def checked_evaluation(job: str, n: Any, fn: Any, rank: Any, name: Any) -> Evaluation:
    """Checks the arguments of `job.every` and returns the evaluation.

    Raises:
        TypeError: `n` or `rank` isn't a whole number, `fn` can't be called, or `name` isn't a
            string.
        ValueError: `n` is below 1, or `name` is empty or contains a slash.
    """
    what = f"of `job.every` in job `{job}`"
    check_count(f"`n` {what}", n, least=1)
    if not callable(fn):
        raise _wrong(f"`fn` {what}", "a function of the state", fn)
    if rank is not None:
        check_count(f"`rank` {what}", rank, least=0)
    if not isinstance(name, str):
        raise _wrong(f"`name` {what}", "a text", name)
    if not name or "/" in name:
        raise ValueError(
            f"`name` {what} must be a text without a slash that is not empty, got {name!r}."
        )
    return Evaluation(name=name, n_steps=int(n), fn=fn, rank=rank)


def checked_early_stopping(
    job: str, metric: Any, *, mode: Any, patience: Any, patience_steps: Any, min_delta: Any
) -> EarlyStopping:
    """Checks the arguments of `job.stop_early` and returns the settings.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or it isn't the case that exactly one of `patience`
            and `patience_steps` is given.
    """
    what = f"of `job.stop_early` in job `{job}`"
    if not isinstance(metric, str):
        raise _wrong(f"`metric` {what}", "the name of a metric, such as `eval/accuracy`", metric)
    check_choice(mode, Mode, f"`mode` {what}")
    if (patience is None) == (patience_steps is None):
        raise ValueError(
            f"Give exactly one of `patience` and `patience_steps` {what}, got {patience!r:.60} and "
            f"{patience_steps!r:.60}."
        )
    for name, value in (("patience", patience), ("patience_steps", patience_steps)):
        if value is not None:
            check_count(f"`{name}` {what}", value, least=1)
    if isinstance(min_delta, bool) or not isinstance(min_delta, int | float):
        raise _wrong(f"`min_delta` {what}", "a number", min_delta)
    if not 0 <= min_delta < math.inf:
        raise ValueError(f"`min_delta` {what} must be at least 0 and finite, got {min_delta}.")
    best = Best(metric=metric, mode=mode, min_delta=float(min_delta))
    return EarlyStopping(best=best, patience=patience, patience_steps=patience_steps)


def _check_signature(name: str, step: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # written in C, without a signature
        return
    try:
        signature.bind("state", "batch")
    except TypeError as error:
        raise TypeError(
            f"`step` of job `{name}` must take `(state, batch)`, got a function of `{signature}`. "
            "Put everything that a step needs into each element of `batches`, as a tuple or a "
            "dict, and unpack it in the step, or write the loop as a function for `Runner.add`."
        ) from error


def _wrong(what: str, expected: str, value: Any) -> TypeError:
    shown = (
        f"the class `{value.__name__}`" if isinstance(value, type) else shortened(repr(value), 100)
    )
    return TypeError(f"{what} must be {expected}, got {shown}.")
