"""What a training step of a `Transformer` costs a rank: messages, bytes, operations and memory.

The time of a step is estimated with an alpha-beta model:

    seconds = alpha_s * messages + received_bytes / bytes_per_s + operations / operations_per_s

Everything is derived from the model's shapes, without running a step or sending anything. The byte
counts are exact: a test compares them with the exchanges in a traced step. The time is only an
estimate, which assumes that exchanges and computation don't overlap, that all links are equally
fast, and that each collective receives the minimum number of bytes.

If each of P ranks contributes n bytes, a rank receives:

- 2(P-1)/P n bytes in 2(P-1) messages for an all-reduce (as a ring),
- (P-1) n bytes in P-1 messages for an all-gather,
- (P-1)/P n bytes in P-1 messages for a reduce-scatter.
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
Shapes = list[tuple[tuple[int, ...], Role]]  # global shapes of parameters, with their roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The speed of the ranks and of the network between them, which you measure yourself.

    All ranks are assumed to be equally fast.

    Attributes:
        alpha_s: Seconds that each message takes on top of the time for its bytes.
        bytes_per_s: Bytes that a rank receives per second.
        operations_per_s: Floating-point operations that a rank performs per second in matrix
            products of the model's shapes.
    """

    alpha_s: float
    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One rank's share of a training step.

    Attributes:
        messages: Number of messages that the rank waits for, one after another.
        received_bytes: Number of bytes that the rank receives over the network.
        operations: Number of floating-point operations in the matrix products. A multiplication
            followed by an addition counts as two.
        weights_bytes: Size of the rank's parameters alone. Adam's state takes up twice as much on
            top of that, and gradients temporarily need memory, too.
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
        """Estimates the seconds that a rank spends on the network."""
        return machine.alpha_s * self.messages + self.received_bytes / machine.bytes_per_s

    def compute_s(self, machine: Machine) -> float:
        """Estimates the seconds that a rank spends computing."""
        return self.operations / machine.operations_per_s

    def seconds(self, machine: Machine) -> float:
        """Estimates the seconds that a step takes, if exchanges and computation don't overlap."""
        return self.exchange_s(machine) + self.compute_s(machine)


def step_cost(model: Transformer, batch: int, length: int) -> Cost:
    """Returns what it costs a rank to compute the loss and its gradients.

    This includes `cross_entropy`, but none of the optimizer's exchanges.

    ```python
    model = tensor.Transformer(50304, 4096, 32, 64, 512, tensor.Mesh(side=4, depth=4))
    tensor.step_cost(model, batch=96, length=512).received_bytes
    ```

    Args:
        model: A float32 model on a mesh of any size.
        batch: Total number of sequences across all ranks.
        length: Number of tokens per sequence.

    Raises:
        ValueError: The model isn't float32, or it can't process such a batch because the sequences
            are too long, or because the batch or the heads can't be divided equally.
    """
    if any(jnp.dtype(kind) != jnp.float32 for kind in (model.dtype, model.param_dtype)):
        raise ValueError(
            f"The model computes in `{model.dtype}` and keeps its parameters in "
            f"`{model.param_dtype}`, but `step_cost` only knows the cost of float32, because "
            "16-bit sums are exchanged differently. Clone the model with dtype=jnp.float32, "
            "param_dtype=jnp.float32."
        )
    if batch < 1 or length < 1:
        raise ValueError(
            f"`batch` and `length` of `step_cost` must be at least 1, got {batch} sequences of "
            f"{length} tokens."
        )
    # Trace the model's initialisation, just so that the model raises its own errors.
    partition(model.clone(layers=1), jax.ShapeDtypeStruct((batch, length), jnp.int32))
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
    """Returns the cost of a block's forward and backward pass.

    If the block is rematerialised, this includes a second forward pass.
    """
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
    # A rematerialised block repeats its forward pass, except for the last product, whose result
    # the backward pass doesn't need.
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
    """Returns the costs of a dense layer's forward and backward pass.

    The layer multiplies a tokens x k matrix by a k x n matrix, using SUMMA on a grid.
    """
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
        # Twice: the gradient's reduce-scatter costs as much as the all-gather.
        return _gather(mesh.side, v * h // mesh.side**2) * 2
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
    """Returns the memory of a rank's parameters, and the cost of summing their gradients.

    Gradients are summed over ranks that have different data.
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
    """Returns the cost of an all-gather of `elements` per rank, or of a reduce-scatter to them."""
    return Cost(messages=ranks - 1, received_bytes=(ranks - 1) * elements * ITEM_BYTES)


def _all_reduce(ranks: int, elements: int) -> Cost:
    sent = -(-2 * (ranks - 1) * elements * ITEM_BYTES // ranks)
    return Cost(messages=2 * (ranks - 1), received_bytes=sent)
