"""What all ranks agree on before the jobs of a run begin, and as it ends after a stop."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcross.checkpoint import Checkpoints, Session
from jaxcross.errors import JobError, clause
from jaxcross.health.abort import TERMINATED
from jaxcross.interleave.policy import Policy
from jaxcross.jobs.submissions import RegisteredFunctions
from jaxcross.report.metric_files import MetricFiles
from jaxcross.runtime.stall_watch import after_run
from jaxcross.world import World
from jaxcross.world.control_plane import any_rank, gather

_log = logging.getLogger("jaxcross")


def agree(world: World, facts: Mapping[str, Any]) -> None:
    """Compares the ranks' settings of a run. Waits for all ranks.

    Raises:
        JobError: On every rank: they differ.
    """
    with world.monitor(job="", step=0, segment=-1, what="start of the run"):
        texts = world.control.allgather_text(json.dumps(facts))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise JobError(
                f"Ranks 0 and {rank} want to run different things: {texts[0]} and {text}. Add the "
                "same jobs in the same order, with the same policy, checkpoints and `metrics`, on "
                "every rank."
            )


def open_session(
    checkpoints: Checkpoints, world: World, jobs: Sequence[str], policy: Policy
) -> Session:
    """Opens the checkpoints of a run. Waits for all ranks."""
    with world.monitor(job="", step=0, segment=-1, what="opening the checkpoints"):
        return Session(checkpoints, world, jobs=jobs, policy=repr(policy))


def claim_metrics(world: World, files: MetricFiles | None) -> None:
    """Has rank 0, which has the files, claim the folder of metrics. Waits for all ranks.

    Raises:
        ValueError: On every rank: the folder is in use, or cannot be written.
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
    """Yields the jobs that an earlier run was given by `submit` and that have not ended: name,
    function, arguments.

    Warns of those that it was given otherwise, and that this run lacks. The same on all ranks.
    """
    for listed, text in session.resubmit.items():
        try:
            name, fn, arguments = functions.resolve(text, rank)
            if (
                name != listed
            ):  # a name that is listed is one that a job can have, and its folder is known
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
    """Returns what this rank raises after a stop. Waits for all, so that none ends while another
    still saves.

    Args:
        world: All ranks.
        terminated: Whether SIGTERM came to this rank.
        own: The exception of this rank's handler of a signal, if there was one.
    """
    with after_run(world, "end of the run"):
        some = any_rank(world.control, terminated)
        world.flight.record_exit(*("terminated", "SIGTERM") if some else ("interrupted", "Ctrl-C"))
        # The first that leaves with an exit code ends all: not before each has written its last
        # words.
        world.control.allreduce_min(np.zeros(1, np.int64))
    if own is not None and not isinstance(own, KeyboardInterrupt):
        return own  # a user's handler means something by it
    return SystemExit(TERMINATED) if some else KeyboardInterrupt()
