"""Every exchange of the table on the ranks of this run, through `crossover`: against `vmap`, against its formula, and
two jobs in crossover against each alone.

Prints `rank R: exchanges done` if all rows hold. Each row's oracle, which holds all ranks, is computed by one of them.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from exchange_table import SHAPES, TABLE, gradients, start, step_of
from mpi4py import MPI

import jaxcross
from jaxcross.testing_wire import decide, over_ranks
from jaxcross.wire.bytes import wire_bytes

world = jaxcross.initialize(watchdog_s=60)
size, rank = world.size, world.rank
everyone = MPI.COMM_WORLD


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def digest(tree):
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


def oracles(rows):
    """Name of a row -> step -> rank -> what `vmap` over all ranks gives, flat."""
    mine = {}
    for row in rows[rank::size]:
        tx = row.made(size)
        oracle, carries, told = over_ranks(step_of(tx), row.axes(size)), [start(tx)] * size, []
        for n in range(row.steps):
            results = oracle([(carry, gradients(r, n)) for r, carry in enumerate(carries)])
            carries = [carry for carry, _ in results]
            told.append([[np.asarray(x) for x in jax.tree.leaves(r)] for r in results])
        mine[row.name] = told
    return {name: told for part in everyone.allgather(mine) for name, told in part.items()}


def close(got, expected, rtol, what):
    found = []
    for (path, a), b in zip(jax.tree.leaves_with_path(got), expected, strict=True):
        scale = float(np.max(np.abs(b), initial=0)) if b.dtype.kind == "f" else 0
        if not np.allclose(a, b, rtol=rtol, atol=rtol * scale, equal_nan=True):
            found.append(f"{what}{jax.tree_util.keystr(path)}: {np.asarray(a)} is not {b}")
    return found


def formula(row, tx, step):
    """The bytes that the first step brings to a rank, if its exchanges are counted as they are written."""
    args = (start(tx), gradients(rank, 0))
    traced = decide(step.trace(*args), jax.tree.leaves(args))
    brought = sum(wire_bytes(x, row.axes(size)) for x in traced.cut(bucket_bytes=0).exchanges)
    expected = row.bytes(list(SHAPES.values()), size) if row.bytes else brought
    return [] if brought == expected else [f"{row.name}: {brought} bytes on the wire, not {expected}"]


def in_crossover(row, tx, step, alone):
    """Two jobs of one step, their gradients not the same: the bits that each gave alone."""

    def loop(job, shift):
        carry = copied(start(tx))
        for n in range(row.steps):
            carry, _ = step(carry, gradients(rank, n + shift))
        return carry

    with jaxcross.Runner(world) as runner:
        jobs = [runner.add(f"{shift}", loop, shift=shift) for shift in alone]
        runner.run()
    return [
        f"{row.name}: job {job.name} in crossover differs from the step alone"
        for job, expected in zip(jobs, alone.values(), strict=True)
        if digest(job.state) != expected
    ]


failures = []
chosen = [row for row in TABLE if row.worlds(size) and (len(sys.argv) == 1 or sys.argv[1] in row.name)]
told = oracles(chosen)
for row in chosen:
    print(f"rank {rank}: {row.name}", file=sys.stderr, flush=True)
    tx = row.made(size)
    step = jaxcross.crossover(step_of(tx), axes=row.axes(size))
    failures += formula(row, tx, step)
    alone = {}
    for shift in (0, 5) if size <= 3 else (0,):
        carry = start(tx)
        for n in range(row.steps):
            what = f"{row.name}, step {n}: "
            carry, updates = step(carry, gradients(rank, n + shift))
            if shift == 0:
                # An update that carries parameters to their mean is a difference: its last digits are theirs.
                got = (carry, updates) if row.kind == "gradient" else (carry,)
                failures += close(got, told[row.name][n][rank][: len(jax.tree.leaves(got))], row.rtol, what)
            same = len(set(everyone.allgather(digest(carry[0])))) == 1
            if same < row.identical:
                failures.append(f"{what}parameters differ between ranks")
        alone[shift] = digest(carry)
    if row.deterministic and size <= 3:  # crossing over is no other thing on more ranks
        failures += in_crossover(row, tx, step, alone)
if failures:
    raise SystemExit(f"rank {rank}:\n" + "\n".join(failures))
print(f"rank {rank}: exchanges done", flush=True)
