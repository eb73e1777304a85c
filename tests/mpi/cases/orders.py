"""Ranks that trace exchanges of equal shape in different orders get an error on all ranks, both
alone and in a runner.

Prints `passed NAME` for each case, and at the end `rank R: orders done`.
"""

import random
import sys

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=60)
RANK, P = WORLD.rank, WORLD.size
NAMES = ["a", "b"] if RANK == 0 else ["b", "a"]
TREE = {"a": jnp.zeros(3), "b": jnp.ones(3)}
COMM = MPI.COMM_WORLD.Dup()
SWAPPED = (
    "ranks 0 and 1 make the exchanges of `step` in different orders, "
    r"which would mix their values:\n"
)


def by_name(names, **options):
    def step(t):
        return {k: lax.pmean(t[k], "x") for k in names}

    return jaxcross.crossover(step, axes="x", **options)


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def alone():
    """Detected before anything is exchanged, even within a shared buffer and for each cut.

    All ranks can continue.
    """
    for options in ({}, {"bucket_bytes": 0}, {"cut": 2, "bucket_bytes": 0}, {"cut": "auto"}):
        with pytest.raises(jaxcross.ExchangeError, match=f"^{SWAPPED}") as error:
            by_name(NAMES, **options)(TREE)
        assert len(set(WORLD.control.allgather_text(str(error.value)))) == 1
        same(by_name(sorted(NAMES), **options)(TREE), TREE)


def into_a_list():
    """Ranks can't match up their exchanges if both the origins and the uses change with the order.

    Here each rank puts the results into a list or tuple in its own order. So no exchange of one
    rank has both its origin and its use in common with an exchange of another rank.
    """
    for made in (list, tuple):

        def step(t, made=made):
            return made(lax.pmean(t[k], "x") for k in NAMES)

        with pytest.raises(jaxcross.ExchangeError, match=f"^{SWAPPED}") as error:
            jaxcross.crossover(step, axes="x")(TREE)
        assert len(set(WORLD.control.allgather_text(str(error.value)))) == 1


def in_a_runner():
    seen = []

    def bad(job):
        try:
            by_name(NAMES)(TREE)
        except jaxcross.ExchangeError as error:
            seen.append(str(error))
            raise

    def good(job):
        for _ in range(3):
            same(by_name(sorted(NAMES))(TREE), TREE)

    runner = jaxcross.Runner(WORLD)
    runner.add("bad", bad)
    job = runner.add("good", good)
    with pytest.raises(jaxcross.ExchangeError, match=f"^Job `bad`, step 1: {SWAPPED}"):
        runner.run()
    assert len(seen) == 1 and job.status == "ended"


def two_steps(name="train", other="evaluate"):
    """Two steps with equal exchanges, and their results for ones."""
    made = []
    for each, factor in ((name, 1), (other, 10)):

        def step(x, factor=factor):
            return lax.pmean(factor * x + factor * RANK, "x")

        step.__name__ = each
        made.append(jaxcross.crossover(step, axes="x"))
    return made


def steps_of_a_job():
    """Detected even after calls of both in the same order, and if both have the same name."""
    for names in (("train", "evaluate"), ("step", "step")):
        f, g = two_steps(*names)
        seen = []

        def loop(job, f=f, g=g, seen=seen):
            x = jnp.ones(3)
            same((f(x), g(x)), (jnp.full(3, 1 + (P - 1) / 2), jnp.full(3, 10 + 5 * (P - 1))))
            for step in (f, g) if RANK == 0 else (g, f):
                try:
                    step(x)
                except jaxcross.ExchangeError as error:
                    seen.append(str(error))
                    raise

        runner = jaxcross.Runner(WORLD)
        runner.add("job", loop)
        one, other = (
            f"`{names[0]}` (function 1 of the job)",
            f"`{names[1]}` (function 2 of the job)",
        )
        with pytest.raises(jaxcross.ExchangeError) as error:
            runner.run()
        assert (
            f": the ranks of job `job` call different steps: rank 0 {one}, rank 1 {other}"
            in str(error.value)
        )
        assert len(seen) == 1


def mixed_up(first, second, x):
    """Calls two steps in turn, in the opposite order on rank 0. Returns the error of all ranks."""

    def loop():
        for _ in range(2):
            for step in (first, second) if RANK == 0 else (second, first):
                step(x)

    with pytest.raises(
        jaxcross.ExchangeError, match="^the ranks of the script call different steps: "
    ) as error:
        loop()
    text = str(error.value)
    assert len(set(WORLD.control.allgather_text(text))) == 1
    return text


def steps_of_a_script():
    """Detected in the first call, after calls in the same order, and if both have the same name.

    Then all ranks can continue.
    """
    x, one, other = jnp.ones(3), jnp.full(3, 1 + (P - 1) / 2), jnp.full(3, 10 + 5 * (P - 1))
    every = range(1, P)
    f, g = two_steps()
    text = mixed_up(f, g, x)
    assert (
        "steps: rank 0 `train`, call 1, "
        f"{', '.join(f'rank {r} `evaluate`, call 1' for r in every)}. " in text
    )
    for names in (("train", "evaluate"), ("step", "step")):
        f, g = two_steps(*names)
        for n in range(50):
            same((f(x), g(x)) if n % 2 else (g(x), f(x))[::-1], (one, other))
        text = mixed_up(f, g, x)
        assert (
            f"steps: rank 0 `{names[0]}` (function {f._standalone.number} of the script), call 51, "
            "rank 1 `" in text
        )
        same((f(x), g(x)), (one, other))
    # The check leaves out steps that exchange nothing, and steps where the host decides in which
    # calls they exchange.
    local = jaxcross.crossover(lambda x: x + 1, axes="x")
    every_third = jaxcross.crossover(
        lambda n, x: lax.cond(n % 3 == 0, lambda x: lax.pmean(x + RANK, "x"), lambda x: x, x),
        axes="x",
    )
    for n in range(9):
        for _ in range(RANK):
            local(x)
        same((f(x), g(x)), (one, other))
        same(every_third(np.int32(n), x), jnp.full(3, 1 + (P - 1) / 2) if n % 3 == 0 else x)


def after_an_error_before_the_exchange():
    """Rank 0's computation fails, and the other ranks wait until it calls the step again.

    Rank 0 catches the error, so all ranks can continue with that call.
    """
    fails = []

    def host(x):
        if fails:
            raise RuntimeError(fails.pop())
        return x + RANK

    step = jaxcross.crossover(lambda x: lax.pmean(jax.pure_callback(host, x, x), "x"), axes="x")
    x, want = jnp.ones(3), jnp.full(3, 1 + (P - 1) / 2)
    same((step(x), step(x)), (want, want))
    if RANK == 0:
        fails.append("no such file")
        with pytest.raises(Exception, match="no such file"):
            step(x)
    for _ in range(3):
        same(step(x), want)


def steps_of_a_script_checked_now_and_then():
    """With a check on every third call, a difference is found within three calls.

    Then the ranks can continue.
    """
    WORLD.exchange_owner.check_every, WORLD.exchange_owner.unchecked = 3, 0
    f, g = two_steps()
    x = jnp.ones(3)
    same((f(x), g(x)), (jnp.full(3, 1 + (P - 1) / 2), jnp.full(3, 10 + 5 * (P - 1))))
    assert ", call 3, rank 1 `" in mixed_up(f, g, x)
    same((f(x), g(x)), (jnp.full(3, 1 + (P - 1) / 2), jnp.full(3, 10 + 5 * (P - 1))))
    WORLD.exchange_owner.check_every = 1


def mpi4jax_calls():
    def step(names, t):
        return {k: mpi4jax.allreduce(t[k], op=MPI.SUM, comm=COMM) for k in names}

    def bound(names):
        def step_(t):
            return step(names, t)

        step_.__name__ = "step"
        return jaxcross.crossover(step_, axes="x")

    with pytest.raises(jaxcross.ExchangeError, match=f"^{SWAPPED}"):
        bound(NAMES)(TREE)
    same(bound(sorted(NAMES))(TREE), {k: P * v for k, v in TREE.items()})


def mpi4jax_calls_from_rank_to_rank():
    """Even ranks exchange to the right first, odd ranks to the left, so each call has its peer."""
    if P % 2:
        return

    def step(t):
        got = {}
        for side in ("right", "left") if RANK % 2 == 0 else ("left", "right"):
            peer = (RANK + (1 if side == "right" else -1)) % P
            got[side] = mpi4jax.sendrecv(t[side], t[side], source=peer, dest=peer, comm=COMM)
        return got

    t = {"left": jnp.full(3, 10.0 + RANK), "right": jnp.full(3, 20.0 + RANK)}
    got = jaxcross.crossover(step, axes="x")(t)
    same(
        got,
        {"left": jnp.full(3, 20.0 + (RANK - 1) % P), "right": jnp.full(3, 10.0 + (RANK + 1) % P)},
    )


def batches_of_each_rank():
    """Ranks may have different batches, as long as they exchange the same arrays.

    One rank's batch has a single row, another rank's loop has a different length, and another
    rank's last batch is short. This causes neither an error nor a deadlock.
    """

    @jaxcross.crossover(axes="x")
    def step(w, x):
        def loss(w, x):
            return jnp.mean(jnp.tanh(x @ w["k"]) + w["b"])

        grads = jax.tree.map(jnp.zeros_like, w)
        for n in range(0, len(x), 2):
            grads = jax.tree.map(jnp.add, grads, jax.grad(loss)(w, x[n : n + 2]))
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, lax.pmean(grads, "x"))

    def train(job=None):
        w = {"k": jnp.ones((4, 3)), "b": jnp.zeros(3)}
        for n in range(4):
            rows = 3 if n == 3 and RANK == P - 1 else (1, 4, 6)[RANK % 3]
            w = step(w, jnp.full((rows, 4), 0.1 * (RANK + n)))
        texts = (
            WORLD.control.allgather_text(np.asarray(w["k"]).tobytes().hex())
            if job is None
            else ["one"]
        )
        assert len(set(texts)) == 1

    train()
    runner = jaxcross.Runner(WORLD)
    runner.add("batches", train)
    runner.run()


def stages():
    """Each rank computes its own function and passes the result on."""
    layers = [lambda w, h: jnp.tanh(h @ w), lambda w, h: h * jax.nn.sigmoid(h @ w)]
    mine = layers if RANK % 2 == 0 else layers[::-1]
    ring = [(i, (i + 1) % P) for i in range(P)]

    @jaxcross.crossover(axes="x")
    def step(w, x):
        def loss(w):
            h = x
            for layer in mine:
                h = lax.ppermute(layer(w, h), "x", ring)
            return jnp.mean(h**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, lax.pmean(value, "x")

    _, value = step(jnp.eye(3), jnp.full((2, 3), 0.1 * RANK))
    assert np.isfinite(value)


def random_steps():
    """Each rank exchanges random leaves in its own order: equal to `vmap`, or an error."""
    found = {"errors": 0, "values": 0}
    for n in range(16):
        rng, own = random.Random(n), random.Random(1000 * n + RANK)
        names = [f"w{i}" for i in range(rng.randint(2, 4))]
        kinds = {k: rng.choice(["sum", "sum", "max", "dot"]) for k in names}
        orders = [sorted(names, key=lambda _: own.random()) if n % 2 else names for _ in range(2)]
        bucket_bytes = rng.choice([0, 1 << 20])

        def step(t, n=n, names=orders[0], back=orders[1], kinds=kinds):
            makes = {
                "sum": lambda v: lax.psum(v, "x"),
                "max": lambda v: lax.pmax(v * 2, "x"),
                "dot": lambda v: lax.psum(v @ v.T, "x") @ v,
            }
            got = {k: makes[kinds[k]](t[k]) for k in names}
            return {k: got[k] - lax.psum(got[k] / (2 + n), "x") for k in back}

        values = [
            {k: jnp.full((3, 3), 1.0 + i + 10 * r) for i, k in enumerate(names)} for r in range(P)
        ]
        try:
            got = jaxcross.crossover(step, axes="x", bucket_bytes=bucket_bytes)(values[RANK])
        except jaxcross.ExchangeError as error:
            outcome = "errors"
            assert "in different orders" in str(error) or "exchange different things" in str(error)
        else:
            outcome = "values"
            stacked = jax.tree.map(lambda *v: jnp.stack(v), *values)
            want = jax.tree.map(lambda v: v[RANK], jax.vmap(step, axis_name="x")(stacked))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
        assert set(WORLD.control.allgather_text(outcome)) == {outcome}
        assert outcome == "values" or n % 2, "ranks with one order"
        found[outcome] += 1
    assert min(found.values()) >= 4, found


CASES = [
    alone,
    into_a_list,
    in_a_runner,
    steps_of_a_job,
    steps_of_a_script,
    steps_of_a_script_checked_now_and_then,
    after_an_error_before_the_exchange,
    mpi4jax_calls,
    mpi4jax_calls_from_rank_to_rank,
    batches_of_each_rank,
    stages,
    random_steps,
]
wanted = sys.argv[1:] or [case.__name__ for case in CASES]
for case in [case for case in CASES if case.__name__ in wanted]:
    case()
    if RANK == 0:
        print(f"passed {case.__name__}", flush=True)
print(f"rank {RANK}: orders done", flush=True)
