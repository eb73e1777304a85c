"""Prints notices that the ranks have joined, until the script begins its first work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import final

FIRST_NOTICE_S = 5.0
"""Seconds until the first notice. Each later notice comes after twice the time of the previous one.
"""


def no_progress_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the user has turned off progress output. Pure."""
    try:
        return float(environ.get("JAXCROSS_PROGRESS", "")) == 0
    except ValueError:
        # The variable is either unset or invalid; in the latter case, the runner will report it.
        return False


@final
class StartNotice:
    """Prints how many ranks have joined, in a separate thread, until work begins.

    Args:
        ranks: Number of ranks.
        begun: Set as soon as a run or step begins.
    """

    def __init__(self, ranks: int, begun: threading.Event) -> None:
        self._ranks = ranks
        self._begun = begun

    def start(self) -> None:
        """Starts the thread. Does not wait."""
        threading.Thread(target=self._watch, name="jaxcross-start", daemon=True).start()

    def _watch(self) -> None:
        start_s = time.monotonic()
        next_s = FIRST_NOTICE_S
        while not self._begun.wait(start_s + next_s - time.monotonic()):
            self.notify(next_s)
            next_s *= 2

    def notify(self, since_s: float) -> None:
        """Prints a notice."""
        ranks = f"{self._ranks} ranks have" if self._ranks > 1 else "1 rank has"
        with suppress(OSError, ValueError, AttributeError):
            # A closed stderr must not stop the training.
            print(
                f"[jaxcross] {ranks} joined; no job has begun, {since_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
