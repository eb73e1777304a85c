"""Loops that exchange, and whose number of iterations differs between ranks.

We run every row of the table on these ranks and compare it with `vmap`. We also compare two jobs in
crossover with each of them alone, and check what happens if a rank fails.

Prints `passed NAME` for each case on rank 0. The command line names cases, or rows of the table for
`rows`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import jaxcross
from jaxcross.program import lockstep
from jaxcross.testing import over_ranks
from tests.support.loops import TABLE, own

WORLD = jaxcross.initialize(stall_timeout_s=60)
RANK, P = WORLD.rank, WORLD.size


def rows():
    """Exact rows match bit for bit. An oracle covers all ranks, so ranks share out the oracles."""
    wrong = []
    named = {name: row for name, row in TABLE.items() if name in sys.argv[1:]}
    for place, (name, row) in enumerate((named or TABLE).items()):
        step = jaxcross.crossover(row.step, axes=row.axes(P))
        got = [jax.tree.map(np.asarray, step(jnp.int32(t), own(RANK))) for t in range(row.calls)]
        everywhere = [
            WORLD.control.allgather_text(json.dumps([x.tolist() for x in jax.tree.leaves(g)]))
            for g in got
        ]
        if place % P == RANK:
            function, axes = row.oracle or (row.step, row.axes)
            oracle = over_ranks(function, axes(P))
            for t, texts in enumerate(everywhere):
                want = oracle([(jnp.int32(t), own(r)) for r in range(P)])
                types = [x.dtype for x in jax.tree.leaves(got[t])]
                for r, text in enumerate(texts):
                    leaves = [np.asarray(x) for x in jax.tree.leaves(want[r])]
                    mine = json.loads(text)
                    close = [
                        np.allclose(*pair, rtol=row.rtol, atol=row.rtol)
                        for pair in zip(mine, leaves, strict=True)
                    ]
                    if not all(close) or types != [x.dtype for x in leaves]:
                        wrong.append(f"{name}, rank {r}, call {t}: {mine} is not {leaves}")
    assert not wrong, "\n".join(wrong)


@jaxcross.crossover(axes="batch")
def micro_batches(s, t, x):
    n = 2 + (lax.axis_index("batch") + t) % 2
    return lax.fori_loop(0, n, lambda _, c: c + lax.psum(jnp.float32(1), "batch"), s), lax.psum(
        x, "batch"
    )


def each_rank_makes_its_own_number_of_iterations():
    s, seen = jnp.float32(0), []
    for t in range(4):
        s, x = micro_batches(s, jnp.int32(t), jnp.float32(10 + RANK))
        seen.append(float(s))
        assert x == sum(range(10, 10 + P))
    assert [n / P for n in seen] == ([2, 5, 7, 10] if RANK % 2 == 0 else [3, 5, 8, 10])


def looping(name):
    """A job whose steps are a row's, each applied to the result of the step before."""
    row = TABLE[name]
    step = jaxcross.crossover(lambda t, v: jax.tree.leaves(row.step(t, v % 7))[0], axes=row.axes(P))

    def fn(job):
        x = job.restore(own(0)) + RANK
        for t in range(6):
            x = step(jnp.int32(t), x)
        return x

    return fn


def training(job):
    step = jaxcross.crossover(
        lambda w, x: w - 0.1 * lax.pmean(jnp.tanh(w * x), "batch"), axes="batch"
    )
    w = job.restore(jnp.ones(5))
    for n in range(12):
        w = step(w, jnp.arange(5.0) + n + RANK)
    return w


def crossover_equals_alone():
    jobs = {"frozen": looping("frozen carry"), "nested": looping("nested"), "plain": training}
    together = jaxcross.Runner(WORLD)
    handles = {name: together.add(name, fn) for name, fn in jobs.items()}
    together.run()
    for name, fn in jobs.items():
        alone = jaxcross.Runner(WORLD)
        job = alone.add(name, fn)
        alone.run()
        assert np.asarray(job.state).tobytes() == np.asarray(handles[name].state).tobytes(), name


def a_rank_that_fails_ends_the_loop_of_the_others():
    """The failed rank's zeros would keep the predicate true forever. The other job continues."""

    def fails_in_third_call(x):
        if RANK == P - 1 and fails_in_third_call.calls == 2:
            raise ValueError("the callback failed")
        fails_in_third_call.calls += 1
        return x

    fails_in_third_call.calls = 0

    @jaxcross.crossover(axes="batch")
    def step(x, limit):
        x = jax.pure_callback(fails_in_third_call, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return (
            lax.while_loop(lambda v: v.max() < limit, lambda v: v * 2 + 0 * lax.psum(v, "batch"), x)
            % 3
            + 1
        )

    def fails(job):
        x = job.restore(jnp.ones(3))
        for n in range(5):
            x = step(x, 50 + n)
        return x

    runner = jaxcross.Runner(WORLD)
    bad, good = runner.add("bad", fails), runner.add("good", training)
    with pytest.raises(jaxcross.JobError, match="the callback failed"):
        runner.run()
    assert (bad.status, bad.step, good.status, good.step) == ("failed", 2, "ended", 12)


def a_branch_that_no_rank_takes():
    """Some ranks enter the loop and others don't, which is an error on all ranks.

    With zeros, the predicate would stay true forever.
    """

    @jaxcross.crossover(axes="batch")
    def step(x):
        grow = lambda v: lax.while_loop(  # noqa: E731
            lambda c: c.sum() < 50, lambda c: c * 2 + 0 * lax.psum(c, "batch"), v
        )
        return lax.cond(x.sum() > 0, grow, lambda v: v - 1, x)

    assert (step(jnp.ones(3)) == 32).all() and (step(-jnp.ones(3)) == -2).all()
    with pytest.raises(jaxcross.ExchangeError, match="decided the conditional"):
        step(jnp.ones(3) * (1 if RANK else -1))


def callbacks():
    """Each rank makes the callbacks of its own iterations, in order, even in nested loops."""
    seen = []

    @jaxcross.crossover(axes="batch")
    def step(n, x):
        def note(i, c):
            jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
            return c + lax.psum(c, "batch")

        def outer(i, c):
            return lax.fori_loop(10 * i, 10 * i + n, note, c)

        return lax.fori_loop(0, n, outer, x)

    step(jnp.int32(1 + RANK % 2), jnp.ones(3)).block_until_ready()
    jax.effects_barrier()
    assert seen == ([0, 1, 10, 11] if RANK % 2 else [0]), seen


def an_inner_loop_that_no_rank_ends():
    """A rank that has left the loop waits for more iterations than are tried.

    Its job fails on all ranks, and another job continues.
    """
    lockstep.FROZEN = 200  # for the duration of this test

    @jaxcross.crossover(axes="batch")
    def step(outer, inner, s):
        one = jnp.int32(1)  # with JAX_ENABLE_X64, Python's integers have 64 bits
        length = lambda: lax.while_loop(  # noqa: E731
            lambda n: n < inner, lambda n: n + lax.pmax(one, "batch"), one * 0
        )
        return lax.fori_loop(0, outer, lambda i, c: c + lax.psum(length(), "batch"), s)

    long, short = [jnp.int32(1), jnp.int32(201)], [jnp.int32(2), jnp.int32(20)]
    mine = lambda slow: long if slow and RANK == 0 else short  # noqa: E731

    def fn(job, slow):
        state = job.restore(jnp.int32(0))
        for _ in range(3):
            state = step(*mine(slow and job.step == 1), state)
        return state

    runner = jaxcross.Runner(WORLD)
    runner.add("slow", fn, {"slow": True})
    good = runner.add("good", fn, {"slow": False})
    with pytest.raises(jaxcross.JobError, match="`slow`.* an inner loop, at .* did not end within"):
        runner.run()
    assert int(good.state) == 3 * 2 * 20 * P


def own_numbers_in_the_code():
    """A rank-local bound in the code is refused on all ranks. As an argument, it is voted on."""
    bound = 3 + RANK

    def step(x, n):
        return lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, lax.psum(c[1], "batch")), (0, x)
        )[1]

    with pytest.raises(jaxcross.ExchangeError, match="pass them to the step as an argument"):
        jaxcross.crossover(lambda x: step(x, bound), axes="batch")(jnp.ones(3))
    assert (jaxcross.crossover(step, axes="batch")(jnp.ones(3), jnp.int32(3)) == P**3).all()


def with_calls_of_mpi4jax():
    """Ranks vote on a loop that also exchanges over named axes, and keep making mpi4jax's calls."""
    x = lambda rank: jnp.arange(1.0, 4) + rank  # noqa: E731

    def step(total, x):
        n = 2 + lax.axis_index("batch")
        return lax.fori_loop(0, n, lambda _, c: c + lax.pmax(c, "batch") + total(c), x), lax.psum(
            x, "batch"
        )

    got = jaxcross.crossover(
        lambda x: step(lambda c: mpi4jax.allreduce(c, MPI.SUM), x), axes="batch"
    )(x(RANK))
    oracle = over_ranks(lambda x: step(lambda c: lax.psum(c, "batch"), x), {"batch": P})
    for mine, want in zip(got, oracle([(x(r),) for r in range(P)])[RANK], strict=True):
        np.testing.assert_array_equal(mine, want)


CASES = [
    rows,
    callbacks,
    each_rank_makes_its_own_number_of_iterations,
    crossover_equals_alone,
    a_rank_that_fails_ends_the_loop_of_the_others,
    an_inner_loop_that_no_rank_ends,
    own_numbers_in_the_code,
    with_calls_of_mpi4jax,
    # Must be last: a step fails halfway, and then this process can't exchange any more.
    a_branch_that_no_rank_takes,
]
for case in CASES:
    wanted = {"rows" if name in TABLE else name for name in sys.argv[1:]}
    if not wanted or case.__name__ in wanted:
        case()
        if RANK == 0:
            print(f"passed {case.__name__}", flush=True)
