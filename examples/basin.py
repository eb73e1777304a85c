"""Waves in a walled basin, written with mpi4jax: each rank sends to the neighbours it has.

    mpirun -n 2 python -m mpi4py examples/basin.py
    mpirun -n 4 python -m mpi4py examples/basin.py --size 400 --steps 2000 --times

Each rank holds one block of the basin. Ranks at a wall have fewer neighbours, so the mpi4jax calls
differ from rank to rank. The example runs the same step in three ways: under `jax.jit`, under
`jaxcross.crossover`, and as a job in crossover with a training job that exchanges over a named
axis. All three ways give the same result, bit for bit.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from mpi4py import MPI

import jaxcross

COMM = MPI.COMM_WORLD
GRAVITY, DEPTH, SPACING = 9.81, 100.0, 5e3
INNER = (slice(1, -1), slice(1, -1))


class Block:
    """This rank's part of the basin, including one row or column of cells of each neighbour."""

    def __init__(self, rank, ranks, size):
        self.grid = (2, ranks // 2) if ranks % 2 == 0 else (1, ranks)
        if any(size % n for n in self.grid):
            raise SystemExit(
                f"--size {size} cannot be divided into {self.grid[0]} times {self.grid[1]} blocks."
            )
        self.at = np.unravel_index(rank, self.grid)
        self.shape = tuple(size // n for n in self.grid)

    def neighbour(self, axis, step):
        """Returns the rank on one side, or None if there's a wall."""
        at = list(self.at)
        at[axis] += step
        return int(np.ravel_multi_index(at, self.grid)) if 0 <= at[axis] < self.grid[axis] else None

    def with_borders(self, field):
        """Returns the field surrounded by its neighbours' nearest rows and columns.

        At a wall, the field is continued instead.
        """
        field = jnp.pad(field, 1, "edge")
        for axis in (0, 1):
            for step in (1, -1):
                dest, source = self.neighbour(axis, step), self.neighbour(axis, -step)
                last, first = (-2, 0) if step == 1 else (1, -1)
                edge = jnp.take(field, last, axis)
                place = (first, slice(None)) if axis == 0 else (slice(None), first)
                if dest is not None and source is not None:
                    got = mpi4jax.sendrecv(edge, edge, source, dest, comm=COMM)
                elif source is not None:
                    got = mpi4jax.recv(edge, source, comm=COMM)
                elif dest is not None:
                    mpi4jax.send(edge, dest, comm=COMM)
                    continue
                else:
                    continue
                field = field.at[place].set(got)
        return field

    def start(self, size):
        """Returns the initial state: a hill of water near one corner, at rest."""
        rows, columns = (np.arange(n) + n * at for n, at in zip(self.shape, self.at, strict=True))
        hill = np.exp(
            -((rows[:, None] - size / 3) ** 2 + (columns - size / 4) ** 2) / (size / 12) ** 2
        )
        return jnp.asarray(hill, jnp.float32), jnp.zeros(self.shape), jnp.zeros(self.shape)


def make_step(block):
    """Returns one step of the linear shallow-water equations: first velocities, then the height."""
    dt = 0.5 * SPACING / np.sqrt(GRAVITY * DEPTH)
    walls = [block.neighbour(axis, 1) is None for axis in (0, 1)]

    def step(state):
        height, south, east = state
        around = block.with_borders(height)
        south = south - dt * GRAVITY * (around[2:, 1:-1] - around[INNER]) / SPACING
        east = east - dt * GRAVITY * (around[1:-1, 2:] - around[INNER]) / SPACING
        south = south.at[-1, :].set(0) if walls[0] else south
        east = east.at[:, -1].set(0) if walls[1] else east
        souths, easts = block.with_borders(south), block.with_borders(east)
        if block.neighbour(0, -1) is None:
            souths = souths.at[0, :].set(0)
        if block.neighbour(1, -1) is None:
            easts = easts.at[:, 0].set(0)
        flow = souths[INNER] - souths[:-2, 1:-1] + easts[INNER] - easts[1:-1, :-2]
        return height - dt * DEPTH * flow / SPACING, south, east

    return step


def repeated(step, state, steps):
    for _ in range(steps):
        state = step(state)
    return jax.block_until_ready(state)


def basin_job(job, step, state, steps):
    crossed = jaxcross.crossover(step, axes="ranks")
    state = job.restore(state, mode="local")  # each rank has a different block
    for _ in range(steps):
        state = crossed(state)
    return state


@jaxcross.crossover(axes="ranks")
def train_step(weights, x, y):
    grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    return weights - 0.1 * jax.lax.pmean(grads, "ranks")


def training(weights, rank, steps):
    rng = np.random.default_rng(rank)
    for _ in range(steps):
        x = rng.standard_normal((32, 16)).astype(np.float32)
        weights = train_step(weights, x, x.sum(1))
    return weights


def train_job(job, rank, steps):
    return training(job.restore(jnp.zeros(16)), rank, steps)


def equal(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


def race(rivals, state, steps, rounds=9):
    """Measures the milliseconds per step of several ways, as medians over alternating rounds."""
    times = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, step in rivals.items():
            COMM.Barrier()
            begun = time.perf_counter()
            repeated(step, state, steps)
            times[name].append((time.perf_counter() - begun) / steps * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=96, help="points along each side of the basin")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--times", action="store_true", help="time jit and crossover, in turns")
    options = parser.parse_args()

    world = jaxcross.initialize()
    block = Block(world.rank, world.size, options.size)
    step, start = make_step(block), block.start(options.size)
    plain, crossed = jax.jit(step), jaxcross.crossover(step, axes="ranks")
    alone = repeated(crossed, start, options.steps)
    same = equal(repeated(plain, start, options.steps), alone)

    runner = jaxcross.Runner()
    waves = runner.add("waves", basin_job, {"step": step, "state": start, "steps": options.steps})
    trained = runner.add("training", train_job, {"rank": world.rank, "steps": options.steps})
    runner.run()
    together = equal(waves.state, alone)
    together &= equal(trained.state, training(jnp.zeros(16), world.rank, options.steps))
    before, after = (COMM.allreduce(float(jnp.sum(height))) for height in (start[0], alone[0]))
    if not (COMM.allreduce(same, MPI.LAND) and COMM.allreduce(together, MPI.LAND)):
        raise SystemExit(
            "results differ between jit, crossover alone, and crossover alongside another job"
        )
    if options.times:
        times = race({"jit": plain, "crossover": crossed}, start, options.steps)
    if world.rank == 0:
        print(
            f"{options.steps} steps under jit, in crossover, and alongside another job: the same "
            "bits"
        )
        print(f"water: {before:.2f} before, {after:.2f} after")
        if options.times:
            print(", ".join(f"{name} {ms:.3f} ms a step" for name, ms in times.items()))


if __name__ == "__main__":
    main()
