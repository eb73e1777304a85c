"""The thread that writes the checkpoints of all jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxcross.checkpoint.restore import CheckpointerWorld

_LOOK_S = 0.2


class Writer:
    """One thread for all jobs: what it takes of the cores and of the disk, the jobs lose."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "jaxcross-checkpoint")
        self._done = 0  # parts that it is through with: changes while a disk is slow, not while it hangs

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Runs it after what was submitted before."""

        def run() -> None:
            try:
                write()
            finally:
                self._done += 1

        return self._pool.submit(run)

    def wait_for(self, written: Future[None], world: CheckpointerWorld, *, job: str, step: int, lacks: str) -> None:
        """Waits until it is through with that, and raises what writing raised. The watchdog tells of a disk that hangs,
        and of what it `lacks`; while others' parts get written before, it is only slow.
        """
        late = {world.rank: f"its disk has not taken {lacks}"}
        watch = world.watching(job=job, step=step, segment=-1, what="checkpoint", own=True, awaited=lambda _: late)
        with watch:
            done = self._done
            while wait([written], _LOOK_S).not_done:
                if self._done != done:
                    done = self._done
                    watch.renew()
            written.result()

    def close(self) -> None:
        """Ends the thread, after what it has begun. Waits."""
        self._pool.shutdown()
