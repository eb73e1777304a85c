"""What all ranks agree on before the jobs of a run begin, and after a stop."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcross._endings import ExitKind
from jaxcross.checkpoint import Checkpoints, Session
from jaxcross.errors import JobError, clause
from jaxcross.health.abort import TERMINATED
from jaxcross.interleave.policy import Policy
from jaxcross.jobs.submissions import RegisteredFunctions
from jaxcross.report.metric_files import MetricFiles
from jaxcross.runtime.stall_watch import after_run
from jaxcross.world import World
from jaxcross.world.control_plane import any_rank, gather, require_same

_log = logging.getLogger("jaxcross")


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Compares the ranks' settings of a run. Waits for all ranks.

    Raises:
        JobError: On every rank: the settings differ.
    """
    with world.monitor(job="", step=0, segment=-1, what="start of the run"):
        texts = world.control.allgather_text(json.dumps(facts))
    require_same(
        texts,
        lambda rank, first, theirs: JobError(
            f"Ranks 0 and {rank} want to run different things: {first} and {theirs}. Add the "
            "same jobs in the same order, with the same policy, checkpoints, `metrics` and "
            "emulated link, on every rank."
        ),
    )


def text_of(policy: Policy) -> str:
    """Returns the text by which ranks compare their policies.

    The default `repr` of a user's class contains an address, which differs between ranks.
    """
    cls = type(policy)
    if cls.__repr__ is object.__repr__:
        return f"{cls.__module__}.{cls.__qualname__}"
    return repr(policy)


def open_session(
    checkpoints: Checkpoints, world: World, jobs: Sequence[str], policy: Policy
) -> Session:
    """Opens the checkpoints of a run. Waits for all ranks."""
    with world.monitor(job="", step=0, segment=-1, what="opening the checkpoints"):
        return Session(checkpoints, world, jobs=jobs, policy=text_of(policy))


def claim_metrics(world: World, files: MetricFiles | None) -> None:
    """Claims the folder of metrics on rank 0, which writes the files. Waits for all ranks.

    Raises:
        ValueError: On every rank: the folder is in use or can't be written.
    """
    problem = None
    if files is not None:
        try:
            files.claim()
        except (ValueError, OSError) as error:
            problem = str(error)
    with world.monitor(job="", step=0, segment=-1, what="opening the folder of metrics"):
        problem = gather(world.control, problem)[0]
    if problem is not None:
        raise ValueError(f"`metrics`: {problem}")


def taken_over(
    session: Session, functions: RegisteredFunctions, check_name: Callable[[str], None], rank: int
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yields the unfinished jobs that an earlier run received by `submit`.

    Each is a name, a function and its arguments, identical on all ranks. Warns about jobs that
    joined the earlier run in another way and that this run doesn't have.
    """
    for listed, text in session.resubmit.items():
        try:
            name, fn, arguments = functions.resolve(text, rank)
            # A listed name is a valid name of a job, and its folder is known.
            if name != listed:
                raise ValueError(f"it is listed as `{listed}`, and makes a job `{name}`")
            check_name(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.warning(
                "A submission of an earlier run cannot be understood, and is left out: %s.",
                clause(str(error)),
            )
        else:
            yield name, fn, arguments
    if session.missing and rank == 0:
        _log.warning(
            "These jobs joined an earlier run with these checkpoints, were not over when it ended, "
            "and are not added now: %s. Add them before `runner.run()`, and they go on where they "
            "stood.",
            ", ".join(f"`{name}`" for name in session.missing),
        )


def agreed_exit(world: World, *, terminated: bool, own: BaseException | None) -> BaseException:
    """Returns the exception that this rank raises after a stop.

    Waits for all ranks, so that no rank exits while another one is still saving.

    Args:
        world: All ranks.
        terminated: Whether this rank received SIGTERM.
        own: The exception that this rank's signal handler raised, if any.
    """
    with after_run(world, "end of the run"):
        some = any_rank(world.control, terminated)
        world.flight.record_exit(
            *(ExitKind.TERMINATED, "SIGTERM") if some else (ExitKind.INTERRUPTED, "Ctrl-C")
        )
        # The first rank that exits with a nonzero code terminates all ranks, so we wait until each
        # of them has written its last output.
        world.control.allreduce_min(np.zeros(1, np.int64))
    if own is not None and not isinstance(own, KeyboardInterrupt):
        return own  # the user's handler raised it on purpose
    return SystemExit(TERMINATED) if some else KeyboardInterrupt()
