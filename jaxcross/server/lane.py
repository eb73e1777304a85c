"""The parameter server's thread on a rank.

The thread serves the rank's part of the parameters, and also sends and receives the messages of the
rank's worker. A separate thread is needed because the server has to answer other ranks while its
own worker computes. And since a mailbox may only be used from a single thread, the worker passes
commands to this thread (the lane) and waits for its answers.

**Waiting for messages.** The thread polls the mailbox, and as long as nothing happens, it doubles
the pause between polls, up to a limit. We can't use MPI's own wait, because it would keep a core
busy that the worker's computation needs. While one of our own messages is still being sent, the
pause stays short, because MPI only makes progress when polled.

**When to take a step.** A server could take an optimizer step for each gradient as soon as it
arrives. We rejected this because, with momentum or Adam, the result would differ from synchronous
training even if no rank ever gets ahead of the others. Instead, a server collects gradients until
some worker may continue, and then takes a single step on all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxcross.errors import ExchangeError
from jaxcross.runtime import Stopped, describe
from jaxcross.server.clocks import Clocks
from jaxcross.server.served_part import ServedPart
from jaxcross.world import Mailbox, ask_for_short_slices

_PUSH, _PARAMS, _FINISHED, _FAILED, _STOPPED = range(1, 6)
# Initial and maximum pause between two polls of the mailbox, in seconds. We poll because MPI's own
# wait would keep a core busy for as long as the workers compute.
_FIRST_POLL_S = 1e-4
_LONGEST_POLL_S = 2e-3


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why no rank can continue.

    Attributes:
        text: The reason, worded identically on all ranks.
        stopped: Whether a user requested the stop.
    """

    text: str
    stopped: bool = False


class Lane:
    """Serves a rank's part and handles its worker's messages, in its own thread.

    No other thread uses the mailbox.

    The lane collects the gradients that workers push until at least one worker may continue. It
    then applies them all in a single optimizer step and sends the new parameters to the workers
    that may continue. With a staleness of 0, nobody may continue until everybody has pushed, so the
    lane steps on the mean of all gradients.

    **Shutdown.** The lane must not close its mailbox while a message to or from its rank is still
    in flight. We rely on messages from the same rank arriving in the order they were sent, which
    means that nothing can follow a rank's last message. Once all workers have finished, each server
    answers with the final parameters, and that's its last message.

    If a worker or a server fails, its last message is a failure report. Any lane that receives such
    a report passes it on to all ranks as its own last message, and keeps reading until it has
    received the last message of every rank.

    Args:
        mailbox: A mailbox that nobody else uses.
        clocks: Fresh clocks.
        part: What this rank serves.
        name: Name of the thread, without the `jaxcross-server-` prefix.
    """

    def __init__(self, mailbox: Mailbox, clocks: Clocks, part: ServedPart, name: str) -> None:
        self._mailbox = mailbox
        self._clocks = clocks
        self._part = part
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        self._changed = threading.Condition()
        self._arrived: dict[int, np.ndarray] = {}
        self._answers: dict[int, np.ndarray] = {}
        self._finishing = False
        self._final: set[int] = set()  # ranks whose last answer has arrived
        self._failed_ranks: set[int] = set()  # ranks whose failure report has arrived
        self._failure: Failure | None = None
        self._cause: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"jaxcross-server-{name}", daemon=True
        )
        self._thread.start()

    # Called from the worker's thread.

    @property
    def clocks(self) -> tuple[float, ...]:
        return self._clocks.now

    def push(self, parts: Sequence[np.ndarray]) -> None:
        """Starts sending a gradient, one part to each server. Does not wait."""
        self._command(partial(self._send_all, _PUSH, parts))

    def finish(self) -> None:
        """Notifies all servers that this worker won't push any more gradients. Does not wait."""
        self._finishing = True
        self._command(
            partial(self._send_all, _FINISHED, [np.empty(0, np.uint8)] * self._mailbox.size)
        )

    def give_up(self, text: str, *, stopped: bool) -> None:
        """Notifies all ranks that no rank can continue. Does not wait."""
        self._command(partial(self._fail, Failure(text, stopped)))

    def wait(self) -> list[np.ndarray] | None:
        """Waits for all servers to send their parts of the parameters, and returns these parts.

        Call this after a push or after `finish`. In the latter case, the parameters only arrive
        once all other workers have finished as well. Until then, `wait` returns None whenever
        another worker makes progress, and you have to call it again. We return in between because
        the watchdog limits the duration of each call; that way, it doesn't give up on workers that
        are still making progress.

        Raises:
            ExchangeError: Some rank failed.
            Stopped: A user asked all jobs to stop.
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
            f"The parameter server cannot continue: {self._failure.text}. Every rank leaves its "
            "`with` block. Fix that error, and run again."
        ) from self._cause

    def waiting_for(self) -> dict[int, str]:
        """Returns which other ranks this rank's worker is waiting for, and why."""
        rank = self._mailbox.rank
        now = self._clocks.now
        behind = self._clocks.behind(rank)
        if behind:
            return {r: f"its worker is at step {now[r]}" for r in behind}
        missing = (r for r in range(self._mailbox.size) if r not in self._answers and r != rank)
        return dict.fromkeys(missing, "its server has not answered")

    def join(self) -> None:
        """Waits until no message is in flight between this rank and any other."""
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wakeup.set()

    def _complete(self) -> bool:
        return len(self._answers) == self._mailbox.size

    # Called from the lane's own thread.

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
            # MPI itself has failed, so we can't notify the other ranks. They keep waiting until the
            # watchdog terminates them.
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
            # While one of our messages is still being sent, keep the pause between polls short,
            # because MPI only makes progress when polled.
            again = moved or not sent
            poll_s = _FIRST_POLL_S if again else min(2 * poll_s, _LONGEST_POLL_S)
            if not moved:
                self._wakeup.wait(poll_s)
            # Other threads add a command first and set the event afterwards, so we clear the event
            # first and look for commands afterwards. That way, a command that's added in between is
            # either found right away or cuts the next wait short, and none gets lost.
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
            # Once our worker has finished, each server only sends us one more message: the final
            # parameters, when all other workers have finished, too. So this is the last message
            # from that server.
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
        # Workers can be released even if no new gradient has arrived, e.g. because another worker
        # has finished. They then get the current parameters.
        if self._arrived:
            arrived = self._arrived
            self._arrived = {}
            self._part.apply(arrived)
        for rank in free:
            self._mailbox.send(rank, _PARAMS, self._part.message())

    def _fail(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        # Send the failure report before setting `_failure`. Once that's set, we don't send anything
        # else, so the report is guaranteed to be this rank's last message.
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
