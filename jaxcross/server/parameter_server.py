"""`ParameterServer`: each rank serves part of the parameters; workers don't run in lockstep.

Use a parameter server if some ranks are slower than others. That way, the faster ranks don't have
to wait for a straggler on every step. If all ranks are equally fast, a gradient exchange is faster.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from jaxcross._pytree import PyTree
from jaxcross.errors import ExchangeError, JobError
from jaxcross.health import RankStatus
from jaxcross.jobs import JobEngine, current_engine
from jaxcross.program import signature_mismatch
from jaxcross.runtime import Stopped, describe
from jaxcross.server.clocks import Clocks
from jaxcross.server.lane import Lane
from jaxcross.server.message_layout import MessageLayout
from jaxcross.server.served_part import ServedPart
from jaxcross.world import Mailbox, World, current_world

Params = TypeVar("Params")


class ParameterServer(Generic[Params]):
    """Trains asynchronously or stale-synchronously: push a gradient, pull the current parameters.

    Each rank has two roles. As a worker, it runs your training loop in the thread that enters the
    `with` block. As a server, it owns 1/P of every parameter, and applies gradients to that part in
    a separate thread, with its own communicator.

    A worker's clock counts the gradients it has pushed. A worker at clock `c` waits until the
    slowest worker has reached `c - staleness`, so a slow rank only holds up the others once they're
    more than `staleness` gradients ahead of it.

    Whenever some worker may continue, a server takes a single optimizer step on the sum of all
    gradients that have arrived, divided by P. As with `exchange.sharded_optimizer`, the optimizer
    must work element by element.

    Each gradient counts exactly once. The parameters that a worker pulls always include its own
    gradients, along with all gradients from other workers that are at least `staleness` clocks
    older.

    With `staleness=0`, this is synchronous training up to rounding, and it's bitwise reproducible
    as long as all workers take the same number of steps. With any other value, it's not
    deterministic: what a worker pulls depends on timing, and differs between ranks until the end of
    the `with` block.

    To study the effects of staleness, use `exchange.bounded_stale` and `exchange.asynchronous`
    instead. These delay gradients according to a schedule, which makes their runs repeatable.

    You can also use a parameter server inside a job of a `Runner`. Each call to `push_pull` then
    counts as a step of the job, and other jobs can compute while it's waiting for the exchange.
    Compute your gradients with plain `jax.jit`, and iterate over your own data rather than over
    `job.batches`, which raises an error if ranks are at different batches.

    Example:
        >>> with jaxcross.ParameterServer(params, optax.sgd(0.1), staleness=2) as server:
        ...     params = server.params
        ...     for batch in data:
        ...         gradients = gradient(params, batch)  # this rank's own, without a mean
        ...         params = server.push_pull(gradients)
        >>> params = server.params  # the same on every rank

    Args:
        params: Pytree of floating-point arrays, identical on all ranks. Copied.
        optimizer: Must be the same on every rank. Its state is kept by the servers. Adaptive
            optimizers such as Adam take a full-sized step for each arrival, so the further the
            ranks drift apart in time, the lower the learning rate has to be.
        staleness: How many clocks a worker may be ahead of the slowest worker: 0, 1, ..., or
            `math.inf` for asynchronous training.
        world: From `jaxcross.initialize()`. Defaults to the world that was initialized.

    Attributes:
        params: The most recently pulled parameters, placed like those you passed in. After the
            `with` block, they include all gradients of all ranks and are bitwise identical on every
            rank.
        clock: Number of gradients this rank has pushed.

    Raises:
        ValueError: `staleness` is neither a non-negative whole number nor infinite, or the
            optimizer does not work element by element.
        TypeError: A parameter is not a floating-point array.

    Bytes received per rank and step: `(P-1)/P D` elements of gradients and just as many of
    parameters, each in its own type, where D is the number of elements after padding each leaf to a
    multiple of P. Within a message, each leaf's part is also padded to 64 bytes.

    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NIPS 2013, section 2 (the waiting rule); Li et al., Scaling distributed machine learning
    with the parameter server, OSDI 2014, section 3 (servers that each own a part of the
    parameters); Langer et al., arXiv 2007.03970, sections 3.3.3 and 3.3.4.
    """

    def __init__(
        self,
        params: Params,
        optimizer: optax.GradientTransformation,
        *,
        staleness: float,
        world: World | None = None,
    ) -> None:
        counts = not isinstance(staleness, bool) and staleness >= 0
        if not (counts and (staleness == math.inf or staleness == int(staleness))):
            raise ValueError(
                "`staleness` of a parameter server must be a whole number of steps, 0, 1, ..., or "
                f"`math.inf`, got {staleness!r:.60}."
            )
        self._world = world if world is not None else current_world()
        size = self._world.size
        self._layout = MessageLayout(params, size)
        self._shardings = [_committed_sharding(leaf) for leaf in jax.tree.leaves(params)]
        self.params: Params = self._placed([np.array(leaf) for leaf in jax.tree.leaves(params)])
        self.clock = 0
        self._staleness = staleness
        own = self._layout.parts(jax.tree.leaves(self.params))[self._world.rank]
        self._part = ServedPart(optimizer, self._layout, own, ranks=size)
        self._lane: Lane | None = None
        self._job: JobEngine | None = None
        self._thread: int | None = None  # the worker's, inside the `with` block
        self._pulled_ns = 0

    @property
    def deterministic(self) -> bool:
        """Whether runs are bitwise reproducible if all workers take the same number of steps."""
        return self._staleness == 0

    @property
    def clocks(self) -> tuple[float, ...]:
        """Every worker's clock as known to this server; infinite once the worker has finished."""
        return (0,) * self._world.size if self._lane is None else self._lane.clocks

    def __enter__(self) -> Self:
        """Waits for all ranks, and checks that their `staleness` and parameter values match.

        Raises:
            ExchangeError: They don't match. Raised on every rank.
            JobError: This server was entered before, or a run is in progress and this thread
                doesn't belong to any of its jobs.
        """
        if self._lane is not None:
            raise JobError(
                "This parameter server was used before, and can only be entered once. Create a new "
                "one, and pass it `server.params` to continue from these parameters."
            )
        self._job = current_engine()
        if self._job is not None:
            self._job.replicas.serve()
        mailbox = self._open_together(lambda _: self._open())
        name = "alone" if self._job is None else self._job.name
        self._lane = Lane(mailbox, Clocks(self._world.size, self._staleness), self._part, name)
        self._thread = threading.get_ident()
        self._pulled_ns = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keeps serving until the workers of all ranks have finished.

        If the block raised an exception, this ends the workers of all ranks right away instead.

        Raises:
            ExchangeError: Another rank failed before all workers had finished.
        """
        lane = self._lane
        self._thread = None
        assert lane is not None
        try:
            if error is None:
                lane.finish()
                while (params := self._wait(lane, "end of all workers")) is None:
                    pass
                self.params = params
            else:
                text = (
                    f"the worker of rank {self._world.rank} failed after step {self.clock}: "
                    f"{describe(error)}"
                )
                lane.give_up(text, stopped=isinstance(error, Stopped))
        finally:
            with self._monitor(lane, "end of the parameter server"):
                lane.join()

    def push_pull(self, grads: Params) -> Params:
        """Pushes this rank's gradient, and waits for parameters that include it.

        Waits until the gradient has been computed and all servers have answered. If this rank is
        more than `staleness` clocks ahead of the slowest worker, the servers don't answer until
        that worker has caught up.

        Args:
            grads: Gradients with the parameters' structure, shapes and element types.

        Raises:
            ValueError: `grads` don't match the parameters.
            ExchangeError: A worker or server failed on any rank. Raised on every rank.
            JobError: Called outside the `with` block, or from another thread.
        """
        lane = self._lane
        job = self._job
        if lane is None or self._thread != threading.get_ident():
            where = (
                "outside its `with` block"
                if self._thread is None
                else f"from thread `{threading.current_thread().name}`, which did not enter it"
            )
            raise JobError(
                f"`push_pull` of a parameter server was called {where}. Call it inside the `with` "
                "block, in the thread that entered the block."
            )
        leaves = self._layout.leaves(grads)
        if job is not None and job.stopping:
            raise Stopped
        parts = self._layout.parts(jax.block_until_ready(leaves))
        pushed_ns = time.monotonic_ns()
        start_ns = self._pulled_ns
        self.clock += 1
        lane.push(parts)
        self.params = self._wait(lane, "parameter server")
        self._pulled_ns = time.monotonic_ns()
        if job is not None:
            nbytes = 2 * (self._world.size - 1) * self._layout.nbytes
            job.served(
                start_ns=start_ns, pushed_ns=pushed_ns, end_ns=self._pulled_ns, nbytes=nbytes
            )
        return self.params

    def _open_together(self, work: Callable[[Any], Mailbox]) -> Mailbox:
        """Runs `work` on all ranks together, after checking that their `staleness` matches."""
        world = self._world
        text = f"staleness {self._staleness}"
        if self._job is not None:
            return self._job.run_on_all_ranks(f"parameter server\n{text}", work)
        world.exchange_owner.check_not_stray("ParameterServer")
        with world.exchange_owner.step("ParameterServer"):
            with world.monitor(job="", step=0, segment=-1, what="start of a parameter server"):
                texts = world.control.allgather_text(text)
            if any(other != text for other in texts):
                raise ExchangeError(signature_mismatch("parameter server", texts))
            return work(world.control)

    def _open(self) -> Mailbox:
        self._world.broadcast_or_check(self.params)
        return self._world.mailbox()

    def _wait(self, lane: Lane, what: str) -> PyTree:
        with self._monitor(lane, what):
            messages = lane.wait()
        return None if messages is None else self._placed(self._layout.join(messages))

    def _monitor(self, lane: Lane, what: str) -> Any:
        job = "" if self._job is None else self._job.name

        def waiting_for(answers: Mapping[int, RankStatus | None]) -> dict[int, str]:
            # Inside a job, a worker may be busy with something else for a while, e.g. evaluating
            # its model in `job.measure`. The other workers have to wait for it, but the watchdog
            # shouldn't treat that as an error, so we leave out such ranks.
            patient = {
                rank for rank, s in answers.items() if job and s is not None and s.may_be_late(job)
            }
            return {rank: why for rank, why in lane.waiting_for().items() if rank not in patient}

        return self._world.monitor(
            job=job, step=self.clock, segment=-1, what=what, waiting_for=waiting_for
        )

    def _placed(self, leaves: Sequence[np.ndarray]) -> PyTree:
        """Returns a tree of JAX arrays placed like the parameters.

        The arrays may take over the memory of `leaves`, so don't use these for anything else.
        """
        arrays = [
            jnp.asarray(x) if place is None else jax.device_put(x, place)
            for x, place in zip(leaves, self._shardings, strict=True)
        ]
        return jax.tree.unflatten(self._layout.treedef, arrays)


def _committed_sharding(leaf: jax.typing.ArrayLike) -> Sharding | None:
    """Returns an array's sharding if it was chosen explicitly, or None if JAX chose it."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
