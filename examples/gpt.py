"""A small character-level GPT on jaxcross's own documentation, sharded over any mesh of ranks.

    python examples/gpt.py --mesh serial
    mpirun -n 4 python examples/gpt.py --mesh 2d
    mpirun -n 4 python examples/gpt.py --mesh 1d
    mpirun -n 8 python examples/gpt.py --mesh 2.5d
    mpirun -n 4 python examples/gpt.py --mesh 2d --data FILE

The model is the same on every mesh, and so is what it learns, up to rounding. The example trains
two jobs with different learning rates, first one after the other and then in crossover, and both
ways end in the same states, bit for bit. Finally, the parameters are gathered from all ranks, and
each job writes a few characters of text.
"""

import argparse
import math
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import jaxcross
from jaxcross import tensor

DOCS = Path(__file__).resolve().parents[1] / "docs"
ALPHABET = [chr(code) for code in range(32, 127)] + [
    "\n"
]  # 96 characters: divisible by 2, 3, 4, 6 and 8 ranks


def text(file, length):
    """Returns the text of the file, or of all pages of the documentation, as numbers below 96.

    Characters outside the alphabet are dropped.
    """
    number = {letter: n for n, letter in enumerate(ALPHABET)}
    pages = "\n".join(page.read_text() for page in ([file] if file else sorted(DOCS.glob("*.md"))))
    letters = np.array([number[letter] for letter in pages if letter in number], np.int32)
    if len(letters) < length + 2:
        raise SystemExit(
            f"{file or DOCS} has {len(letters)} letters of the alphabet: a sequence needs "
            f"{length + 1}."
        )
    return letters


def mesh_for(kind, ranks, depth):
    """Returns a mesh of this kind that consists of all ranks."""
    if kind == "serial" and ranks > 1:
        raise SystemExit(f"--mesh serial is for one rank, but there are {ranks}.")
    if kind in ("serial", "1d"):
        return tensor.Mesh(tensor=ranks)
    layers = depth if kind == "2.5d" else 1
    side = math.isqrt(ranks // layers)
    if layers * side**2 != ranks:
        raise SystemExit(
            f"--mesh {kind} needs {layers} q^2 ranks for a whole q, but there are {ranks}."
        )
    return tensor.Mesh(side=side, depth=layers)


def batches(data, steps, batch_size, length, mesh, rank):
    """Yields this rank's rows of random global batches.

    Every rank draws the same random numbers and keeps its own rows.
    """
    rng = np.random.default_rng(1)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - length, batch_size)
        rows = np.stack([data[start : start + length + 1] for start in starts])
        yield mesh.local_batch({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, rank)


def make_step(model, tx):
    @jaxcross.crossover(axes=model.mesh.axes, donate_argnums=0)
    def train_step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            logits = model.apply({"params": params}, batch["tokens"])
            return tensor.cross_entropy(logits, batch["labels"], model.mesh)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return train_step


def check_copies(world, model, specs, batch):
    """Raises if parameters or rows that should be identical across ranks differ."""
    mesh, params = model.mesh, tensor.init(model, jax.random.key(0), batch["tokens"], world.rank)
    rows = jax.tree.map(lambda _: PartitionSpec(mesh.batch or None), batch)

    @jaxcross.crossover(axes=mesh.axes)
    def spread(params, batch):
        return tensor.replica_spread(params, specs, mesh), tensor.replica_spread(batch, rows, mesh)

    of_params, of_batch = spread(params, batch)
    tensor.check_replicas(of_params)
    tensor.check_replicas(of_batch, batch=True)


def write(model, params, prompt, letters, key):
    """Lets the serial model continue `prompt` character by character. Doesn't communicate."""
    model = model.clone(mesh=tensor.Mesh())

    @jax.jit
    def following(window, at, key):
        logits = model.apply({"params": params}, window[None])[0, at]
        return jax.random.categorical(key, logits / 0.7)

    known = [ALPHABET.index(letter) for letter in prompt]
    for n in range(letters):
        seen = known[-model.positions :]
        window = np.zeros(model.positions, np.int32)
        window[: len(seen)] = seen
        known.append(int(following(window, len(seen) - 1, jax.random.fold_in(key, n))))
    return "".join(ALPHABET[n] for n in known)


def train_all(world, policy, model, step, tx, data, args):
    """Trains one job for each learning rate. Returns the report and the final states."""
    mesh = model.mesh

    def train(job, lr):
        params = tensor.init(
            model, jax.random.key(0), jnp.zeros((1, args.length), jnp.int32), world.rank
        )
        opt_state = tx.init(params)
        opt_state[1].hyperparams["learning_rate"] = jnp.float32(lr)
        state = job.restore((params, opt_state), mode="local")
        for batch in job.batches(
            batches(data, args.steps, args.batch_size, args.length, mesh, world.rank)
        ):
            state, metrics = step(state, batch)
            job.log(metrics)
        return state, metrics["loss"]

    with jaxcross.Runner(world, policy=policy) as runner:
        jobs = {lr: runner.add(f"lr-{lr}", train, {"lr": lr}) for lr in args.lr}
        report = runner.run()
    return report, {lr: job.state for lr, job in jobs.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mesh", choices=["serial", "1d", "2d", "2.5d"], default="1d", help="how the model is cut"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="a text to learn instead of the documentation"
    )
    parser.add_argument("--depth", type=int, default=2, help="layers of a 2.5d mesh")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.001, 0.003], help="one job each")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=24, help="sequences over all ranks")
    parser.add_argument("--length", type=int, default=64, help="letters a sequence")
    parser.add_argument("--features", type=int, default=96)
    parser.add_argument("--heads", type=int, default=24, help="divided by 2, 3, 4, 6 and 8 ranks")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--letters", type=int, default=200, help="that each job writes at the end")
    parser.add_argument(
        "--loss", type=float, default=2.6, help="below which the best job must come"
    )
    args = parser.parse_args()
    world = jaxcross.initialize()
    say = print if world.rank == 0 else lambda *_, **__: None

    mesh = mesh_for(args.mesh, world.size, args.depth)
    if mesh.ranks == 1:  # a single rank has nothing to exchange
        warnings.filterwarnings("ignore", message=".*has no exchange")
    model = tensor.Transformer(
        len(ALPHABET), args.features, args.layers, args.heads, args.length, mesh
    )
    specs = tensor.partition(model, jax.ShapeDtypeStruct((1, args.length), jnp.int32))
    adam = optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.0
    )  # the rate is data, so both jobs share one executable
    tx = optax.chain(tensor.clip_by_global_norm(1.0, specs, mesh), adam)
    step = make_step(model, tx)
    data = text(args.data, args.length)
    check_copies(
        world, model, specs, next(batches(data, 1, args.batch_size, args.length, mesh, world.rank))
    )

    _, alone = train_all(world, jaxcross.Sequential(), model, step, tx, data, args)
    report, together = train_all(world, jaxcross.RoundRobin(), model, step, tx, data, args)
    say(report)
    gathered = jaxcross.crossover(partial(tensor.gather, specs=specs, mesh=mesh), axes=mesh.axes)
    for lr, state in together.items():
        pairs = zip(jax.tree.leaves(alone[lr]), jax.tree.leaves(state), strict=True)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs), (
            f"lr {lr}: states differ"
        )
        (params, _), loss = state
        params = gathered(params) if mesh.inner else params
        say(f"lr {lr}: loss {float(loss):.3f}, in crossover and alone the same bits. It writes:")
        say(write(model, params, "The ", args.letters, jax.random.key(2)), flush=True)
    best = min(float(loss) for _, loss in together.values())
    assert best < args.loss, best


if __name__ == "__main__":
    main()
