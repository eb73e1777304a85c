"""Fine-tunes several LoRA adapters of one frozen language model, written in Flax NNX.

    python examples/lora.py
    mpirun -n 2 python examples/lora.py
    python -m jaxcross.lab --rate 100mbit -- mpirun -n 2 python examples/lora.py --features 512

LoRA (Hu et al., arXiv 2106.09685) freezes a model and adds a low-rank product to each of its
dense layers: `x @ kernel + x @ a @ b`. Only `a` and `b` are trained, so a step exchanges about a
hundredth of the model's gradients. That suits a slow network. And because the base model never
changes, all adapters use the same copy of it.

The example first trains a small base model on jaxcross's documentation. Then it fine-tunes one
adapter per job on jaxcross's source code. The adapters differ in their LoRA rank and in their
learning rate. They are trained one after the other and then in crossover, and both ways end in the
same adapters, bit for bit.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcross

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = 128  # ASCII


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, features, heads, *, rngs):
        self.heads = heads
        self.norm_in, self.norm_mid = (nnx.LayerNorm(features, rngs=rngs) for _ in range(2))
        self.attend = nnx.Linear(features, 3 * features, rngs=rngs)
        self.project = nnx.Linear(features, features, rngs=rngs)
        self.widen = nnx.Linear(features, 4 * features, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, rngs=rngs)

    def __call__(self, x):
        batch, length, features = x.shape
        heads = self.attend(self.norm_in(x)).reshape(batch, length, 3, self.heads, -1)
        query, key, value = jnp.moveaxis(heads, 2, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.reshape(batch, length, features))
        return x + self.narrow(nnx.gelu(self.widen(self.norm_mid(x))))


class Decoder(nnx.Module):
    """A small character-level language model. Maps ids [batch, length] to logits."""

    def __init__(self, features, layers, heads, length, *, rngs):
        self.embed = nnx.Embed(CHARACTERS, features, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, features)))
        self.blocks = nnx.List([Block(features, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(features, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def add_adapters(model, rank, rngs):
    """Adds a LoRA adapter to each dense layer of a model's blocks, in place.

    A new adapter contributes zero, so the model computes the same as before.
    """
    for block in model.blocks:
        for name in ("attend", "project", "widen", "narrow"):
            dense = getattr(block, name)
            adapted = nnx.LoRA(
                dense.in_features, rank, dense.out_features, base_module=dense, rngs=rngs
            )
            setattr(block, name, adapted)


def split(model):
    """Returns a model's structure, its adapter, and its frozen base."""
    return nnx.split(model, nnx.LoRAParam, ...)


def adapter_of(make_model, rank):
    """Returns the structure of a model with an adapter of this rank, and the adapter.

    This takes no memory for another base: the structure is that of a model without values, and
    `jax.jit` only computes what it returns.
    """

    def make():
        model = make_model()
        add_adapters(model, rank, nnx.Rngs(rank))
        return model

    return split(nnx.eval_shape(make))[0], jax.jit(lambda: split(make())[1])()


def frozen_base(model):
    """Returns the parameters of a base model as adapted models hold them, without copying any."""
    add_adapters(model, 1, nnx.Rngs(0))
    return split(model)[2]


def loss_of(model, batch):
    logits = model(batch["ids"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def make_base_step(structure, tx):
    """Returns the step that trains the whole base model."""

    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def base_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(
            lambda params: loss_of(nnx.merge(structure, params), batch)
        )(params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return base_step


def make_step(structure, tx):
    """Returns the step that trains an adapter. The base is an argument that it never donates."""

    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def lora_step(state, base, batch):
        adapter, opt_state = state
        loss, grads = jax.value_and_grad(
            lambda adapter: loss_of(nnx.merge(structure, adapter, base), batch)
        )(adapter)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        updates, opt_state = tx.update(grads, opt_state, adapter)
        return (optax.apply_updates(adapter, updates), opt_state), {"loss": loss}

    return lora_step


def text(files):
    """The ASCII characters of these files, as ids."""
    letters = np.frombuffer(
        "\n".join(map(Path.read_text, files)).encode("ascii", "ignore"), np.uint8
    )
    return letters.astype(np.int32)


def batches(letters, steps, batch_size, length, rank):
    """Random excerpts of a text. Each rank draws its own."""
    rng = np.random.default_rng((1, rank))
    for _ in range(steps):
        starts = rng.integers(0, len(letters) - length, batch_size)
        rows = np.stack([letters[start : start + length + 1] for start in starts])
        yield {"ids": rows[:, :-1], "next": rows[:, 1:]}


def train_base(world, make_model, data, steps, args):
    """Trains the base model on all ranks, as a job of its own, and returns it."""
    structure, params = nnx.split(make_model())
    tx = optax.adam(args.base_lr)
    step = make_base_step(structure, tx)

    def train(job):
        state = job.restore((params, tx.init(params)))
        for batch in job.batches(batches(data, steps, args.batch_size, args.length, world.rank)):
            state, metrics = step(state, batch)
            job.log(metrics)
        return state[0]

    with jaxcross.Runner(world) as runner:
        job = runner.add("base", train)
        runner.run()
    return nnx.merge(structure, job.state)


def train_adapters(world, policy, make_model, base, steps_of, tx, data, args):
    """Trains one job per adapter. Returns the report and the jobs."""

    def train(job, rank, lr):
        _, adapter = adapter_of(make_model, rank)
        opt_state = tx.init(adapter)
        opt_state.hyperparams["learning_rate"] = jnp.float32(lr)
        state = job.restore((adapter, opt_state))
        for batch in job.batches(
            batches(data, args.steps, args.batch_size, args.length, world.rank)
        ):
            state, metrics = steps_of[rank](state, base, batch)
            job.log(metrics)
        return state[0]

    with jaxcross.Runner(world, policy=policy) as runner:
        jobs = [
            runner.add(f"rank-{rank}-lr-{lr:g}", train, {"rank": rank, "lr": lr})
            for rank, lr in args.adapters
        ]
        report = runner.run()
    return report, jobs


def losses(job):
    return [float(metrics["loss"]) for _, metrics in job.history]


def adapters(words):
    """For `argparse`: `4:0.01,8:0.003` are an adapter of rank 4 and one of rank 8."""
    try:
        pairs = [word.split(":") for word in words.split(",")]
        found = [(int(rank), float(lr)) for rank, lr in pairs]
    except ValueError:
        found = []
    if not found or min(rank for rank, _ in found) < 1:
        raise argparse.ArgumentTypeError(
            f"`{words}` isn't a list of RANK:LEARNING_RATE, such as 4:0.01,8:0.003"
        )
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--adapters",
        type=adapters,
        default="2:0.01,4:0.01,4:0.003,8:0.003",
        metavar="RANK:LR,...",
        help="one job each (default %(default)s)",
    )
    parser.add_argument("--base-steps", type=int, default=150, help="0: random parameters")
    parser.add_argument("--base-lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="excerpts per rank")
    parser.add_argument("--length", type=int, default=64, help="characters per excerpt")
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    world = jaxcross.initialize()
    say = print if world.rank == 0 else lambda *_, **__: None

    def make_model():
        return Decoder(args.features, args.layers, args.heads, args.length, rngs=nnx.Rngs(0))

    prose = text(sorted((ROOT / "docs").rglob("*.md")))
    code = text(sorted((ROOT / "jaxcross").rglob("*.py")))
    base = frozen_base(train_base(world, make_model, prose, args.base_steps, args))

    # The learning rate is part of the state, and adapters of equal rank share one step. So there
    # are as many executables as different ranks, rather than as many as adapters.
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)
    ranks = {rank for rank, _ in args.adapters}
    steps_of = {rank: make_step(adapter_of(make_model, rank)[0], tx) for rank in sorted(ranks)}

    common = (make_model, base, steps_of, tx, code, args)
    _, alone = train_adapters(world, jaxcross.Sequential(), *common)
    report, together = train_adapters(world, jaxcross.RoundRobin(), *common)
    say(report)

    size = sum(leaf.size for leaf in jax.tree.leaves(base))
    say(f"The base has {size:,} parameters. All {len(together)} adapters use one copy of it.")
    (held_out,) = batches(code, 1, 64, args.length, world.size)  # drawn by no rank
    for (rank, _), before, job in zip(args.adapters, alone, together, strict=True):
        structure, untrained = adapter_of(make_model, rank)
        first, last = (
            float(loss_of(nnx.merge(structure, adapter, base), held_out))
            for adapter in (untrained, job.state)
        )
        trained = sum(leaf.size for leaf in jax.tree.leaves(job.state))
        say(f"{job.name}: exchanges {trained:,} numbers per step, loss {first:.3f} -> {last:.3f}")
        assert losses(before) == losses(job), f"{job.name}: other losses than alone"
        pairs = zip(jax.tree.leaves(before.state), jax.tree.leaves(job.state), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), f"{job.name}: another adapter"
        assert last < first, f"{job.name} has learnt nothing"
    say("Each adapter is bit for bit the one that its job trains alone.", flush=True)


if __name__ == "__main__":
    main()
