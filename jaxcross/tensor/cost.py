"""Cost of a training step of a `Transformer` for one rank: messages, bytes, operations, memory; and
an alpha-beta time.

    seconds = alpha_s * messages + received_bytes / bytes_per_s + operations / operations_per_s

Pure arithmetic over shapes; nothing runs and nothing is sent. Bytes are those of the layers' own
exchanges, exactly: a test holds them to the traced step. The time is a model: exchanges and
computation one after the other, every link as fast as every other, collectives that receive no more
than they must. With P ranks and n bytes a rank, an all-reduce has 2(P-1) messages and 2(P-1)/P n
bytes (a ring), an all-gather P-1 and (P-1) n, a reduce-scatter P-1 and (P-1)/P n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxcross.tensor.mesh import Mesh, Role
from jaxcross.tensor.shards import partition
from jaxcross.tensor.transformer import Transformer

ITEM_BYTES = 4  # float32
Shapes = list[tuple[tuple[int, ...], Role]]  # global


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured constants of ranks and of the network between them, all alike.

    Attributes:
        alpha_s: Seconds that a message takes in addition to its bytes.
        bytes_per_s: That a rank receives.
        operations_per_s: Floating-point operations of a rank, in the products of this model.
    """

    alpha_s: float
    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One rank's share of a training step.

    Attributes:
        messages: That it waits for, one after the other.
        received_bytes: On the wire.
        operations: Floating-point operations of the matrix products, two for a multiplication and
            an addition.
        weights_bytes: Of its parameters, once: an Adam holds three times as many, and gradients
            come for a while.
    """

    messages: int = 0
    received_bytes: int = 0
    operations: int = 0
    weights_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            messages=self.messages + other.messages,
            received_bytes=self.received_bytes + other.received_bytes,
            operations=self.operations + other.operations,
            weights_bytes=self.weights_bytes + other.weights_bytes,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(
            messages=self.messages * times,
            received_bytes=self.received_bytes * times,
            operations=self.operations * times,
            weights_bytes=self.weights_bytes * times,
        )

    def exchange_s(self, machine: Machine) -> float:
        """Modelled seconds on the wire."""
        return machine.alpha_s * self.messages + self.received_bytes / machine.bytes_per_s

    def compute_s(self, machine: Machine) -> float:
        """Modelled seconds of computation."""
        return self.operations / machine.operations_per_s

    def seconds(self, machine: Machine) -> float:
        """Modelled seconds of the step, nothing hidden behind anything."""
        return self.exchange_s(machine) + self.compute_s(machine)


def step_cost(model: Transformer, batch: int, length: int) -> Cost:
    """One rank's cost of the loss and its gradients, `cross_entropy` included, the optimizer's own
    exchanges not.

    ```python
    model = tensor.Transformer(50304, 4096, 32, 64, 512, tensor.Mesh(side=4, depth=4))
    tensor.step_cost(model, batch=96, length=512).received_bytes
    ```

    Args:
        model: Of float32; its mesh may be of any size.
        batch: Sequences over all ranks.
        length: Tokens a sequence.

    Raises:
        ValueError: The model would refuse such a batch (chunks, length, heads), or is not of
            float32.
    """
    if any(jnp.dtype(kind) != jnp.float32 for kind in (model.dtype, model.param_dtype)):
        raise ValueError(
            f"The model computes in `{model.dtype}` and keeps `{model.param_dtype}`, but costs are "
            "those of float32: sums of 16 bits travel otherwise. Clone it with dtype=jnp.float32, "
            "param_dtype=jnp.float32."
        )
    if batch < 1 or length < 1:
        raise ValueError(
            f"A step of {batch} sequences of {length} tokens computes nothing: both count from 1."
        )
    partition(
        model.clone(layers=1), jax.ShapeDtypeStruct((batch, length), jnp.int32)
    )  # the model's own refusals
    mesh = model.mesh
    h = model.features
    v = model.vocabulary
    (sequences,) = mesh.block((batch,), (tuple(mesh.batch) or None,), "A batch")
    tokens = sequences * length
    shapes: Shapes = [((v, h), "table"), ((h,), "hidden"), ((h,), "hidden")]
    if model.positions:
        shapes.append(((model.positions, h), "positions"))
    head = _tied_head(mesh, tokens, v, h)
    if not model.tied:
        head = sum(_dense(mesh, tokens, h, v, "column"), start=Cost())
        shapes.append(((h, v), "column"))
    return (
        _embedding(mesh, tokens, v, h)
        + (_block(model, tokens, length) + _parameters(mesh, _block_shapes(h))) * model.layers
        + sum(_normalisation(mesh, tokens), start=Cost())
        + head
        + _loss(mesh, tokens)
        + _parameters(mesh, shapes)
    )


def _block(model: Transformer, tokens: int, length: int) -> Cost:
    """Both passes of a block, and the forward pass again where it is rematerialised."""
    mesh = model.mesh
    h = model.features
    work = Cost(operations=4 * tokens * length * (h // mesh.size(mesh.inner)))  # scores and context
    attention = [
        _dense(mesh, tokens, h, 3 * h, "column"),
        (work, work * 2),
        _dense(mesh, tokens, h, h, "row"),
    ]
    up = _dense(mesh, tokens, h, 4 * h, "column")
    down = _dense(mesh, tokens, 4 * h, h, "row")
    passes = zip(
        _normalisation(mesh, tokens), _normalisation(mesh, tokens), *attention, up, strict=True
    )
    forward, backward = (sum(costs, start=Cost()) for costs in passes)
    # What the last product gives is not needed for the backward pass.
    return forward * (2 if model.remat else 1) + backward + down[0] + down[1]


def _block_shapes(h: int) -> Shapes:
    matrices: Shapes = [
        ((h, 3 * h), "column"),
        ((h, h), "row"),
        ((h, 4 * h), "column"),
        ((4 * h, h), "row"),
    ]
    biases: Shapes = [((3 * h,), "inner"), ((4 * h,), "inner"), ((h,), "hidden"), ((h,), "hidden")]
    norms: Shapes = [((h,), "hidden")]
    return matrices + biases + norms * 4


def _dense(mesh: Mesh, tokens: int, k: int, n: int, cut: str) -> tuple[Cost, Cost]:
    """M x K times K x N: SUMMA on a grid, one all-reduce in one direction on a line."""
    work = Cost(operations=2 * tokens * k * n // mesh.size(mesh.inner))
    if mesh.col:
        q = mesh.side
        once = _gather(q, tokens * k // q) + _gather(q, k * n // q**2)
        return work + once, work * 2 + once * 2
    if cut == "column":
        return work, work * 2 + _all_reduce(mesh.size(mesh.inner), tokens * k)
    return work + _all_reduce(mesh.size(mesh.inner), tokens * n), work * 2


def _normalisation(mesh: Mesh, tokens: int) -> tuple[Cost, Cost]:
    cut = mesh.size(mesh.hidden)
    return _all_reduce(cut, tokens) * 2, _all_reduce(cut, 2 * tokens)


def _embedding(mesh: Mesh, tokens: int, v: int, h: int) -> Cost:
    if mesh.col:
        return _gather(mesh.side, v * h // mesh.side**2) * 2  # and the gradient's reduce-scatter
    return _all_reduce(mesh.size(mesh.inner), tokens * h)


def _tied_head(mesh: Mesh, tokens: int, v: int, h: int) -> Cost:
    work = Cost(operations=6 * tokens * v * h // mesh.size(mesh.inner))
    if mesh.col:
        q = mesh.side
        return work + (_gather(q, tokens * v // q) + _gather(q, v * h // q**2)) * 3
    return work + _all_reduce(mesh.size(mesh.inner), tokens * h)


def _loss(mesh: Mesh, tokens: int) -> Cost:
    inner = mesh.size(mesh.inner)
    return (
        _all_reduce(inner, tokens)
        + _all_reduce(inner, 2 * tokens)
        + _all_reduce(mesh.size(mesh.batch), 1)
    )


def _parameters(mesh: Mesh, shapes: Shapes) -> Cost:
    """Returns the cost of a rank's parameters: their memory, and the sums of gradients over ranks
    with other data.
    """
    cost = Cost()
    for shape, role in shapes:
        spec = mesh.spec(role)
        elements = math.prod(mesh.block(shape, spec, f"A parameter `{role}`"))
        cost += Cost(weights_bytes=elements * ITEM_BYTES) + _all_reduce(
            mesh.size(mesh.summed(spec)), elements
        )
    return cost


def _gather(ranks: int, elements: int) -> Cost:
    """An all-gather of so many elements a rank, or a reduce-scatter that leaves as many."""
    return Cost(messages=ranks - 1, received_bytes=(ranks - 1) * elements * ITEM_BYTES)


def _all_reduce(ranks: int, elements: int) -> Cost:
    sent = -(-2 * (ranks - 1) * elements * ITEM_BYTES // ranks)
    return Cost(messages=2 * (ranks - 1), received_bytes=sent)
