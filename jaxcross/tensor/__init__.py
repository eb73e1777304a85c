"""Tensor parallelism as Flax layers: Megatron-LM's 1-D, Optimus' 2-D, and SUMMA2.5-LM's 2.5-D.

You write a model just once, with a field `mesh`. How its parameters are divided among the ranks
depends on the mesh you pass; with `Mesh()`, you get the ordinary model on a single rank. The
layouts are described in `docs/reference/tensor-layouts.md`. The 2.5-D layout is also the one used
by Tesseract.

mesh          axes and layouts: which rank holds which part of a tensor
layers        dense layer, normalisation, embedding
transformer   a Transformer made of these layers
normalise     normalisation over features that are split across ranks
loss          cross-entropy over a vocabulary that's split across ranks
summa         products of matrices that are cut into q x q blocks
copy_reduce   the two collectives of 1-D parallelism, with their derivatives
shards        converts between the serial model's parameters and each rank's: partition,
              initialise, split, join, compare
norms         norms of trees that are split across ranks, and clipping by the global norm
cost          bytes, messages, operations and memory of a step, and an estimate of its time
"""

from jaxcross.tensor.copy_reduce import copy_to, reduce_from
from jaxcross.tensor.cost import Cost, Machine, step_cost
from jaxcross.tensor.layers import Dense, Embedding, LayerNorm, RMSNorm, parameter
from jaxcross.tensor.loss import cross_entropy
from jaxcross.tensor.mesh import Mesh
from jaxcross.tensor.norms import clip_by_global_norm, global_norm
from jaxcross.tensor.shards import (
    check_replicas,
    gather,
    init,
    partition,
    replica_spread,
    shard,
    state_specs,
    unshard,
)
from jaxcross.tensor.transformer import MLP, Attention, Block, Transformer

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "Cost",
    "Dense",
    "Embedding",
    "LayerNorm",
    "Machine",
    "Mesh",
    "RMSNorm",
    "Transformer",
    "check_replicas",
    "clip_by_global_norm",
    "copy_to",
    "cross_entropy",
    "gather",
    "global_norm",
    "init",
    "parameter",
    "partition",
    "reduce_from",
    "replica_spread",
    "shard",
    "state_specs",
    "step_cost",
    "unshard",
]


def __dir__() -> list[str]:
    return [*__all__]
