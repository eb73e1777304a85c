"""Rival: PyTorch DistributedDataParallel with gloo, whose buckets overlap its own backward pass.
One job.

The variant `bfloat16` uses PyTorch's own compression hook, but under a different name: DDP refuses
the hook by its name unless NCCL is available, although gloo can sum bfloat16. The variant
`post-local` is PyTorch's post-local SGD without a warm-up: ranks don't exchange gradients, but
average all parameters every `EVERY` steps. The program also measures PyTorch's c, i.e. the step
under `no_sync`.
"""

# There's no `from __future__ import annotations` here, because DDP inspects the annotations of its
# hook and needs the classes rather than their names.
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from rivals import torch_models
from rivals.cases import EVERY, RANKS, WARM_UP
from rivals.serving import arguments, own_jobs, rest, serve


def main() -> int:
    args = arguments(__doc__)
    ((number, spec),) = own_jobs(args)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_flush_denormal(True)  # as XLA does
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://h0:{args.port}", rank=args.rank, world_size=RANKS
    )
    torch.manual_seed(number)
    work = torch_models.work(spec, seed=RANKS * number + args.rank)
    trainer = Trainer(work)

    def prepare(variant: str) -> None:
        if trainer.variant != variant:
            trainer.wrap(variant)
        trainer.run(
            WARM_UP
        )  # the first step finds out the order of the gradients, the second one has its buckets

    def run(steps: int, variant: str) -> None:
        if variant != trainer.variant:
            raise RuntimeError(f"`{variant}` was not prepared, but `{trainer.variant}`")
        trainer.run(steps)

    def compute(job: int, steps: int) -> dict[str, Any]:
        assert trainer.model is not None
        with trainer.model.no_sync():
            trainer.run(1)
            dist.barrier()
            return {"raw": trainer.timed(steps)}

    return serve(args, args.rank, {"prepare": prepare, "run": run, "compute": compute})


def compressed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Calls PyTorch's hook under another name, because DDP refuses it by its name without NCCL."""
    return bf16_compress_hook(state, bucket)


class Trainer:
    """A model that is wrapped again for each variant, because DDP's hooks can't be removed."""

    def __init__(self, work: torch_models.Work) -> None:
        self.work = work
        self.model: DistributedDataParallel | None = None
        self.averager: PeriodicModelAverager | None = None
        self.variant = ""

    def wrap(self, variant: str) -> None:
        self.model = None
        self.work.optimizer.zero_grad(set_to_none=True)
        rest()
        # statistics stay local, as under the other rivals; gradients live in the buckets, which
        # saves a copy
        model = DistributedDataParallel(
            self.work.model, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.averager = None
        if variant == "bfloat16":
            model.register_comm_hook(None, compressed)
        if variant == "post-local":
            state = PostLocalSGDState(
                None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False
            )
            model.register_comm_hook(state, post_localSGD_hook)
            self.averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
        self.model, self.variant = model, variant

    def run(self, steps: int) -> None:
        assert self.model is not None
        for _ in range(steps):
            loss = self.work.loss(self.model)
            loss.backward()
            self.work.optimizer.step()
            if self.averager is not None:
                self.averager.average_parameters(self.model.parameters())
            self.work.optimizer.zero_grad()

    def timed(self, steps: int) -> list[float]:
        raw = []
        for _ in range(steps):
            start = time.perf_counter()
            self.run(1)
            raw.append(time.perf_counter() - start)
        return raw


if __name__ == "__main__":
    raise SystemExit(main())
