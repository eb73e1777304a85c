"""`jaxcross top DIR`: shows the progress of a run from another terminal.

DIR is the run's event folder, where the ranks record what they're doing. On a terminal, the table
is redrawn until the run ends; if the output goes to a file or a pipe, it's printed once.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from jaxcross.report import RunState

_LOOK_S = 0.5
_MOST_RANKS = 8


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `top` to the command line."""
    parser = subparsers.add_parser(
        "top", help="show how far a run is, from another terminal", description=__doc__
    )
    parser.add_argument(
        "dir", metavar="DIR", type=Path, help="its event folder, as named by `launch --events`"
    )


def run(args: argparse.Namespace) -> int:
    """Shows the run until it ends or the user presses Ctrl-C.

    Returns 1 if there's no run in the folder. This works even if the ranks hang: we only read the
    files they write, and never wait for the ranks themselves.
    """
    from rich.console import Console

    from jaxcross.report import read_state

    def look() -> RunState:
        return read_state(args.dir, time.time())

    try:
        state = look()
        console = Console()
        if not state.ended and console.is_terminal:
            state = _follow(look, console)
        else:
            console.print(shown(state, console))
    except KeyboardInterrupt:
        return 0
    except FileNotFoundError:
        print(
            f"jaxcross top: there is no folder `{args.dir}`. Name the run's folder of event files.",
            file=sys.stderr,
        )
        return 1
    except NotADirectoryError:
        print(
            f"jaxcross top: `{args.dir}` is not a folder. Name the run's folder of event files.",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"jaxcross top: {error}", file=sys.stderr)
        return 1
    for rank, reason in state.skipped.items():
        print(f"The events of rank {rank} are skipped. {reason}")
    if state.ended and state.how:
        print(f"How it ended: jaxcross doctor --post-mortem {shlex.quote(str(args.dir))}")
    return 0


def _follow(look: Callable[[], RunState], console: Console) -> RunState:
    from rich.live import Live

    state = look()
    pause = threading.Event()  # never set, only used for waiting
    with Live(shown(state, console), console=console, auto_refresh=False) as live:
        while not state.ended:
            pause.wait(_LOOK_S)
            state = look()
            live.update(shown(state, console), refresh=True)
    return state


def shown(state: RunState, console: Console) -> RenderableType:
    """Returns the table of a run, or what its ranks are up to if no jobs have been run yet."""
    from rich.text import Text

    from jaxcross.commands.live_table import table_of

    how = f"; {state.how}" if state.how else ""
    if state.run is None:
        size = state.records[0].size
        lines = [
            f"{size} rank{'s' * (size > 1)}, no run of jobs so far{'; ended' * state.ended}{how}"
        ]
        lines += [f"rank {record.rank}: {record.place}" for record in state.records[:_MOST_RANKS]]
        return Text("\n".join(lines))
    if state.ended:
        how = f"; the processes have ended{how}"
    elif state.run.over:
        how = f"; the script is still running{how}"
    return table_of(state.run, console, state=how)
