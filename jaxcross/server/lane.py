"""The thread of a parameter server on one rank: it serves the rank's part and carries the messages
of its worker.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxcross.errors import ExchangeError
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.job_record import Stopped
from jaxcross.server.clocks import Clocks
from jaxcross.server.shard import Shard
from jaxcross.world.mailbox import Mailbox
from jaxcross.world.sched_slice import ask_for_short_slices

_PUSH, _PARAMS, _FINISHED, _FAILED, _STOPPED = range(1, 6)
# Seconds between two polls of the mailbox. MPI's own wait would keep a core busy for as long as the
# workers compute.
_FIRST_POLL_S = 1e-4
_LONGEST_POLL_S = 2e-3


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why no rank can go on, the same text on all ranks. `stopped`: a person asked for
    it.
    """

    text: str
    stopped: bool = False


class Lane:
    """Server of one rank's part, and carrier of its worker's messages. Its mailbox is used by its
    own thread alone.

    The lane applies the gradients that have arrived, in one step of the optimizer, when a worker
    may go on. While no worker may, gradients are kept: with staleness 0 until those of all workers
    are there, so that one step is made on their mean.

    The lane ends in one of two ways, and no message is under way then, since messages of one rank
    arrive in the order in which they were sent. Either all workers finish: the answer to that is
    each server's last message. Or a worker or server fails: it reports this in its last message;
    every lane that receives it sends it to all ranks as its own last message, and reads on until it
    has the last message of every rank.

    Args:
        mailbox: Mailbox of this lane alone.
        clocks: New clocks.
        shard: Part that this rank serves.
        name: Name of the thread.
    """

    def __init__(self, mailbox: Mailbox, clocks: Clocks, shard: Shard, name: str) -> None:
        self._mailbox = mailbox
        self._clocks = clocks
        self._shard = shard
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        self._changed = threading.Condition()
        self._arrived: dict[int, np.ndarray] = {}
        self._answers: dict[int, np.ndarray] = {}
        self._finishing = False
        self._final: set[int] = set()  # ranks whose answer to the end of all workers has arrived
        self._failed_ranks: set[int] = (
            set()
        )  # ranks whose last message, that they cannot go on, has arrived
        self._failure: Failure | None = None
        self._cause: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"jaxcross-server-{name}", daemon=True
        )
        self._thread.start()

    # For the worker's thread.

    @property
    def clocks(self) -> tuple[float, ...]:
        return self._clocks.now

    def push(self, parts: Sequence[np.ndarray]) -> None:
        """Begins to send a gradient, a part for each server. Does not wait."""
        self._command(partial(self._send_all, _PUSH, parts))

    def finish(self) -> None:
        """Notifies all servers that this worker pushes no more. Does not wait."""
        self._finishing = True
        self._command(
            partial(self._send_all, _FINISHED, [np.empty(0, np.uint8)] * self._mailbox.size)
        )

    def give_up(self, text: str, *, stopped: bool) -> None:
        """Notifies all ranks that none can go on. Does not wait."""
        self._command(partial(self._fail, Failure(text, stopped)))

    def wait(self) -> list[np.ndarray] | None:
        """Waits for every server's part of the parameters, after a push or at the end, and returns
        them.

        None: this worker has finished, and others are still at work; ask again.

        Raises:
            ExchangeError: Some rank failed.
            Stopped: A person asked all jobs to stop.
        """
        seen = self._clocks.now
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._complete()
                    or self._failure
                    or (self._finishing and self._clocks.now != seen)
                )
            )
            if self._complete():
                answers = self._answers
                self._answers = {}
                return [answers[rank] for rank in range(self._mailbox.size)]
        if self._failure is None:
            return None
        if self._failure.stopped:
            raise Stopped
        raise ExchangeError(
            f"The parameter server cannot go on: {self._failure.text}. Every rank leaves it."
        ) from self._cause

    def waiting_for(self) -> dict[int, str]:
        """Returns the other ranks that this rank's worker waits for, and why."""
        rank = self._mailbox.rank
        now = self._clocks.now
        behind = self._clocks.behind(rank)
        if behind:
            return {r: f"its worker is at step {now[r]}" for r in behind}
        missing = (r for r in range(self._mailbox.size) if r not in self._answers and r != rank)
        return dict.fromkeys(missing, "its server has not answered")

    def join(self) -> None:
        """Waits until nothing is under way between this rank and any other."""
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wakeup.set()

    def _complete(self) -> bool:
        return len(self._answers) == self._mailbox.size

    # The lane's own thread.

    def _run(self) -> None:
        ask_for_short_slices()
        try:
            try:
                self._serve()
            except Exception as error:
                self._cause = error
                self._fail(
                    Failure(f"the server of rank {self._mailbox.rank} failed: {describe(error)}")
                )
                self._serve()
        except BaseException as error:
            # MPI itself failed: this rank cannot notify the others, which wait until the watchdog
            # ends them.
            self._cause = error
            self._failure = Failure(f"rank {self._mailbox.rank} cannot send: {describe(error)}")
            self._notify()

    def _serve(self) -> None:
        poll_s = _FIRST_POLL_S
        while True:
            moved = self._run_commands() + self._read()
            self._answer()
            if moved:
                self._notify()
            sent = self._mailbox.sent()
            if (
                sent
                and len(self._final if self._failure is None else self._failed_ranks)
                == self._mailbox.size
            ):
                break
            # MPI moves a message that is not sent yet only while it is polled.
            again = moved or not sent
            poll_s = _FIRST_POLL_S if again else min(2 * poll_s, _LONGEST_POLL_S)
            if not moved:
                self._wakeup.wait(poll_s)
            self._wakeup.clear()
        self._mailbox.close()

    def _run_commands(self) -> int:
        count = 0
        while self._commands:
            self._commands.popleft()()
            count += 1
        return count

    def _read(self) -> int:
        count = 0
        while (received := self._mailbox.receive()) is not None:
            self._take(*received)
            count += 1
        return count

    def _take(self, sender: int, tag: int, message: np.ndarray) -> None:
        if tag == _PUSH:
            self._arrived[sender] = message
            self._clocks.push(sender)
        elif tag == _FINISHED:
            self._clocks.finish(sender)
        elif tag == _PARAMS:
            self._answers[sender] = message
            if self._finishing:
                self._final.add(sender)
        else:
            self._failed_ranks.add(sender)
            self._fail(Failure(bytes(message).decode(), stopped=tag == _STOPPED))

    def _answer(self) -> None:
        if self._failure is not None:
            return
        free = self._clocks.release()
        if not free:
            return
        if self._arrived:
            arrived = self._arrived
            self._arrived = {}
            self._shard.apply(arrived)
        for rank in free:
            self._mailbox.send(rank, _PARAMS, self._shard.message())

    def _fail(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        text = np.frombuffer(failure.text.encode(), np.uint8)
        self._send_all(_STOPPED if failure.stopped else _FAILED, [text] * self._mailbox.size)
        self._failure = failure

    def _send_all(self, tag: int, messages: Sequence[np.ndarray]) -> None:
        if self._failure is None:
            for rank, message in enumerate(messages):
                self._mailbox.send(rank, tag, message)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
