"""Every step of the zoo on this run's ranks, through `crossover`.

Compares each row with `vmap`, on up to two ranks with a single executable, and two jobs in
crossover with each job alone.

Arguments select the rows whose names start with one of them. If all of these rows are as expected,
each rank prints `rank R: zoo done`. A row's oracle simulates all ranks, so only one rank computes
it and sends it to the others.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from mpi4py import MPI

import jaxcross
from jaxcross import _jax_compat as compat
from jaxcross.program.compile import bind_axis_index
from jaxcross.testing import decide, over_ranks
from tests.support.zoo import ZOO, assert_close
from tests.support.zoo_models import CLASSES, WIDTH, cross_entropy, images, momentum

world = jaxcross.initialize(stall_timeout_s=60)
size, rank = world.size, world.rank


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def one_executable(traced):
    """The same step, with the wire's exchanges, compiled as one segment."""
    coords = world.wire().coords(traced.axes)
    bound = compat.close(bind_axis_index(compat.open_jaxpr(traced.jaxpr)[0], coords))
    host = jax.devices("cpu")[0]
    fused = (
        world.wire()
        .lower(bound, traced.axes)
        .compile(traced.in_avals, name="fused", host=host, place=None)
    )
    return lambda *args: jax.tree.unflatten(
        traced.out_tree, fused(*traced.consts, *jax.tree.leaves((args, {})))
    )


def same_bits(a, b, what):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), (
            f"{what}{jax.tree_util.keystr(path)}: {x} is not {y}"
        )


def in_place():
    """A step that changes NNX objects gives the same values as its functional twin under `vmap`."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(WIDTH, 8, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.calls.set_value(self.calls.get_value() + 1)
            return self.two(self.drop(nnx.relu(self.one(x))))

    def train_step(model, optimizer, image, label):
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(image), label))(model)
        optimizer.update(model, jax.lax.pmean(grads, "batch"))
        return jax.lax.pmean(loss, "batch")

    def fresh():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, momentum(), wrt=nnx.Param)

    graph, state = nnx.split(fresh())

    def pure(state, batch):
        objects = nnx.merge(graph, state)
        loss = train_step(*objects, batch["image"], batch["label"])
        return nnx.state(objects), loss

    model, optimizer = fresh()
    step = jaxcross.crossover(
        lambda o, *batch: train_step(*o["objects"], *batch), axes="batch", donate_argnums=0
    )
    oracle, states = over_ranks(pure, {"batch": size}), [state] * size
    problems = []
    for n in range(3):
        batch = images(rank, n)
        loss = step({"objects": (model, optimizer)}, batch["image"], batch["label"])
        expected = oracle([(s, images(r, n)) for r, s in enumerate(states)])
        states = [s for s, _ in expected]
        try:
            assert_close(
                (nnx.state((model, optimizer)), loss),
                expected[rank],
                2e-5,
                f"nnx in place, step {n}",
            )
            assert int(model.calls.get_value()) == n + 1
        except AssertionError as error:
            problems.append(str(error))
    return problems


def in_crossover(row, state, alone):
    """Two jobs that cross over, one for each step, give the same bits as the steps alone."""

    def loop(job, step):
        mine = copied(state)
        for n in range(row.steps):
            mine, metrics = step(mine, row.batch(rank, n))
        return mine, metrics

    with jaxcross.Runner(world) as runner:
        jobs = {step: runner.add(f"{n}", loop, {"step": step}) for n, step in enumerate(alone)}
        runner.run()
    problems = []
    for step, job in jobs.items():
        try:
            same_bits(job.state, alone[step], f"{row.name}, in crossover, job {job.name}")
        except AssertionError as error:
            problems.append(str(error))
    return problems


def oracles(rows):
    """Name of a row -> step -> rank -> the flat results of `vmap` over all ranks."""
    mine = {}
    for row in [row for row in rows if row.vmap][rank::size]:
        function, state = row.build(size)
        oracle = over_ranks(function, row.axes(size))
        states = [state] * size
        by_step = []
        for n in range(row.steps):
            results = oracle([(s, row.batch(r, n)) for r, s in enumerate(states)])
            states = [s for s, _ in results]
            by_step.append([[plain(x) for x in jax.tree.leaves(r)] for r in results])
        mine[row.name] = by_step
    return {
        name: by_step for part in MPI.COMM_WORLD.allgather(mine) for name, by_step in part.items()
    }


def plain(leaf):
    """A leaf in a form that can be sent. Random keys become their numbers."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def like(tree, leaves):
    """Arranges `leaves` in the structure of `tree`, and turns numbers into random keys again."""
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tree)]
    made = [jax.random.wrap_key_data(x) if key else x for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), made)


failures = []
IN_PLACE = "nnx in place"
wanted = tuple(sys.argv[1:]) or ("",)
chosen = [row for row in ZOO if row.name.startswith(wanted)]
unknown = [
    name
    for name in wanted
    if not any(have.startswith(name) for have in (*(r.name for r in ZOO), IN_PLACE))
]
assert not unknown, f"no such rows: {unknown}"
results_of = oracles(chosen)
for row in chosen:
    print(f"rank {rank}: {row.name}", file=sys.stderr, flush=True)
    function, state = row.build(size)
    axes = row.axes(size)
    whole = jaxcross.crossover(function, axes=axes)
    parts = jaxcross.crossover(function, axes=axes, cut=2, bucket_bytes=64, donate_argnums=0)
    mine, split = state, copied(state)
    whole_traced, executables = whole.trace(state, row.batch(rank, 0)), {}
    for n in range(row.steps):
        batch = row.batch(rank, n)
        what = f"{row.name}, step {n}"
        traced = decide(whole_traced, jax.tree.leaves(((mine, batch), {})))
        # More ranks exchange differently with the same executables, so compiling the step again for
        # them shows nothing new.
        if size <= 2 and traced.choices not in executables:
            executables[traced.choices] = one_executable(traced)
        fused = executables[traced.choices](mine, batch) if size <= 2 else None
        new, metrics = whole(mine, batch)
        split, split_metrics = parts(split, batch)
        try:
            if row.bits and size == 2:  # one rank sends nothing, so XLA fuses across the exchanges
                same_bits((new, metrics), fused, what)
            elif size <= 2:
                assert_close((new, metrics), fused, row.rtol, what)
            if row.vmap:
                expected = like((new, metrics), results_of[row.name][n][rank])
                assert_close((new, metrics), expected, row.rtol, what)
                assert_close((split, split_metrics), expected, 4 * row.rtol, f"{what}, cut=2")
            else:
                assert_close((split, split_metrics), (new, metrics), row.rtol, f"{what}, cut=2")
        except AssertionError as error:
            failures.append(str(error))
        mine = new
    failures += in_crossover(row, state, {whole: (mine, metrics), parts: (split, split_metrics)})
failures += in_place() if IN_PLACE.startswith(wanted) else []
if failures:
    raise SystemExit(f"rank {rank}:\n" + "\n".join(failures))
print(f"rank {rank}: zoo done", flush=True)
