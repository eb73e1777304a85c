"""Every exchange of the table, or those named on the command line, through `crossover`.

Compares each row with `vmap`, with its byte formulas, and with the mean if it can be lossless.
Tries zero gradients, a non-finite gradient, and no parameters. Compares two jobs in crossover, of
one row or of two, with each job alone. Saves and restores the states of all rows. On three ranks,
checks what is refused.

Prints `rank R: exchanges done` if all rows hold. Each row's oracle covers all ranks, so only one
rank computes it.
"""

import hashlib
import shutil
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import jaxcross
from jaxcross import exchange
from jaxcross.program import stages
from jaxcross.testing import decide, over_ranks
from jaxcross.wire.bytes import wire_bytes
from tests.support.exchange_table import SHAPES, TABLE, gradients, start, step_of

world = jaxcross.initialize(stall_timeout_s=60)
size, rank = world.size, world.rank
everyone = MPI.COMM_WORLD


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def digest(tree):
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    ).hexdigest()


def oracles(rows):
    """Name of a row -> step -> rank -> the flat results of `vmap` over all ranks."""
    mine = {}
    for row in rows[rank::size]:
        tx = row.made(size)
        oracle, carries, received = over_ranks(step_of(tx), row.axes(size)), [start(tx)] * size, []
        for n in range(row.steps):
            results = oracle([(carry, gradients(r, n)) for r, carry in enumerate(carries)])
            carries = [carry for carry, _ in results]
            received.append([[np.asarray(x) for x in jax.tree.leaves(r)] for r in results])
        mine[row.name] = received
    return {name: received for part in everyone.allgather(mine) for name, received in part.items()}


def close(got, expected, rtol, what):
    found = []
    for (path, a), b in zip(jax.tree.leaves_with_path(got), expected, strict=True):
        scale = float(np.max(np.abs(b), initial=0)) if b.dtype.kind == "f" else 0
        if not (np.isfinite(a).all() and np.allclose(a, b, rtol=rtol, atol=rtol * scale)):
            found.append(f"{what}{jax.tree_util.keystr(path)}: {np.asarray(a)} is not {b}")
    return found


def formula(row, step, carry, n):
    """Checks a step's received bytes, counting the exchanges as they are written."""
    promised = {0: row.bytes, **dict([row.later] if row.later else [])}
    if n not in promised:
        return []
    args = (carry, gradients(rank, n))
    traced = decide(step.trace(*args), jax.tree.leaves(args))
    brought = sum(
        wire_bytes(x, row.axes(size)) for x in stages.cut(traced, bucket_bytes=0).exchanges
    )
    expected = promised[n](list(SHAPES.values()), size)
    return (
        []
        if brought == expected
        else [f"{row.name}, step {n}: {brought} bytes on the wire, not {expected}"]
    )


def lossless(row):
    """In its lossless setting, the exchange equals the mean of the gradients, or its reference."""
    if row.lossless is None:
        return []
    tx = row.made(size, lossless=True)
    others = row.referred(size)
    plain = row.kind == "gradient" and isinstance(others.init({}), optax.EmptyState)
    step = jaxcross.crossover(step_of(tx), axes=row.axes(size))
    reference = None if plain else jaxcross.crossover(step_of(others), axes=row.axes(size))
    carry, expected, found = start(tx), None if plain else start(others), []
    for n in range(row.steps):
        what = f"{row.name}, lossless, step {n}: "
        carry, updates = step(carry, gradients(rank, n))
        if plain:
            means = jax.tree.map(
                lambda *g: np.mean(g, axis=0), *[gradients(r, n) for r in range(size)]
            )
            found += close(updates, jax.tree.leaves(means), row.rtol, what)
        else:
            expected, _ = reference(expected, gradients(rank, n))
            found += close(
                carry[0], [np.asarray(x) for x in jax.tree.leaves(expected[0])], row.rtol, what
            )
    return found


def zeros_and_nan(row, tx, step):
    """Zero gradients give no update, and a non-finite value on one rank reaches every rank."""
    found = []
    for first, bad, leaf, at, whose in (
        (0, np.nan, "kernel", (3, 2), size - 1),
        (1, np.inf, "kernel", (3, 2), size - 1),
        (0, -np.inf, "scale", (), 0),
    ):
        carry = start(tx)
        for n in range(first + row.spreads(size)):
            grads = gradients(rank, n)
            if rank == whose and first <= n < first + row.spoils:
                grads[leaf][at] = bad
            carry, _ = step(carry, grads)
        if np.isfinite(carry[0][leaf]).all():
            found.append(f"{row.name}: {bad} of rank {whose} in step {first} is not seen")
    carry = start(tx)
    for n in range(row.steps):
        carry, updates = step(carry, jax.tree.map(np.zeros_like, gradients(rank, n)))
        if any(np.max(np.abs(x)) > (0 if row.rests else 1e-6) for x in jax.tree.leaves(updates)):
            found.append(f"{row.name}, step {n}: an update without a gradient")
    return found


def no_parameters(row, tx):
    """An empty tree of parameters passes through unchanged."""
    carry = {}, tx.init({})
    step = jaxcross.crossover(step_of(tx), axes=row.axes(size))
    for _ in range(2):
        carry, updates = step(carry, {})
    return (
        [] if (carry[0], updates) == ({}, {}) else [f"{row.name}: something came of no parameters"]
    )


def in_crossover(policy, *members):
    """Runs jobs of (row, transformation, step, shift of the gradients, digest alone) in crossover.

    Each must give the same bits as alone.
    """

    def loop(job, row, tx, step, shift):
        carry = copied(start(tx))
        for n in range(row.steps):
            carry, _ = step(carry, gradients(rank, n + shift))
        return carry

    with jaxcross.Runner(world, policy) as runner:
        jobs = [
            runner.add(f"{n}", loop, {"row": m[0], "tx": m[1], "step": m[2], "shift": m[3]})
            for n, m in enumerate(members)
        ]
        runner.run()
    return [
        f"{row.name}: job {job.name} under {policy.name} differs from the step alone"
        for job, (row, _, _, _, expected) in zip(jobs, members, strict=True)
        if digest(job.state) != expected
    ]


def kept(rows):
    """One job with all rows, saved after the first step and continued by another run.

    Each row must end as it did alone.
    """

    def train(job, steps):
        state = job.restore({"done": 0} | {row.name: copied(start(tx)) for row, tx, *_ in rows})
        for n in range(state["done"], steps):
            for row, _, step, *_ in rows:
                if n < row.steps:
                    state[row.name], _ = step(state[row.name], gradients(rank, n))
            state["done"] = n + 1
        return state

    folder = everyone.bcast(tempfile.mkdtemp() if rank == 0 else None)
    for steps in (1, max(row.steps for row, *_ in rows)):
        with jaxcross.Runner(world, checkpoints=jaxcross.Checkpoints(folder)) as runner:
            job = runner.add("all", train, {"steps": steps})
            runner.run()
    everyone.Barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return [
        f"{row.name}: differs after a restart"
        for row, *_, expected in rows
        if digest(job.state[row.name]) != expected and row.deterministic
    ]


def refused():
    """Every rank refuses what three ranks can't run, and the world still works afterwards."""
    params = {"w": jnp.full((4, 4), float(rank))}
    found, refusals = [], 0
    for tx, message in (
        (
            exchange.gtop_k(0.5, "batch"),
            "needs a power of two of ranks, but axis `batch` has 3",
        ),
        (
            exchange.gossip(optax.sgd(0.1), "batch", "torus"),
            "`torus`, but 3 ranks do not fit a grid",
        ),
        (exchange.top_k(0.5, "rows"), "uses an axis that is not bound"),
        (
            exchange.elastic_average(optax.sgd(0.1), "batch", every=1, alpha=1, beta=1 / 3),
            "swap in every",
        ),
        (
            exchange.sharded_optimizer(optax.sgd(0.1), "batch", ranks=2),
            "`sharded_optimizer` is 2, but the axis has 3",
        ),
        (
            exchange.federated_average(optax.sgd(0.1), "batch", every=1, weights=[1, 1]),
            "contains 2 numbers, but the axis has 3",
        ),
        (
            exchange.asynchronous(optax.sgd(0.1), "batch", delays=[[0, 1]]),
            "are for 2 ranks, but the axis has 3",
        ),
        (
            exchange.one_bit_adam(2, "batch", ranks=2),
            "`ranks` of `one_bit_adam` is 2, but axis `batch` has 3",
        ),
        (
            optax.chain(exchange.top_k(0.5, "batch"), exchange.mean("batch")),
            "`mean` is given the leaf `['w']`, which",
        ),
    ):
        try:
            jaxcross.crossover(tx.update, axes="batch")(params, tx.init(params), params)
        except (ValueError, jaxcross.CutError) as error:
            refusals += 1
            if message not in str(error):
                found.append(f"`{message}` is not in: {error}")
    print(f"rank {rank}: {refusals} refused", flush=True)
    mean = exchange.mean("batch")
    (w,) = jaxcross.crossover(mean.update, axes="batch")(params, mean.init(params))[0].values()
    return found if (w == 1).all() else [*found, f"after errors the mean of 0, 1 and 2 is {w}"]


# Every policy on one world. Steps with several dependent exchanges run alongside steps some of
# which exchange nothing.
POLICIES = [jaxcross.RoundRobin()]
if size == 3:
    POLICIES += [jaxcross.Sequential(), jaxcross.Weighted((1.0, 3.0))]
UNLIKE = ("power_sgd", "local_sgd")
failures = refused() if size == 3 else []
chosen = [row for row in TABLE if row.worlds(size) and (len(sys.argv) == 1 or row.name in sys.argv)]
oracles_of, members = oracles(chosen), {}
for row in chosen:
    print(f"rank {rank}: {row.name}", file=sys.stderr, flush=True)
    tx = row.made(size)
    step = jaxcross.crossover(step_of(tx), axes=row.axes(size))
    alone = {}
    for shift in (0, 5):
        carry = start(tx)
        for n in range(row.steps):
            what = f"{row.name}, step {n}: "
            failures += formula(row, step, carry, n) if shift == 0 else []
            carry, updates = step(carry, gradients(rank, n + shift))
            if shift == 0:
                # Some exchanges move the parameters to the mean over the ranks. Their update is a
                # small difference of large numbers, so it has the rounding errors of the
                # parameters. For these rows, we compare only the parameters and the state.
                got = (carry, updates) if row.kind == "gradient" else (carry,)
                failures += close(
                    got, oracles_of[row.name][n][rank][: len(jax.tree.leaves(got))], row.rtol, what
                )
            equal = (carry[0] if row.identical else (), row.shared(carry[1]))
            if len(set(everyone.allgather(digest(equal)))) > 1:
                failures.append(f"{what}parameters or shared state differ between ranks")
        alone[shift] = digest(carry)
    failures += lossless(row) + zeros_and_nan(row, tx, step) + no_parameters(row, tx)
    members[row.name] = [(row, tx, step, *found) for found in alone.items()]
    if row.deterministic:
        failures += [
            text for policy in POLICIES for text in in_crossover(policy, *members[row.name])
        ]
if members.keys() >= set(UNLIKE):
    failures += [
        text
        for policy in POLICIES
        for text in in_crossover(policy, *(members[name][0] for name in UNLIKE))
    ]
failures += kept([found[0] for found in members.values()])
if failures:
    raise SystemExit(f"rank {rank}:\n" + "\n".join(failures))
print(f"rank {rank}: exchanges done", flush=True)
