"""Runs the ranks of `jaxcross launch`, and restarts them as decided by `restart_decision`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxcross._endings import ExitKind
from jaxcross.commands.hosts import agent_of, missing_hosts, signal_ranks, wait_for_hosts
from jaxcross.commands.restart_decision import CheckpointProgress, decide, judge_end

if TYPE_CHECKING:
    from jaxcross.report import RankRecord

SPEAK_S = 15.0
"""How many seconds `mpirun` gets to exit on its own after a rank has reported a lost rank. After
that, we kill it. This is necessary because Open MPI's `mpirun` waits for a lost host forever.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one run ended.

    Attributes:
        code: The exit code.
        stopped: Whether this process was told to stop by a signal.
        records: The ranks' event files, if the run failed.
        explained: Whether the ranks' own output explains the failure.
    """

    code: int
    stopped: bool = False
    records: Sequence[RankRecord] = ()
    explained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The event files of a run that's in progress or has ended.

    Attributes:
        events: The event folder.
        earlier: The run that wrote to the folder before this one, as returned by `latest_run`.
        hosts: The hosts that share the ranks equally; empty for this machine.
        ranks: Number of ranks.
    """

    events: Path
    earlier: str
    hosts: Sequence[str]
    ranks: int

    def read(self) -> Sequence[RankRecord]:
        """Reads the records of the ranks that have joined. Programs without jaxcross have none."""
        return [record for record in _read(self.events) if record.run != self.earlier]

    def is_stuck(self) -> bool:
        """Whether a rank was reported lost so long ago that `mpirun` should have ended by now."""
        return any(
            r.exit_kind == ExitKind.REPORTED and r.last_s < time.time() - SPEAK_S
            for r in self.read()
        )

    def signal(self, number: int) -> bool:
        """Signals all ranks without waiting for them. Returns False if no rank has joined yet."""
        pids: dict[str, list[int]] = {}
        for record in self.read():
            pids.setdefault(self.hosts[record.rank * len(self.hosts) // self.ranks], []).append(
                record.pid
            )
        signal_ranks(number, pids, agent_of(os.environ))
        return bool(pids)


def latest_run(events: Path) -> str:
    """Returns the name of the last run that wrote to this event folder, or "" if there was none."""
    return next((record.run for record in _read(events)), "")


def _read(events: Path) -> Sequence[RankRecord]:
    from jaxcross.report import read_event_files

    try:
        return read_event_files(events)
    except (OSError, ValueError):
        return []


def run_until_over(
    args: argparse.Namespace, hosts: Sequence[str], run_once: Callable[[Sequence[str]], Ended]
) -> Ended:
    """Runs the ranks, and restarts them after losing a rank or a host if `decide` says so.

    Returns how the last run ended.
    """
    agent = agent_of(os.environ)
    progress = CheckpointProgress(newest={})
    restarts = 0
    here = hosts
    while True:
        ended = run_once(here)
        if ended.code == 0 or args.max_restarts == 0:
            return ended
        missing = missing_hosts(hosts, agent) if not ended.stopped else []
        end = judge_end(ended.code, stopped=ended.stopped, records=ended.records, missing=missing)
        progress = progress.after(ended.records)
        decision = decide(
            end,
            progress,
            max_restarts=args.max_restarts,
            hosts=hosts,
            missing=missing,
            last=here,
            same_ranks=args.same_ranks,
        )
        _show(f"{end.reason}; {decision.reason}" if end.kind == "lost" else decision.reason)
        if decision.action == "wait":
            find_missing = partial(missing_hosts, decision.hosts, agent)
            if not wait_for_hosts(find_missing, limit_s=args.host_timeout, show=_show):
                _show(
                    f"not restarted: {', '.join(missing)} did not answer for "
                    f"{args.host_timeout:.0f} s"
                )
                return ended
            _show(f"all hosts answer; continues {progress}")
        elif decision.action == "end":
            return ended
        restarts += 1
        here = decision.hosts
        _show(f"restart {restarts} on {', '.join(here) or 'this machine'}")


def _show(text: str) -> None:
    print(f"jaxcross launch: {text}.", file=sys.stderr, flush=True)
