"""The thread that writes the checkpoints of all jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxcross.world import World

_LOOK_S = 0.2


class Writer:
    """One thread for all jobs, because the cores and the disk that it uses are lost to the jobs."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "jaxcross-checkpoint")
        self._done = 0  # amount of work finished; grows on a slow disk, but not on one that hangs

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Runs `write` after everything submitted before. Doesn't wait."""

        def run() -> None:
            try:
                write()
            finally:
                self._done += 1

        return self._pool.submit(run)

    def wait_for(
        self, written: Future[None], world: World, *, job: str, step: int, missing: str
    ) -> None:
        """Waits until `written` is done, and raises any error from it.

        If the disk hangs, the watchdog reports what is `missing`. As long as earlier work still
        gets done, the disk is merely slow, so the watchdog's timer restarts.
        """
        late = {world.rank: f"its disk has not taken {missing}"}
        watch = world.monitor(
            job=job,
            step=step,
            segment=-1,
            what="checkpoint",
            local=True,
            waiting_for=lambda _: late,
        )
        with watch:
            done = self._done
            while wait([written], _LOOK_S).not_done:
                if self._done != done:
                    done = self._done
                    watch.renew()
            written.result()

    def close(self) -> None:
        """Ends the thread once its work is done. Waits."""
        self._pool.shutdown()
