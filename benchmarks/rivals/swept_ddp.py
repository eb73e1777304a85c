"""PyTorch DDP with gloo: the trials of `sweep_to_target.py`, each on the controller's command."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from rivals import digits, torch_models
from rivals.cases import RANKS
from rivals.serving import arguments, serve, total_cpu_s

BUCKETS = 4
"""With DDP's usual buckets of 25 MB, a model of this size would have one or two, so it couldn't
overlap its exchange with its own backward pass.
"""


def network(sweep: digits.Sweep) -> torch_models.ResNet:
    """Returns the model with its first weights. JAX begins with the same ones."""
    model = torch_models.ResNet(sweep.model, digits.CLASSES, sweep.filters)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        flax_shapes = [
            tuple(layer.weight.permute(_axes(layer, back=False)).shape) for layer in layers
        ]
        for layer, kernel in zip(layers, digits.kernels(flax_shapes), strict=True):
            layer.weight.copy_(torch.from_numpy(kernel).permute(_axes(layer, back=True)))
        nn.init.zeros_(model.head.bias)
    # oneDNN's convolutions are faster with channels last, and the JAX model has the same layout.
    return model.to(memory_format=torch.channels_last)


def _axes(layer: nn.Module, *, back: bool) -> tuple[int, ...]:
    """Returns the order of a weight's axes as in Flax, or, if `back`, from there to PyTorch's."""
    if isinstance(layer, nn.Linear):
        return 1, 0
    return (3, 2, 0, 1) if back else (2, 3, 1, 0)


def tensors(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images as `[batch, 3, height, width]`, stored with channels last, and labels."""
    images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2)
    return images, torch.from_numpy(batch["label"].astype(np.int64))


def train(sweep: digits.Sweep, rank: int, rate: float, momentum: float) -> dict[str, Any]:
    """Trains one trial until it has reached the target, or used up its steps."""
    begin, first_step = time.monotonic(), None
    curve: list[tuple[int, float, float]] = []
    model = network(sweep)
    parameters = sum(p.numel() for p in model.parameters())
    # Statistics stay local, as they do in JAX. Gradients live in the buckets, which saves a copy.
    parallel = DistributedDataParallel(
        model,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=4 * parameters / BUCKETS / 2**20,
    )
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum, fused=True)
    share, labels = tensors(digits.held_out(sweep, rank, RANKS))
    step = 0
    for batch in itertools.islice(digits.batches(sweep, rank, RANKS), sweep.limit):
        images, targets = tensors(batch)
        loss = F.cross_entropy(parallel(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if first_step is None:
            first_step = time.monotonic()
        if step % sweep.every == 0:
            model.eval()
            with torch.inference_mode():
                right = (model(share).argmax(1) == labels).float().mean()
            model.train()
            means = torch.stack([loss.detach(), right]) / RANKS
            dist.all_reduce(means)
            curve.append((step, *map(float, means)))
            if curve[-1][2] >= sweep.target:
                break
    return {
        "parameters": parameters,
        "steps": step,
        "score": sweep.score(*curve[-1][::2]),
        "begin": begin,
        "first_step": first_step,
        "end": time.monotonic(),
        "total_cpu_s": total_cpu_s(),
        "curve": curve,
    }


def main() -> int:
    args = arguments(__doc__)
    sweep = digits.sweep_of(args.smoke)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_flush_denormal(True)  # as XLA does
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://h0:{args.port}", rank=args.rank, world_size=RANKS
    )

    def trial(rate: float, momentum: float) -> dict[str, Any]:
        return train(sweep, args.rank, rate, momentum)

    return serve(args, args.rank, {"trial": trial})


if __name__ == "__main__":
    raise SystemExit(main())
