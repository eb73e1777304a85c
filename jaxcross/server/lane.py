"""The parameter server's thread on a rank.

The thread serves the rank's part of the parameters. It also sends and receives the messages of the
rank's worker, for two reasons. The server has to answer other ranks while its own worker computes.
And each mailbox may be used by one thread only, so the worker passes commands to this thread (the
lane) and waits for its answers.

**Waiting for messages.** The thread polls the mailbox. As long as nothing happens, it doubles the
pause between two polls, up to a limit. We don't use MPI's own wait, because that keeps a core busy,
and the worker's computation needs this core. While a message of ours is still being sent, the pause
stays short, because MPI only makes progress while it's polled.

**When a step is taken.** A server could take an optimizer step for each gradient as soon as it
arrives. We rejected this, because with momentum or Adam, the result would differ from synchronous
training even if no rank runs ahead of the others. Instead, a server collects gradients until some
worker may continue, and then takes a single step on all of them.
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
# The thread pauses between two polls of the mailbox, because MPI's own wait would keep a core busy
# for as long as the workers compute. These are the first and the longest pause, in seconds.
_FIRST_POLL_S = 1e-4
_LONGEST_POLL_S = 2e-3


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why no rank can continue.

    Attributes:
        text: The reason, the same text on all ranks.
        stopped: Whether a person requested it.
    """

    text: str
    stopped: bool = False


class Lane:
    """Serves one rank's part and handles its worker's messages, in a thread of its own.

    Only this thread uses the mailbox.

    The lane collects the gradients that the workers push, until at least one worker may continue.
    It then applies all of them in a single optimizer step, and sends the new parameters to the
    workers that may continue. With a staleness of 0, no worker may continue before all of them have
    pushed, so the lane takes one step on the mean of all gradients.

    **Shutdown.** The lane must not close its mailbox while a message to or from its rank is still
    in flight. We rely on the fact that messages from one rank arrive in the order in which they
    were sent, so nothing can follow a rank's last message. If all workers finish, the last message
    of each server is its answer to that.

    If a worker or a server fails, it reports this as its last message. Every lane that receives
    such a report sends it to all ranks as its own last message, and continues to read until it has
    received the last message of every rank.

    Args:
        mailbox: Mailbox of this lane alone.
        clocks: New clocks.
        part: What this rank serves.
        name: Name of the thread, without its prefix `jaxcross-server-`.
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

    # For the worker's thread.

    @property
    def clocks(self) -> tuple[float, ...]:
        return self._clocks.now

    def push(self, parts: Sequence[np.ndarray]) -> None:
        """Starts to send a gradient, one part to each server. Does not wait."""
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
        """Waits for every server's part of the parameters, and returns these parts.

        Call this after a push, or after `finish`. After `finish`, the parameters only arrive once
        all other workers have finished, too. Until then, each call returns None whenever another
        worker has made progress, and you have to call it again. We return in between because the
        watchdog limits the time of each call: this way, it doesn't give up on workers that make
        progress.

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
            f"The parameter server cannot continue: {self._failure.text}. Every rank leaves it."
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
        """Waits until no message is in flight between this rank and any other."""
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
            # MPI itself has failed, so this rank can't notify the others. They keep waiting until
            # the watchdog terminates them.
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
            # If one of our messages hasn't been sent completely, keep the pause between polls
            # short, because MPI only makes progress while it's polled.
            again = moved or not sent
            poll_s = _FIRST_POLL_S if again else min(2 * poll_s, _LONGEST_POLL_S)
            if not moved:
                self._wakeup.wait(poll_s)
            # Other threads first add a command and then set the event. Here, we clear the event
            # first and look for commands afterwards. So if a command is added in between, it's
            # either found or ends the next wait at once, and we can't miss any.
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
            # Once our worker has finished, each server sends us just one more message: the final
            # parameters, when all other workers have finished as well. So this is the last message
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
        # A worker may be released without any new gradient, e.g. because another worker has
        # finished. It then gets the current parameters.
        if self._arrived:
            arrived = self._arrived
            self._arrived = {}
            self._part.apply(arrived)
        for rank in free:
            self._mailbox.send(rank, _PARAMS, self._part.message())

    def _fail(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        # Send the report of the failure first, and set `_failure` afterwards. As soon as that's
        # set, nothing else is sent, which makes the report this rank's last message.
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
