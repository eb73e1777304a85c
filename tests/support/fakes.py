"""Fakes for tests: ranks that are threads, a manual clock, and programs that need no compiler.

Nothing here needs MPI, but the runner, driver and interleaver that run on these fakes are real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np

from jaxcross.errors import ExchangeError
from jaxcross.interleave.simulator import (
    Batch,
    Call,
    Fail,
    Prepare,
    RankResult,
    Simulation,
    Sync,
    Think,
)
from jaxcross.program.ir import Aval, Exchange, Program, Segment
from jaxcross.program.nonfinite import NonFinite, NonFiniteOutcome
from jaxcross.program.verify import verify

__all__ = [
    "Batch",
    "Call",
    "Fail",
    "FakeCompiled",
    "FakeControl",
    "FakeMailbox",
    "FakeWorld",
    "ManualClock",
    "Prepare",
    "RankResult",
    "Simulation",
    "Sync",
    "Think",
    "plain_program",
    "run_ranks",
]


class ManualClock:
    """A clock that only moves when a test moves it."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class _Table:
    """The shared memory through which ranks that are threads exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class FakeControl:
    """`Control` between threads. Also carries a `FakeCompiled`'s exchanges.

    If ranks arrive for different collectives, all of them get an error.
    """

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self.size, self._table = rank, len(table.values), table
        self.votes = 0

    @staticmethod
    def group(size: int) -> list[FakeControl]:
        """One joined control per rank."""
        table = _Table(size)
        return [FakeControl(rank, table) for rank in range(size)]

    def meet(self, what: str, value: Any) -> list[Any]:
        """Returns every rank's value, by rank. Waits for all ranks.

        Raises an error on all ranks if they have called it for different things.
        """
        table = self._table
        table.values[self.rank] = (what, value)
        table.barrier.wait(60)
        met = list(table.values)
        table.barrier.wait(60)
        if len({name for name, _ in met}) > 1:
            raise ExchangeError(f"ranks met for different things: {[name for name, _ in met]}")
        return [v for _, v in met]

    def leave(self) -> None:
        """Raises an error in all ranks that wait for this one."""
        self._table.barrier.abort()

    def allreduce_min(self, values: np.ndarray) -> np.ndarray:
        self.votes += 1
        return np.min(np.stack(self.meet("min", np.array(values))), axis=0)

    def allgather_text(self, text: str) -> list[str]:
        return self.meet("text", text)


class Aborted(BaseException):
    """Raised by a `FakeWorld` that has to abort."""


class FakeMailbox:
    """`jaxcross.world.mailbox.Mailbox` between threads, with all ranks' boxes."""

    def __init__(
        self, rank: int, boxes: Sequence[SimpleQueue[tuple[int, int, np.ndarray]]]
    ) -> None:
        self.rank, self.size, self._boxes = rank, len(boxes), boxes
        self.closed = False

    def send(self, rank: int, tag: int, message: np.ndarray) -> None:
        self._boxes[rank].put((self.rank, tag, message))

    def receive(self) -> tuple[int, int, np.ndarray] | None:
        try:
            return self._boxes[self.rank].get_nowait()
        except Empty:
            return None

    def sent(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class Unwatched(nullcontext[None]):
    """A wait without a watchdog."""

    def renew(self) -> None:
        """A no-op: there's no timeout to restart."""


class FakeWorld:
    """The parts of a world that a runner needs, for one of several ranks that are threads."""

    def __init__(self, control: FakeControl) -> None:
        self.control, self.rank, self.size = control, control.rank, control.size
        self.local_size = self.size
        self.vendor, self.over, self.pool_size, self.estimate_request = "threads", "mpi4jax", 1, ""
        self.watched: list[tuple[str, int, int, str]] = []
        from jaxcross.health import (
            flight_recorder,
            process,
        )  # imported late, because the world needs JAX, and most users of this file don't
        from jaxcross.world.exchange_owner import ExchangeOwner

        self.exchange_owner = ExchangeOwner()
        self.flight = flight_recorder.FlightRecorder(
            [process.this_process()] * self.size, self.rank
        )

    def mailbox(self) -> FakeMailbox:
        """A mailbox between all ranks, separate from all other mailboxes. Waits for all ranks."""
        return FakeMailbox(self.rank, self.control.meet("mailbox", SimpleQueue()))

    def monitor(
        self,
        *,
        job: str,
        step: int,
        segment: int,
        what: str,
        waiting_for: Any = None,
        local: bool = False,
    ) -> Unwatched:
        self.watched.append((job, step, segment, what))
        return Unwatched()

    def abort(self, message: str, *, code: int = 1) -> NoReturn:
        self.control.leave()
        raise Aborted(message)

    def broadcast_or_check(
        self, state: Any, *, mode: str = "check", rank_local: Collection[str] = ()
    ) -> Any:
        import jax

        def own(path: Any) -> bool:
            return jax.tree_util.keystr(path) in rank_local

        by_path = jax.tree_util.tree_map_with_path
        states = self.control.meet(
            "state", by_path(lambda path, leaf: None if own(path) else leaf, state)
        )
        if mode == "check" and any(repr(other) != repr(states[0]) for other in states):
            raise ExchangeError("The state differs between ranks")
        return by_path(lambda path, mine, first: mine if own(path) else first, state, states[0])


def run_ranks(size: int, work: Callable[[FakeWorld], Any]) -> list[Any]:
    """Runs `work(world)` on `size` ranks that are threads. Returns the results, by rank.

    Raises what a rank raised.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def main(world: FakeWorld) -> None:
        try:
            results[world.rank] = work(world)
        except BaseException as error:
            errors[world.rank] = error
            world.control.leave()

    threads = [
        threading.Thread(
            target=main, args=(FakeWorld(control),), name=f"rank-{control.rank}", daemon=True
        )
        for control in FakeControl.group(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if stuck := [thread.name for thread in threads if thread.is_alive()]:
        raise TimeoutError(f"{stuck} did not end")
    # A rank whose barrier broke only waited for the rank that failed, so its error comes last.
    raised = [error for error in errors if error is not None]
    for error in sorted(raised, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results


def plain_program(
    name: str = "step", *, exchanges: int = 1, shape: tuple[int, ...] = ()
) -> Program:
    """compute, exchange, ..., compute: passes a value along, and the step's input to its end.

    With `exchanges=0`, the program is a single compute segment.
    """
    aval = Aval(shape=shape, dtype="float32")
    segments: list[Segment] = []
    value, count = 0, 2  # value 0 is the state, value 1 the batch
    for n in range(exchanges):
        reads = (0, 1) if n == 0 else (value,)
        segments.append(
            Segment(
                index=len(segments),
                kind="compute",
                inputs=reads,
                outputs=(count,),
                last_uses=() if n == 0 else (value,),
            )
        )
        exchange = Exchange(op="psum", axes=("batch",), dtype="float32", shape=shape)
        segments.append(
            Segment(
                index=len(segments),
                kind="collective",
                inputs=(count,),
                outputs=(count + 1,),
                last_uses=(count,),
                exchanges=(exchange,),
            )
        )
        value, count = count + 1, count + 2
    reads = (0, value) if exchanges else (0, 1)
    last_uses = (value,) if exchanges else ()
    segments.append(
        Segment(
            index=len(segments), kind="compute", inputs=reads, outputs=(count,), last_uses=last_uses
        )
    )
    return verify(
        Program(
            name=name,
            axes=(("batch", 1),),
            values=(aval,) * (count + 1),
            inputs=(0, 1),
            outputs=(count,),
            segments=tuple(segments),
        )
    )


def carried_program(name: str) -> Program:
    """compute, an exchange of the batch, compute: the exchange depends on no compute segment."""
    plain = plain_program(name)
    compute, exchange, update = plain.segments
    exchange = replace(exchange, inputs=(1,), last_uses=())
    update = replace(update, inputs=(0, 2, 3), last_uses=(2, 3))
    return verify(replace(plain, segments=(compute, exchange, update)))


class FakeCompiled:
    """Runs a program whose compute segments are calls of a Python function.

    Exchanges are sums over a `FakeWorld`'s ranks.

    Args:
        program: The program to run.
        world: This rank.
        compute: Called with (segment, inputs). Returns the segment's only output, or raises.
    """

    def __init__(
        self, program: Program, world: FakeWorld, compute: Callable[[int, Sequence[Any]], Any]
    ) -> None:
        self.program, self.world, self.compute = program, world, compute

    def execution(self, inputs: Sequence[Any]) -> FakeExecution:
        return FakeExecution(self, inputs)

    def peak_live_bytes(self) -> int:
        return sum(value.nbytes for value in self.program.values)

    def boundary_live_bytes(self) -> int:
        return self.peak_live_bytes()

    def exchange_temporary_bytes(self) -> int:
        return 0

    def lasting_inputs(self, inputs: Sequence[Any]) -> list[tuple[Any, int]]:
        return []


class FakeExecution:
    """One step of a `FakeCompiled` in flight."""

    def __init__(self, compiled: FakeCompiled, inputs: Sequence[Any]) -> None:
        self._compiled = compiled
        self._env: dict[int, Any] = dict(zip(compiled.program.inputs, inputs, strict=True))
        self._policy: NonFinite = "ignore"

    def run(self, index: int) -> None:
        segment = self._compiled.program.segments[index]
        values = [self._env[v] for v in segment.inputs]
        if segment.kind == "compute":
            result = self._compiled.compute(index, values)
        else:
            result = sum(
                self._compiled.world.control.meet(
                    f"{self._compiled.program.name} {index}", values[0]
                )
            )
        for v in segment.last_uses:
            del self._env[v]
        (out,) = segment.outputs
        self._env[out] = result

    def wait_inputs(self, index: int) -> None:
        """A no-op, because `run` computes at once."""

    def wait_outputs(self, index: int) -> None:
        """A no-op, because `run` computes at once."""

    def watch(self, policy: NonFinite) -> FakeExecution:
        self._policy = policy
        return self

    def check_finite(self, index: int) -> NonFiniteOutcome | None:
        segment = self._compiled.program.segments[index]
        if self._policy == "ignore" or np.isfinite(self._env[segment.outputs[0]]).all():
            return None
        what = f"`{segment.exchanges[0].line()}` made values that are not finite"
        return NonFiniteOutcome.by_policy(self._policy, what, skippable=self.skippable)

    def branch_mismatch(self, index: int) -> str | None:
        """Always None, because these programs have no conditionals."""

    @property
    def skippable(self) -> bool:
        return True

    def skip(self) -> None:
        """Makes the step return its first input."""
        state = self._env[self._compiled.program.inputs[0]]
        self.outputs = lambda: state

    def zero_inputs(self, index: int) -> None:
        for v in self._compiled.program.segments[index].inputs:
            self._env[v] = 0.0

    def outputs(self) -> Any:
        values = tuple(self._env[v] for v in self._compiled.program.outputs)
        return values[0] if len(values) == 1 else values
