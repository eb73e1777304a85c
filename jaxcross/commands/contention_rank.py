"""One rank of `jaxcross contention`: times a computation and an exchange, alone and together.

`jaxcross contention` runs `python -m jaxcross.commands.contention_rank SECONDS FILE` on each rank.
Rank 0 writes the file.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from jaxcross.errors import ExchangeError
from jaxcross.world import World, gather

ROUNDS = 5
# We split the requested seconds into this many windows: 3 or 4 per round, plus the warm-up.
_PARTS = 20
_MB = 2**20
_MOST_MB = 100
_SIDES = (4, 32)  # side of the smallest and of the largest image, in pixels
_LEAST_STEPS = (
    4  # computation steps alongside exchanges; the last outlasts them, so it doesn't count
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """Times measured in one round, in seconds on the slowest rank.

    Attributes:
        compute_s: A compute step with nothing else running.
        exchange_s: An exchange with nothing else running.
        compute_beside_s: A compute step while exchanges run.
        exchange_beside_s: An exchange while the ranks compute.
    """

    compute_s: float
    exchange_s: float
    compute_beside_s: float
    exchange_beside_s: float


@final
class Measurement:
    """Measures how much compute steps and exchanges slow each other down.

    All ranks must construct this object and call `round` together. Each of these calls waits for
    all ranks.

    Args:
        world: All ranks.
        window_s: Approximate duration of each part of a round, in seconds. We size the computation
            and the exchange to fit into it.
        training: A step that exchanges nothing, and its state. Defaults to that of a small network,
            whose size also depends on the window.
    """

    def __init__(
        self,
        world: World,
        window_s: float,
        training: tuple[Callable[[Any], Any], Any] | None = None,
    ) -> None:
        self._world = world
        self._window_s = window_s
        if training is None:
            least_s = self._time_compute(_training_step(world.rank, _SIDES[0]))
            training = _training_step(world.rank, image_side(window_s, least_s))
        self._compute_s = self._time_compute(training)
        self._exchange_of(1)
        one_mb_s = self._slowest(_seconds(self._exchange, 2))
        self.megabytes = max(1, min(_MOST_MB, int(window_s / 4 / one_mb_s)))
        self._exchange_of(self.megabytes)
        self._exchange_s = self._slowest(_seconds(self._exchange, 1))
        self.exchanges = max(
            3, math.ceil(max(window_s, _LEAST_STEPS * self._compute_s) / self._exchange_s)
        )

    def round(self) -> MeasuredRound:
        """Runs one round and returns its times, which are identical across ranks."""
        self._meet()
        compute_s = self._compute(max(2, math.ceil(self._window_s / self._compute_s)))
        self._meet()
        exchange_s = self._start_exchanges().result()
        self._meet()
        exchanging = self._start_exchanges()
        took = [self._compute(1)]
        while not exchanging.done():
            took.append(self._compute(1))
        kept = took[:-1] or took
        own = (compute_s, exchange_s, math.fsum(kept) / len(kept), exchanging.result())
        slowest = [max(times) for times in zip(*gather(self._world.control, own), strict=True)]
        return MeasuredRound(**dict(zip(MeasuredRound.__dataclass_fields__, slowest, strict=True)))

    def _time_compute(self, training: tuple[Callable[[Any], Any], Any]) -> float:
        """Sets up a computation. Returns its seconds per step on the slowest rank."""
        self._step, self._state = training
        return self._slowest(_seconds(lambda: self._compute(1), 4))

    def _compute(self, steps: int) -> float:
        """Runs `steps` steps and returns the mean seconds per step."""
        import jax

        begin_s = time.perf_counter()
        for _ in range(steps):
            self._state = jax.block_until_ready(self._step(self._state))
        return (time.perf_counter() - begin_s) / steps

    def _start_exchanges(self) -> Future[float]:
        """Kicks off a window's worth of exchanges. The future returns the seconds per exchange.

        As in a real run, they get their own thread, which leaves the calling thread free to compute
        in the meantime.
        """

        def make() -> float:
            begin_s = time.perf_counter()
            for _ in range(self.exchanges):
                self._exchange()
            return (time.perf_counter() - begin_s) / self.exchanges

        return self._world.exchanger.submit(make)

    def _exchange_of(self, megabytes: int) -> None:
        """Sets up an exchange of this size and runs it once, to get its memory allocated.

        We put the operand (the array to exchange) on the host's CPU device even if the machine has
        an accelerator, since exchanges go through host memory in a real run as well.
        """
        import jax
        from jax import lax

        axes = {"batch": self._world.size}
        host = jax.local_devices(backend="cpu")[0]
        operand = jax.block_until_ready(
            jax.device_put(np.ones(megabytes * _MB // 4, np.float32), host)
        )
        jaxpr = jax.make_jaxpr(lambda x: [lax.psum(x, "batch")], axis_env=list(axes.items()))(
            operand
        )
        lowered = self._world.wire().lower(jaxpr, axes)
        compiled = lowered.compile([operand], name="exchange", host=host, place=None)

        def exchange() -> None:
            with self._world.monitor(
                job="", step=0, segment=-1, what="an exchange that is measured"
            ):
                jax.block_until_ready(compiled(operand))

        self._exchange: Callable[[], None] = exchange
        self._meet()
        exchange()

    def _meet(self) -> None:
        with self._world.monitor(
            job="", step=0, segment=-1, what="the begin of a part of the measurement"
        ):
            self._world.control.allgather_text("")

    def _slowest(self, seconds: float) -> float:
        return max(gather(self._world.control, seconds))


def image_side(window_s: float, least_s: float) -> int:
    """Returns an image size at which about four steps fit into a window.

    A window is one part of the measurement. At the default length there's usually enough time for
    the largest images, but a very slow machine or a short measurement calls for smaller ones,
    because each window has to fit several steps.

    Args:
        window_s: Duration of a window, in seconds.
        least_s: Seconds per step with the smallest images. We assume that step time is proportional
            to image area.
    """
    least, most = _SIDES
    return max(least, min(most, int(least * math.sqrt(window_s / 4 / least_s))))


def _training_step(seed: int, side: int) -> tuple[Callable[[Any], Any], Any]:
    """Returns a compiled training step for a small convolutional network, and its initial state.

    The step doesn't exchange anything.
    """
    import jax
    from jax import lax

    images = jax.random.normal(jax.random.key(seed), (4, side, side, 64))
    kernels = [0.05 * jax.random.normal(jax.random.key(n), (3, 3, 64, 64)) for n in range(3)]

    def loss(kernels: Any) -> jax.Array:
        x = images
        for kernel in kernels:
            x = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return (x**2).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(kernels: Any) -> Any:
        return jax.tree.map(lambda k, g: k - 1e-3 * g, kernels, jax.grad(loss)(kernels))

    return step, step(kernels)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Makes `repeats` calls and returns the duration of the fastest."""
    found = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin_s)
    return min(found)


def main(seconds: float, file: Path) -> None:
    """Runs the measurement. Rank 0 prints progress and writes the result.

    Raises:
        ExchangeError: There is only one rank.
    """
    import jaxcross

    world = jaxcross.initialize()
    if world.size < 2:
        raise ExchangeError(
            "One rank exchanges nothing: contention is measured on at least 2. Start them with "
            "`jaxcross contention -n 2`, or with the `mpirun` that belongs to this environment's "
            "MPI; `jaxcross doctor` says which."
        )
    measurement = Measurement(world, seconds / _PARTS)
    rounds: list[MeasuredRound] = []
    measurement.round()  # warm-up
    round_s = math.nan
    for number in range(1, ROUNDS + 1):
        if world.rank == 0:
            left = "" if number == 1 else f", about {(ROUNDS + 1 - number) * round_s:.0f} s left"
            print(
                f"jaxcross contention: round {number} of {ROUNDS}{left}",
                file=sys.stderr,
                flush=True,
            )
        begin_s = time.perf_counter()
        rounds.append(measurement.round())
        round_s = time.perf_counter() - begin_s
    if world.rank == 0:
        import jax

        found = {
            "vendor": world.vendor,
            "ranks": world.size,
            "local_ranks": world.local_size,
            "device": jax.devices()[0].device_kind,
            "megabytes": measurement.megabytes,
            "exchanges": ROUNDS * measurement.exchanges,
            "rounds": [asdict(each) for each in rounds],
        }
        file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
