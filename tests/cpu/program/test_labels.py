"""Labels detect exchanges traced in different orders on ranks that compute the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.program.exchange_labels import labelled, order_of
from jaxcross.program.flatten import UNROLLED
from jaxcross.program.text import parse
from jaxcross.program.trace import Traced, trace
from jaxcross.program.value_marks import Scope, leaf_hashes, marked
from jaxcross.step.exchange_agreement import order_hash
from jaxcross.testing import LocalRanks
from tests.support.label_ranks import ORDERS, TREE, X, both, program_of, verdict


def of_leaves(order: Any, tree: Any) -> Any:
    return {k: lax.pmean(tree[k], "x") for k in order}


def of_computed(order: Any, tree: Any) -> Any:
    """Exchanges between two products, so element-wise equations reach no leaf."""
    return {k: jnp.sum(lax.psum(X @ tree[k].T, "x")) for k in order}


def of_gradients(order: Any, tree: Any) -> Any:
    grads = jax.grad(lambda t: sum(jnp.sum(jnp.tanh(X @ t[k].T)) for k in sorted(t)))(tree)
    return {k: tree[k] - lax.pmean(grads[k], "x") for k in order}


def added_up(order: Any, tree: Any) -> Any:
    """The order in which results are summed differs as well."""
    weights = {"a": 1.0, "b": 10.0, "c": 100.0}
    total: Any = 0.0
    for k in order:
        total += weights[k] * jnp.sum(lax.psum(X @ tree[k].T, "x") @ tree[k])
    return total


def of_constants(order: Any, tree: Any) -> Any:
    known = {k: np.full(3, n, np.float32) for n, k in enumerate(sorted(order))}
    return {k: lax.psum(jnp.asarray(known[k]), "x") * tree[k][0, 0] for k in order}


def of_functions(order: Any, tree: Any) -> Any:
    functions = {"a": jnp.tanh, "b": jnp.sin, "c": jnp.exp}
    made = {k: lax.pmax(functions[k](tree["a"]), "x") for k in order}
    return made["a"] - made["b"] / made["c"]


def gathered(order: Any, tree: Any) -> Any:
    return {k: lax.all_gather(tree[k], "x") for k in order}


def passed_on(order: Any, tree: Any) -> Any:
    return {k: lax.ppermute(tree[k], "x", [(0, 1), (1, 0)]) for k in order}


def in_a_long_scan(order: Any, tree: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return {**carry, **{k: lax.pmean(carry[k], "x") for k in order}}, None

    return lax.scan(body, tree, None, length=UNROLLED + 1)[0]


def in_a_while(order: Any, tree: Any) -> Any:
    def body(carry: Any) -> Any:
        return {k: jax.jit(lambda v: lax.psum(v, "x"))(carry[k]) for k in order}

    return lax.while_loop(lambda c: jnp.sum(lax.pmax(c["a"], "x")) < 100, body, tree)


def in_a_scan_and_a_cond(order: Any, tree: Any) -> Any:
    def body(carry: Any, n: Any) -> Any:
        taken = lax.cond(
            n > 1, lambda c: {k: lax.psum(c[k], "x") for k in order}, lambda c: c, carry
        )
        return taken, None

    return lax.scan(body, tree, jnp.arange(3))[0]


def by_data(order: Any, tree: Any) -> Any:
    """Uses a conditional that the host can't decide."""
    agreed = lax.pmax(tree["a"][0, 0], "x") > 0
    return lax.cond(agreed, lambda t: {k: lax.psum(t[k], "x") for k in order}, lambda t: t, tree)


def rematerialised(order: Any, tree: Any) -> Any:
    @jax.checkpoint
    def layer(t: Any) -> Any:
        return sum(jnp.sum(lax.psum(X @ t[k].T, "x") ** 2) for k in order)

    return jax.grad(layer)(tree)


def of_rows(order: Any, tree: Any) -> Any:
    """Exchanges parts of one leaf for parts of one result."""
    out, n = jnp.zeros((3, 3)), {k: n for n, k in enumerate(sorted(order))}
    for k in order:
        out = out.at[n[k]].set(lax.pmean(tree["a"][n[k]], "x"))
    return out


def of_scaled_rows(order: Any, tree: Any) -> Any:
    n = {k: n for n, k in enumerate(sorted(order))}
    return sum((n[k] + 1) * lax.pmean(tree["a"][n[k]], "x") for k in order)


def of_stacked_layers(order: Any, tree: Any) -> Any:
    layers, n = (
        jnp.stack([tree[k] for k in sorted(order)]),
        {k: n for n, k in enumerate(sorted(order))},
    )
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(X @ p[0].T @ p[1]) @ p[2].T))(layers)
    for k in order:
        layers = layers.at[n[k]].add(-0.1 * lax.pmean(grads[n[k]], "x"))
    return layers


def of_sliced_rows(order: Any, tree: Any) -> Any:
    """Uses `dynamic_slice` and `dynamic_update_slice`."""
    out, n = tree["b"], {k: n for n, k in enumerate(sorted(order))}
    for k in order:
        row = lax.pmean(lax.dynamic_slice_in_dim(tree["a"], n[k], 1), "x")
        out = lax.dynamic_update_slice(out, row, (n[k], 0))
    return out


def of_split_rows(order: Any, tree: Any) -> Any:
    parts = dict(zip(sorted(order), jnp.split(tree["a"][:3], 3), strict=True))
    means = {k: lax.pmean(parts[k], "x") for k in order}
    return jnp.concatenate([means[k] for k in sorted(order)])


# These steps put their exchanges into a list or tuple, where a result's position depends on the
# order of tracing. If ranks trace in different orders, no exchange of one rank has the same origin
# and also the same use as an exchange of the other rank, so the exchanges can't be matched up.


def into_a_list(order: Any, tree: Any) -> Any:
    return [lax.pmean(tree[k], "x") for k in order]


def into_a_tuple(order: Any, tree: Any) -> Any:
    return tuple(lax.psum(X @ tree[k].T, "x") for k in order)


def alongside_a_state(order: Any, tree: Any) -> Any:
    return {k: v + 1 for k, v in tree.items()}, [lax.pmean(jnp.sum(tree[k]), "x") for k in order]


def list_of_gradients(order: Any, tree: Any) -> Any:
    grads = jax.grad(lambda t: sum(jnp.sum(jnp.tanh(X @ t[k].T)) for k in sorted(t)))(tree)
    return [lax.pmean(grads[k], "x") for k in order]


def list_of_a_dict(order: Any, tree: Any) -> Any:
    filled = {k: 2 * tree[k] for k in order}
    return [lax.pmean(v, "x") for v in filled.values()]


def list_of_rows(order: Any, tree: Any) -> Any:
    return [lax.pmean(tree["a"][sorted(order).index(k)], "x") for k in order]


def list_with_zeros(order: Any, tree: Any) -> Any:
    """Swapping the exchanges of `a` and `b` can't be intended, since values are their origins."""
    known = {**tree, "c": jnp.zeros_like(tree["c"])}
    return [lax.pmean(known[k], "x") for k in order]


def named_by_place(order: Any, tree: Any) -> Any:
    """Here an exchange's use is identified by a name, but its origin only by its position."""
    return {
        k: lax.pmean(v, "x") for k, v in zip(order, (tree[k] for k in sorted(order)), strict=True)
    }


SWAPPED = [
    of_rows,
    of_scaled_rows,
    of_stacked_layers,
    of_sliced_rows,
    of_split_rows,
    of_leaves,
    of_computed,
    of_gradients,
    added_up,
    of_constants,
    of_functions,
    gathered,
    passed_on,
    in_a_long_scan,
    in_a_while,
    in_a_scan_and_a_cond,
    by_data,
    rematerialised,
    into_a_list,
    into_a_tuple,
    alongside_a_state,
    list_of_gradients,
    list_of_a_dict,
    list_of_rows,
    list_with_zeros,
    named_by_place,
]


@pytest.mark.mostly_integration(
    "gathered-0",
    "gathered-1048576",
    "passed_on-0",
    "passed_on-1048576",
    "in_a_long_scan-0",
    "into_a_list-0",
    "list_of_gradients-0",
    "list_of_a_dict-0",
    "list_of_rows-0",
    "list_with_zeros-0",
    "named_by_place-0",
)
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("step", SWAPPED)
def test_swapped_exchanges_are_an_error(step: Any, bucket_bytes: int) -> None:
    assert both(step, TREE, bucket_bytes=bucket_bytes).startswith(
        "ranks 0 and 1 make the exchanges of `<lambda>` in d"
    )


@pytest.mark.mostly_integration(
    "of_constants", "of_functions", "gathered", "passed_on", "in_a_long_scan"
)
@pytest.mark.parametrize("step", SWAPPED)
def test_equal_orders_are_no_error(step: Any) -> None:
    assert both(step, TREE, orders=[ORDERS[1]] * 3) == ""


def test_swapped_gradients_of_different_losses() -> None:
    """Exchanges reach the same leaves, whatever comes before."""

    def step(rank: Any, tree: Any) -> Any:
        loss = (lambda y: jnp.sum(y**2), lambda y: jnp.linalg.norm(jnp.cumsum(y)))[rank]
        grads = jax.grad(lambda t: loss(sum(X @ t[k].T for k in sorted(t))))(tree)
        mean = {k: lax.pmean(grads[k], "x") for k in ORDERS[rank]}
        return {k: tree[k] - 0.1 * mean[k] for k in tree}

    assert both(step, TREE, orders=(0, 1)).startswith(
        "ranks 0 and 1 make the exchanges of `<lambda>` in different or"
    )


@pytest.mark.parametrize("cut", [3, "auto"])
def test_swapped_exchanges_of_a_finer_cut(cut: Any) -> None:
    """Pieces are ordered by readiness, and within a piece by tracing order."""
    assert both(of_leaves, TREE, cut=cut, bucket_bytes=0)
    assert both(of_leaves, TREE, cut=cut, bucket_bytes=0, orders=[ORDERS[1]] * 2) == ""


def test_finer_cut_may_make_orders_equal() -> None:
    """Exchanges are sent when ready, so the order on the wire matters, not that of tracing."""

    def chain(order: Any, tree: Any) -> Any:
        deep = {
            "a": jnp.sin(X @ tree["a"].T),
            "b": jnp.cumsum(jnp.sin(X @ tree["b"].T) @ X, 0) @ X.T,
        }
        return {k: lax.psum(deep[k], "x") for k in order}

    orders = ("a", "b"), ("b", "a")
    assert both(chain, TREE, orders=orders)
    assert both(chain, TREE, orders=orders, cut=2, bucket_bytes=0) == ""


def test_swapped_exchanges_in_a_shard_map() -> None:
    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.AbstractMesh((2,), ("x",))

    def step(order: Any, tree: Any) -> Any:
        body = lambda t: {k: lax.psum(jnp.sum(t[k], 0), "x") for k in order}  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=spec("x"), out_specs=spec())(tree)

    assert both(step, TREE) and both(step, TREE, orders=[ORDERS[0]] * 2) == ""


def test_message_names_ranks_numbers_leaves_and_lines() -> None:
    def step(order: Any, tree: Any) -> Any:
        return {k: lax.pmean(tree[k], "x") for k in order}  # the user's line

    line = f"{__file__}:{step.__code__.co_firstlineno + 1}"
    first, *lines, remedy = both(
        step, {"a": X, "b": X}, orders=(("a", "b"), ("b", "a")), bucket_bytes=0
    ).splitlines()
    assert first == (
        "ranks 0 and 1 make the exchanges of `<lambda>` in different orders, which would mix "
        "their values:"
    )
    a, b = (
        "`psum` of `args[0]['a']` for `result['a']`",
        "`psum` of `args[0]['b']` for `result['b']`",
    )
    assert [text.partition(", at ")[0].strip() for text in lines] == [
        "rank 0:",
        f"exchange 1: {a}",
        f"exchange 2: {b}",
        "rank 1:",
        f"exchange 1: {b}",
        f"exchange 2: {a}",
    ]
    assert sum(line in text for text in lines) == 4
    assert "sort the names" in remedy
    assert "part 2 of exchange 1: `psum` of `args[0]['a']`" in both(
        step, {"a": X, "b": X}, orders=("ab", "ba")
    )


def test_one_rank_of_four_is_found() -> None:
    programs = [
        program_of(lambda t, o=ORDERS[rank == 2]: of_leaves(o, t), TREE, axes={"x": 4})
        for rank in range(4)
    ]
    assert verdict(programs).startswith(
        "ranks 0 and 2 make the exchanges of `<lambda>` in different orders"
    )


# What labels consist of.


def test_leaves_are_known_by_their_paths() -> None:
    def leaves(tree: Any) -> list[int]:
        return leaf_hashes(jax.tree.structure(tree))

    assert leaves({"a": 1, "b": 2})[1] == leaves({"b": 2})[0] != leaves({"a": 1})[0]
    assert len(set(leaves(([1, (2, 3)], {"a": 4}, 5)))) == 5
    assert leaves((1, None)) != leaves((1,)) and leaves((1, None))[0] == leaves((1, 2))[0]
    assert leaves((1, 2))[1] not in leaves((1, 2, 3))


HASHED = """
from tests.support.label_ranks import TREE, program_of
from jax import lax
from jaxcross.step.exchange_agreement import order_hash
print(order_hash(program_of(lambda t: lax.pmean(t, "x"), TREE)))
"""


@pytest.mark.integration
def test_labels_are_the_same_in_every_process() -> None:
    """Python salts its string hashes in each process."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", HASHED], env=env, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == order_hash(program_of(lambda t: lax.pmean(t, "x"), TREE))


def test_program_read_from_text_has_no_labels() -> None:
    program = program_of(lambda t: lax.pmean(t, "x"), TREE)
    assert order_of(parse(program.text())) == [] and len(order_of(program)) == 3


def wide(leaves: int) -> Traced:
    """Returns updates of many leaves by a scalar of them all, and a long sum of leaves."""

    def step(params: Any, x: Any) -> Any:
        grads = lax.pmean(jax.grad(lambda p: sum(jnp.sum(jnp.tanh(w * x)) for w in p))(params), "x")
        scale, total = lax.pmax(sum(g[0] for g in grads), "x"), x
        for w in params:
            total = total + w
        return [w - scale * g for w, g in zip(params, grads, strict=True)], lax.psum(total, "x")

    args = [jnp.ones(3)] * leaves, jnp.ones(3)
    return trace(step, args, axes={"x": 2}, wire=LocalRanks())


@pytest.mark.integration
def test_cost_is_linear_in_the_number_of_leaves() -> None:
    """Counts function calls, each of which handles a bounded number of leaves."""

    def calls(leaves: int) -> int:
        traced, count = wide(leaves), 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        try:
            labelled(traced)
        finally:
            sys.setprofile(None)
        return count

    few, many = calls(40), calls(160)
    assert many < 4.2 * few
    scope: Scope = marked(wide(160))
    marks = [*scope.origins.values(), *scope.uses.values()]
    assert max(len(m.leaves) + len(m.others) for m in marks) <= 64
