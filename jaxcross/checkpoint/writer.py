"""The thread that writes the checkpoints of all jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxcross.world import World

_LOOK_S = 0.2


class Writer:
    """One thread for all jobs: cores and disk that it uses are lost to them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "jaxcross-checkpoint")
        self._done = 0  # pieces of work: grows while a disk is slow, not while it hangs

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Runs `write` after everything that was submitted before. Does not wait."""

        def run() -> None:
            try:
                write()
            finally:
                self._done += 1

        return self._pool.submit(run)

    def wait_for(
        self, written: Future[None], world: World, *, job: str, step: int, missing: str
    ) -> None:
        """Waits until `written` is done, and raises what writing raised.

        The watchdog reports a disk that hangs, and what is `missing`. While earlier work gets done,
        it is only slow.
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
        """Ends the thread, once its work is done. Waits."""
        self._pool.shutdown()
