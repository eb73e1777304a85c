"""Starts the ranks of `jaxcross launch` again after a lost rank or host, as `restart` decides."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxcross.commands.hosts import agent_of, missing_hosts, wait_for_hosts

if TYPE_CHECKING:
    from jaxcross.report.event_files import RankRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One run that has ended.

    Attributes:
        code: The exit code.
        stopped: Whether this process received a signal to stop.
        records: The ranks' event files, if it failed.
        explained: Whether the ranks' own output says why it failed.
    """

    code: int
    stopped: bool = False
    records: Sequence[RankRecord] = ()
    explained: bool = True


def run_until_over(args: argparse.Namespace, hosts: Sequence[str], run_once: Callable[[Sequence[str]], Ended]) -> Ended:
    """Runs, and after each lost rank or host decides whether to run again, where, and when. Returns the last end."""
    from jaxcross.commands.restart import Progress, decide, judge_end

    agent = agent_of(os.environ)
    progress = Progress(newest={})
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
                _show(f"not started again: {', '.join(missing)} did not answer for {args.host_timeout:.0f} s")
                return ended
            _show(f"all hosts answer; goes on {progress}")
        elif decision.action == "end":
            return ended
        restarts += 1
        here = decision.hosts
        _show(f"restart {restarts} on {', '.join(here) or 'this machine'}")


def _show(text: str) -> None:
    print(f"jaxcross launch: {text}.", file=sys.stderr, flush=True)
