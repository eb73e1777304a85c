"""Where an exchange's work ends up in a cut step: selection and products in compute segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcross import exchange
from jaxcross.program import stages
from jaxcross.program.op_cost import HOST_OPS
from jaxcross.program.stages import cut
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide

RANKS = 4
WIRES = {"psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "reduce_scatter"}
PARAMS = {
    "kernel": jax.ShapeDtypeStruct((256, 512), jnp.float32),
    "bias": jax.ShapeDtypeStruct((512,), jnp.float32),
}


def primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from primitives(getattr(inner, "jaxpr", inner))


def by_kind(tx: optax.GradientTransformation) -> dict[str, Counter[str]]:
    """Returns how often each primitive occurs in compute and in collective segments."""
    state = jax.eval_shape(tx.init, PARAMS)
    args = (PARAMS, state, PARAMS)
    traced = trace(
        lambda g, s, p: tx.update(g, s, p), args, axes={"batch": RANKS}, wire=LocalRanks()
    )
    found: dict[str, Counter[str]] = {"compute": Counter(), "collective": Counter()}
    for segment in cut(decide(traced, jax.tree.leaves(args))).segments:
        found[segment.kind].update(primitives(segment.jaxpr))
    return found


@pytest.mark.mostly_integration("top_k exact", "power_sgd", "qsgd", "adasum")
@pytest.mark.parametrize(
    ("tx", "work"),
    [
        (exchange.top_k(0.01, "batch", selection="exact"), {"top_k"}),
        (exchange.top_k(0.01, "batch", selection="threshold"), {"while", "scan"}),
        (exchange.gtop_k(0.01, "batch"), {"top_k", "while", "scan"}),
        (exchange.power_sgd(2, "batch"), {"dot_general"}),
        (exchange.qsgd(127, "batch"), {"random_bits", "threefry2x32"}),
        (exchange.adasum("batch"), {"dot_general", "reduce_sum"}),
    ],
    ids=["top_k exact", "top_k threshold", "gtop_k", "power_sgd", "qsgd", "adasum"],
)
def test_heavy_work_is_in_compute_segments(
    tx: optax.GradientTransformation, work: set[str]
) -> None:
    found = by_kind(tx)
    assert set(found["compute"]) & work
    assert set(found["collective"]) <= HOST_OPS | WIRES


@pytest.mark.parametrize("pattern", ["auto", "ring", "tree", "hierarchical"])
@pytest.mark.parametrize("wire_dtype", [None, jnp.bfloat16])
def test_mean_hop_values_stay_inside_the_segment(pattern, wire_dtype):
    """A non-finite value inside it is non-finite at its end, so `nonfinite` needn't check there."""
    axes, names = (
        ({"node": 2, "local": 2}, ("node", "local"))
        if pattern == "hierarchical"
        else ({"batch": 4}, "batch")
    )
    tx = exchange.mean(names, pattern=pattern, wire_dtype=wire_dtype)
    program = stages.cut(
        trace(
            lambda g: tx.update(g, optax.EmptyState())[0], (PARAMS,), axes=axes, wire=LocalRanks()
        )
    )
    assert program.collectives
    assert [len(s.jaxpr.jaxpr.outvars) for s in program.segments] == [
        len(s.outputs) for s in program.segments
    ]
