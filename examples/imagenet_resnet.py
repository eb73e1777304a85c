"""ResNet on ImageNet with the reference recipe: several jobs (`--job`) share one accelerator.

    jaxcross data synth DATA
    mpirun -n 2 python examples/imagenet_resnet.py --data-dir DATA --model resnet50 --steps 20 \\
        --job lr=0.1,seed=0 --job lr=0.4,seed=1 --policy compare

The recipe follows Goyal et al. (2017): SGD with Nesterov momentum, weight decay on kernels only, a
linear warm-up, and a cosine decay.

With `--policy compare`, the example trains the jobs in both ways, one after the other and in
crossover, and checks that the final states are equal. Each way makes half of its steps, then the
other way takes over, and so on. So if the machine is busy with something else for a while, it slows
down both ways.
"""

from functools import partial, update_wrapper
from itertools import pairwise
from typing import Any

import imagenet_options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import dynamic_scale, train_state
from jax import lax
from resnet import MODELS

import jaxcross
from jaxcross.data import Cache, SharedDecode, eval_batches, train_batches
from jaxcross.lab import emulated_link
from jaxcross.report import Comparison

WARM_UP = 2  # untimed steps before a comparison
TURNS = 2  # turns of each way in a comparison


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale.DynamicScale | None


def metrics_of(logits, labels, smoothing=0.0):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    loss = optax.softmax_cross_entropy(logits, targets).mean()
    return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}


def train_step(state, batch, smoothing=0.0):
    """The step as Flax's ImageNet example writes it for `pmap`."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        metrics = metrics_of(logits, batch["label"], smoothing)
        return metrics["loss"], (metrics, new["batch_stats"])

    scale, finite = state.dynamic_scale, None
    if scale:
        grad_fn = scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
        scale, finite, (_, (metrics, stats)), grads = grad_fn(state.params)
    else:
        (_, (metrics, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = lax.pmean(grads, "batch")
    metrics, stats = lax.pmean((metrics, stats), "batch")
    new = state.apply_gradients(grads=grads, batch_stats=stats, dynamic_scale=scale)
    if finite is not None:  # float16 overflowed: keep the old parameters and momentum
        keep = partial(jax.tree.map, partial(jnp.where, finite))
        new = new.replace(
            params=keep(new.params, state.params), opt_state=keep(new.opt_state, state.opt_state)
        )
    return new, metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return lax.pmean(
        metrics_of(state.apply_fn(variables, batch["image"], train=False), batch["label"]), "batch"
    )


def recipe(steps, warmup_steps, weight_decay):
    """The optimizer.

    Its learning rate is injected as data, so jobs with different rates share one executable.
    """
    end = max(steps, warmup_steps + 1)
    schedule = optax.warmup_cosine_decay_schedule(1 / (warmup_steps + 1), 1.0, warmup_steps, end)

    def sgd(learning_rate):
        return optax.chain(
            optax.add_decayed_weights(
                weight_decay, mask=partial(jax.tree.map, lambda p: p.ndim > 1)
            ),
            optax.trace(decay=0.9, nesterov=True),
            optax.scale_by_schedule(schedule),
            optax.scale_by_learning_rate(learning_rate),
        )

    return optax.inject_hyperparams(sgd)(learning_rate=0.1)


def create_state(args, model, tx, init, *, lr, seed):
    variables = init(jax.random.key(seed))
    scale = dynamic_scale.DynamicScale(
        scale=jnp.float32(2**16)
    )  # strongly typed float32, so the type doesn't change after the first step
    stats, scale = variables["batch_stats"], scale if args.precision == "float16" else None
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=stats,
        dynamic_scale=scale,
    )
    state.opt_state.hyperparams["learning_rate"] = jnp.float32(lr)  # type: ignore[attr-defined]
    return state


def train(args, world, name, step, states, data):
    """Runs all jobs from `states`. Returns the report and each job's final state."""
    shared = SharedDecode(data)  # all jobs use the same images, which are decoded once
    steps = data.steps - data.step
    jobs = [
        jaxcross.Job(job, step, state, shared.reader(), steps=steps)
        for job, state in states.items()
    ]
    policy = {"sequential": jaxcross.Sequential, "crossover": jaxcross.RoundRobin}[name]()
    with emulated_link(args.emulated):
        report = jaxcross.run(
            jobs,
            policy=policy,
            world=world,
            checkpoints=args.checkpoints
            and jaxcross.Checkpoints(args.checkpoints, every=args.checkpoint_every),
        )
    return report, {job.name: job.state for job in jobs}


def same_bits(one, other):
    equal = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), one, other
    )
    return all(jax.tree.leaves(equal))


def main():
    args = imagenet_options.parse(__doc__)
    world = jaxcross.initialize()
    say = partial(print, flush=True) if world.rank == 0 else lambda *_: None
    cache = Cache(args.cache, disk_bytes=int(args.cache_gb * 1e9)) if args.cache else None
    share = {
        "batch_size": args.batch_size,
        "image_size": args.image_size,
        "rank": world.rank,
        "size": world.size,
        "cache": cache,
    }
    data = train_batches(
        args.data_dir, **share, steps=args.steps, epochs=None if args.steps else args.epochs
    )
    axis = "batch" if args.sync_batch_norm else None
    model = MODELS[args.model](num_classes=data.num_classes, dtype=args.precision, axis_name=axis)
    warmup = (
        min(5 * data.steps_per_epoch, (data.steps or 0) // 10)
        if args.warmup_steps is None
        else args.warmup_steps
    )
    tx = recipe(data.steps, warmup, args.weight_decay)
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, args.image_size, args.image_size, 3))))
    step = update_wrapper(partial(train_step, smoothing=args.label_smoothing), train_step)
    step = jaxcross.crossover(step, axes="batch", donate_argnums=0, cut=args.cut)
    evaluate = jaxcross.crossover(eval_step, axes="batch")
    say(
        f"{args.model}, {data.steps} steps of {args.batch_size} images on each of {world.size} "
        f"ranks: {args.policy}"
    )

    def states():
        return {
            f"job{n} {text}": create_state(args, model, tx, init, **j)
            for n, (text, j) in enumerate(args.jobs)
        }

    if args.policy == "compare":  # otherwise the first run would pay for compiling and memory
        say("Warming up ...")
        train(
            args,
            world,
            "crossover",
            step,
            states(),
            train_batches(args.data_dir, **share, steps=WARM_UP),
        )
    ways = ("sequential", "crossover") if args.policy == "compare" else (args.policy,)
    turns = min(TURNS, data.steps) if args.policy == "compare" else 1
    reports, finals = {name: [] for name in ways}, {}
    for start, stop in pairwise(data.steps * turn // turns for turn in range(turns + 1)):
        for name in ways:
            piece = train_batches(args.data_dir, **share, steps=stop, start_step=start)
            report, finals[name] = train(
                args, world, name, step, finals.get(name) or states(), piece
            )
            reports[name].append(report)
            say(report)
    if args.policy == "compare":
        if not same_bits(*finals.values()):
            raise SystemExit("the two ways end in different states: please report this")
        say("all final states are equal, bit for bit;", reports["crossover"][0].link)
        say(Comparison.of(reports["sequential"], reports["crossover"]).headline)
    scores, (*_, last) = {}, finals.values()
    for job, state in last.items() if args.eval_steps != 0 else ():
        every = [
            evaluate(state, batch)
            for batch in eval_batches(args.data_dir, **share, steps=args.eval_steps)
        ]
        scores[job] = {key: float(np.mean([metrics[key] for metrics in every])) for key in every[0]}
        say(f"{job}: validation {scores[job]}")
    imagenet_options.write_results(args, world.rank, reports, scores)


if __name__ == "__main__":
    main()
