"""The models of `workloads.py` in PyTorch, with equal layers, losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from rivals.cases import Spec

STAGES = {
    "resnet8": ((1, 1, 1), 16, False),
    "resnet18": ((2, 2, 2, 2), 64, False),
    "resnet50": ((3, 4, 6, 3), 64, True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model and its optimizer on fixed data. `loss(model)` is one forward pass."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], torch.Tensor]


def work(spec: Spec, *, seed: int) -> Work:
    """Makes a model, initialised by torch's global generator, and data that depends on `seed`."""
    sizes, data = spec.sizes(), torch.Generator().manual_seed(seed)
    batch, model = sizes["batch_size"], module(spec)
    if spec.model == "transformer":
        tokens = torch.randint(sizes["vocabulary"], (batch, sizes["length"]), generator=data)

        def next_token(model: Any) -> torch.Tensor:
            return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

        return Work(
            model=model,
            loss=next_token,
            optimizer=torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-4, fused=True),
        )
    # oneDNN's convolutions are faster with channels last, and the JAX model has the same layout.
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, sizes["image_size"], sizes["image_size"], generator=data)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(sizes["classes"], (batch,), generator=data)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4, fused=True
    )
    return Work(
        model=model, optimizer=optimizer, loss=lambda model: F.cross_entropy(model(images), labels)
    )


def module(spec: Spec) -> nn.Module:
    """Returns only the model."""
    sizes = spec.sizes()
    if spec.model == "transformer":
        return Transformer(sizes["layers"], sizes["width"], sizes["length"], sizes["vocabulary"])
    return ResNet(spec.model, sizes["classes"])


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """A residual block: two 3x3 convolutions or, if `deep`, a bottleneck of 1x1, 3x3 and 1x1.

    In a bottleneck, the 3x3 convolution has the stride, and the last one gives four times as many
    filters.
    """

    def __init__(self, inputs: int, filters: int, stride: int, deep: bool) -> None:
        super().__init__()
        outputs = 4 * filters if deep else filters
        shapes = (
            [(inputs, filters, 1, 1), (filters, filters, 3, stride), (filters, outputs, 1, 1)]
            if deep
            else [(inputs, filters, 3, stride), (filters, filters, 3, 1)]
        )
        self.body = nn.ModuleList(_conv(*shape) for shape in shapes)
        nn.init.zeros_(self.body[-1][1].weight)  # type: ignore[index]
        self.shortcut = (
            None if inputs == outputs and stride == 1 else _conv(inputs, outputs, 1, stride)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for place, layer in enumerate(self.body):
            y = layer(y) if place == len(self.body) - 1 else F.relu(layer(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """Maps images of shape `[batch, 3, height, width]` to logits.

    `filters` replaces the model's usual number of filters in its first layer.
    """

    def __init__(self, name: str, classes: int, filters: int | None = None) -> None:
        super().__init__()
        stages, usual, deep = STAGES[name]
        filters = usual if filters is None else filters
        self.stem = _conv(3, filters, 7, 2)
        blocks, width = [], filters
        for stage, count in enumerate(stages):
            for place in range(count):
                blocks.append(
                    Block(width, filters * 2**stage, 2 if stage > 0 and place == 0 else 1, deep)
                )
                width = filters * 2**stage * (4 if deep else 1)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class TransformerBlock(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Maps token ids of shape `[batch, length]` to logits."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position)))
