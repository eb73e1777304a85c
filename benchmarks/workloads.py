"""Training steps and result files for all benchmarks. Measures nothing itself.

A workload has a function `make(exchange)` that returns a training step `step(state, batch) ->
(state, metrics)`. The step applies `exchange` to its gradients and metrics. We pass `lax.pmean` for
jaxcross, an mpi4jax call for its rival, and the identity for a plain step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine import machine
from race_file import out_file, versions_of, write_whole

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

Exchange = Callable[[Any], Any]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "mpi4jax", "mpi4py", "numpy")


class Workload(NamedTuple):
    """A training step with its initial state and one batch.

    Some workloads also have `gradients`, which maps (parameters, statistics, batch) to ((loss, new
    statistics), gradients).
    """

    make: Callable[[Exchange], Callable[[Any, Any], tuple[Any, Any]]]
    state: Callable[[int], Any]
    batch: Callable[[int], Any]
    gradients: Callable[[Any, Any, Any], Any] | None = None


def momentum() -> optax.GradientTransformation:
    """Returns the usual optimizer for ResNets: SGD with momentum and weight decay."""
    return optax.chain(
        optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9, nesterov=True)
    )


def resnet(
    name: str = "resnet50",
    *,
    batch_size: int,
    image_size: int,
    classes: int = 1000,
    tx: optax.GradientTransformation | None = None,
    **options: Any,
) -> Workload:
    """Returns a ResNet, trained with momentum SGD and weight decay unless `tx` is given.

    BatchNorm statistics are rank-local, and metrics are averaged. Other options are passed to the
    model, such as `stage_sizes`.
    """
    from resnet import MODELS

    model = MODELS[name](num_classes=classes, **options)
    tx = momentum() if tx is None else tx

    def gradients(params: Any, stats: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": stats}
            logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, new["batch_stats"]

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    def make(exchange: Exchange) -> Any:
        def train_step(state: Any, batch: Any) -> Any:
            params, stats, opt_state = state
            (loss, new_stats), grads = gradients(params, stats, batch)
            grads, loss = exchange((grads, loss))
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), new_stats, opt_state), {"loss": loss}

        return train_step

    def state(seed: int) -> Any:
        init = jax.jit(lambda key: model.init(key, jnp.zeros((1, image_size, image_size, 3))))
        variables = init(jax.random.key(seed))
        return variables["params"], variables["batch_stats"], tx.init(variables["params"])

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        image = rng.standard_normal((batch_size, image_size, image_size, 3), dtype=np.float32)
        return {
            "image": jnp.asarray(image),
            "label": jnp.asarray(rng.integers(0, classes, batch_size)),
        }

    return Workload(make, state, batch, gradients)


def _maker(
    loss_fn: Callable[[Any, Any], Any], tx: optax.GradientTransformation
) -> Callable[[Exchange], Any]:
    """Returns the `make` of a workload whose state is its parameters and its optimizer's state."""

    def make(exchange: Exchange) -> Any:
        def train_step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            grads, loss = exchange((grads, loss))
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

        return train_step

    return make


def mlp(*, width: int = 256, batch_size: int = 64) -> Workload:
    """Returns three dense layers with momentum SGD. A step takes about 1 ms on one core."""
    sizes = (width, width, width, 10)
    tx = optax.sgd(0.1, momentum=0.9)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for i, (w, b) in enumerate(params):
            x = x @ w + b
            x = jax.nn.relu(x) if i < len(params) - 1 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, batch["label"]).mean()

    def state(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        pairs = itertools.pairwise(sizes)
        params = [
            (jnp.asarray(rng.standard_normal(p) * 0.05, jnp.float32), jnp.zeros(p[1]))
            for p in pairs
        ]
        return params, tx.init(params)

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal((batch_size, width)), jnp.float32)
        return {"x": x, "label": jnp.asarray(rng.integers(0, 10, batch_size))}

    return Workload(_maker(loss_fn, tx), state, batch)


class Convolution(nn.Module):
    """A network for handwritten digits: two convolutions with pooling, and a dense layer."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.max_pool(nn.relu(nn.Conv(self.channels, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def convolution(*, channels: int = 8, batch_size: int = 16) -> Workload:
    """Returns a small convolutional network for images of 28x28 pixels, with momentum SGD."""
    model, tx = Convolution(channels), optax.sgd(0.1, momentum=0.9)

    def loss_fn(params: Any, batch: Any) -> Any:
        logits = model.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def state(seed: int) -> Any:
        params = jax.jit(lambda key: model.init(key, jnp.zeros((1, 28, 28, 1))))(
            jax.random.key(seed)
        )
        return params, tx.init(params)

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        image = rng.standard_normal((batch_size, 28, 28, 1), dtype=np.float32)
        return {"image": jnp.asarray(image), "label": jnp.asarray(rng.integers(0, 10, batch_size))}

    return Workload(_maker(loss_fn, tx), state, batch)


class Block(nn.Module):
    """A pre-norm Transformer block."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(self.heads)(y, y, mask=mask)
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Transformer(nn.Module):
    """Maps token ids of shape `[batch, length]` to logits."""

    layers: int
    width: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        for _ in range(self.layers):
            x = Block(heads=self.width // 64)(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def transformer(
    *,
    layers: int = 6,
    width: int = 384,
    length: int = 128,
    batch_size: int = 4,
    vocabulary: int = 4096,
) -> Workload:
    """Returns a small language model with AdamW."""
    model, tx = Transformer(layers, width, vocabulary), optax.adamw(1e-3)

    def loss_fn(params: Any, batch: Any) -> Any:
        logits = model.apply(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], batch["tokens"][:, 1:]
        ).mean()

    def state(seed: int) -> Any:
        params = jax.jit(lambda key: model.init(key, jnp.zeros((1, length), jnp.int32)))(
            jax.random.key(seed)
        )
        return params, tx.init(params)

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        return {"tokens": jnp.asarray(rng.integers(0, vocabulary, (batch_size, length)))}

    return Workload(_maker(loss_fn, tx), state, batch)


def in_turn(
    rivals: Mapping[str, Callable[[Any, Any], Any]],
    states: dict[str, Any],
    batch: Any,
    *,
    repeats: int,
    steps: int,
) -> dict[str, list[float]]:
    """Measures the seconds per step of each rival.

    In each repeat, every rival makes `steps` steps. Two more rounds come first, as a warm-up.
    """
    raw: dict[str, list[float]] = {name: [] for name in rivals}
    for repeat in range(-2, repeats):
        for name, step in rivals.items():
            state = jax.block_until_ready(states[name])
            start = time.perf_counter()
            for _ in range(steps):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            if repeat >= 0:
                raw[name].append((time.perf_counter() - start) / steps)
            states[name] = state
    return raw


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a command line with `--json` and `--smoke`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--json", type=out_file, metavar="FILE", help="write medians, spread and raw numbers"
    )
    made.add_argument("--smoke", action="store_true", help="toy sizes, only to see that it runs")
    return made


def spread(raw: Sequence[float]) -> dict[str, Any]:
    """Returns the median, quartiles, minimum and raw numbers."""
    low, high = (float(np.percentile(raw, q)) for q in (25, 75))
    return {
        "median": statistics.median(raw),
        "p25": low,
        "p75": high,
        "min": min(raw),
        "raw": list(raw),
    }


def write_json(path: Path | None, question: str | None, result: dict[str, Any]) -> None:
    """Writes a result with its question, command, versions and machine."""
    if path is None:
        return
    content = {
        "question": (question or "").splitlines()[0],
        "command": [
            "python",
            *(str(Path(a).name) if i == 0 else a for i, a in enumerate(sys.argv)),
        ],
        "versions": versions_of(PACKAGES),
        "machine": machine(),
        **result,
    }
    write_whole(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def kept(path: Path | None, empty: dict[str, Any]) -> dict[str, Any]:
    """Returns `empty`, with what the file of earlier runs has under the same keys."""
    if path is None or not path.is_file():
        return empty
    return empty | {
        key: value for key, value in json.loads(path.read_text()).items() if key in empty
    }


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON doesn't have by null, e.g. the loss of a run that diverged."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
