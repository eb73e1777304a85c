"""Values die and are donated at their last use; the step's own state after its last exchange."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxcross import _jax_compat as compat
from jaxcross import tensor
from jaxcross.program import stages
from jaxcross.program.execution import Execution
from jaxcross.program.graph import nbytes
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import workloads

from tests.support.compiled_steps import AXES, N, compiled

FENCE_BYTES = 4
"""The size of an extra result of each compute segment, from which we know that it has ended."""


def alive(execution: Execution) -> set[int]:
    return set(execution._env)


@pytest.mark.mostly_integration("2")
@pytest.mark.parametrize("cut", ["whole", 2])
def test_only_results_and_inputs_remain_at_the_end(cut: Any) -> None:
    done, args = compiled(cut=cut)
    execution = done.execution(jax.tree.leaves((args, {})))
    program = done.program
    for segment in program.segments:
        execution.run(segment.index)
        assert not alive(execution) & set(segment.last_uses)
    assert alive(execution) <= set(program.outputs) | set(program.inputs)
    assert {v for s in program.segments for v in s.last_uses} >= {
        v for s in program.segments for v in s.inputs
    } - set(program.outputs)


def test_stages_are_shown_in_a_line() -> None:
    done, _ = compiled(cut="whole")
    name, axes = done.program.name, ", ".join(f"{axis}={size}" for axis, size in AXES.items())
    assert (
        repr(done.program.traced) == f"<Traced step `{name}` over {axes}; print() shows the jaxpr>"
    )
    assert repr(done) == f"<Compiled step `{name}` of {len(done.runnables)} executables>"


def test_state_is_overwritten_after_the_last_exchange() -> None:
    """The state outlives every exchange and is overwritten after the last one."""
    done, args = compiled()
    state, _ = args
    execution = done.execution(jax.tree.leaves((args, {})))
    for segment in done.program.segments:
        assert not any(x.is_deleted() for x in state.values()), (
            f"given away before segment {segment.index}"
        )
        execution.run(segment.index)
    assert state["w"].is_deleted()
    assert not args[1].is_deleted(), "the batch was not given away"
    assert all(not x.is_deleted() for x in jax.tree.leaves(execution.outputs()))


def test_user_arrays_are_not_overwritten_undonated() -> None:
    done, args = compiled(donate=())
    leaves = jax.tree.leaves((args, {}))
    before = [np.array(x) for x in leaves]
    results = []
    for _ in range(2):
        execution = done.execution(leaves)
        for segment in done.program.segments:
            execution.run(segment.index)
        results.append([np.asarray(x) for x in jax.tree.leaves(execution.outputs())])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(before, leaves, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_an_exchanged_input_is_still_the_users(size: int) -> None:
    """A group of one sends nothing: the result may be the operand's buffer, so it's kept."""

    def step(params: Any) -> Any:
        total = lax.psum(params, "batch")
        return total * 2.0, lax.ppermute(params, "batch", [(i, i) for i in range(size)]) + 1.0

    params = jnp.arange(8.0)
    traced = trace(step, (params,), axes={"batch": size}, wire=LocalRanks())
    done = stages.compile(stages.cut(traced), [params])
    for _ in range(2):
        execution = done.execution([params])
        for segment in done.program.segments:
            execution.run(segment.index)
        total, moved = execution.outputs()
        assert np.array_equal(params, np.arange(8.0))
        assert np.array_equal(total, np.arange(8.0) * 2 * size) and np.array_equal(
            moved, np.arange(8.0) + 1
        )


def test_dead_values_between_segments_are_overwritten() -> None:
    done, _ = compiled()
    reused = 0
    for runnable in done.runnables:
        stats = runnable.call.memory_analysis()
        if runnable.segment.kind == "compute" and stats is not None:
            reused += stats.alias_size_in_bytes
    assert reused >= 2 * N * N * 4, "state and momentum at least"


def places(tree: Any) -> list[int]:
    """Returns the addresses of a tree's arrays. Scalars are omitted: Adam's step count may move."""
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim]


@pytest.mark.mostly_integration("none-orders2")
@pytest.mark.parametrize(
    ("exchanges", "orders"),
    [("now", [(0, 1, 2)]), ("delayed", [(0, 1, 2), (1, 0, 2)]), ("none", [(0,)])],
)
def test_each_array_of_a_state_stays_where_it_is(
    exchanges: str, orders: list[tuple[int, ...]]
) -> None:
    """If arrays of equal shape swapped places, they'd be copied in every step."""
    tx = optax.adam(0.1)
    params = {name: jnp.full((N, N), float(n)) for n, name in enumerate("abc")}

    def step(state: Any, batch: Any) -> Any:
        params, moments, pending = state
        grads = jax.grad(lambda p: sum(jnp.mean(jnp.tanh(batch @ w) ** 2) for w in p.values()))(
            params
        )
        if exchanges == "delayed":
            grads, pending = lax.pmean(pending, "batch"), grads
        elif exchanges == "now":
            grads = lax.pmean(grads, "batch")
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, pending

    pending = params if exchanges == "delayed" else {}
    given = params, tx.init(params), pending
    done, _ = compiled(step, args=(given, jnp.ones((4, N))))
    assert sorted(s.index for s in done.program.segments) == sorted(orders[0])
    results = []
    for order in orders:
        state = jax.tree.map(jnp.copy, given)
        before = places(state[:2])
        execution = done.execution(jax.tree.leaves((state, jnp.ones((4, N)))))
        for index in order:
            execution.run(index)
        results.append(jax.tree.map(np.asarray, execution.outputs()))
        assert places(execution.outputs())[: len(before)] == before
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_figures_of_an_executable_are_asked_once() -> None:
    """XLA takes tens of milliseconds for a large one's, and every run of a job needs them."""
    done, _ = compiled()
    found = [runnable.memory() for runnable in done.runnables]
    assert None not in found
    assert all(
        runnable.memory() is stats for runnable, stats in zip(done.runnables, found, strict=True)
    )
    assert done.live_bytes() is done.live_bytes()


@pytest.mark.integration
def test_peak_is_near_that_of_the_fused_step() -> None:
    done, args = compiled()
    wire = LocalRanks()
    fused = jax.jit(
        lambda *a: wire.lower(done.program.traced.jaxpr, AXES)(*a), donate_argnums=(0, 1)
    )
    stats = fused.lower(*jax.tree.leaves((args, {}))).compile().memory_analysis()
    floor = sum(x.nbytes for x in jax.tree.leaves(args))
    peak = done.peak_live_bytes()
    exchanged = 2 * N * N * 4
    assert floor < peak <= floor + stats.temp_size_in_bytes + 2 * exchanged
    assert done.memory_bytes()["arguments"] == floor


@pytest.mark.integration
@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda: workloads.mlp(), 1.0),
        (
            lambda: workloads.transformer(
                layers=1, width=64, length=16, batch_size=2, vocabulary=64
            ),
            1.0,
        ),
        # XLA rearranges a convolution's gradient in an extra buffer if it's also a result.
        pytest.param(
            lambda: workloads.resnet("resnet8", batch_size=2, image_size=32, classes=8),
            1.01,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["mlp", "transformer", "resnet"],
)
def test_the_cut_adds_no_copies(make: Any, share: float) -> None:
    """Compares the bytes of the copies in XLA's optimised modules."""
    work = make()
    args = work.state(0), work.batch(0)
    done, _ = compiled(work.make(lambda tree: lax.pmean(tree, "batch")), args=args)
    state = range(len(jax.tree.leaves(args[0])))
    fused = jax.jit(
        lambda *a: LocalRanks().lower(done.program.traced.jaxpr, AXES)(*a),
        donate_argnums=tuple(state),
    )
    whole = copied_bytes(fused.lower(*jax.tree.leaves(args)).compile().as_text())
    cut = [
        copied_bytes(r.call.as_text()) - FENCE_BYTES
        for r in done.runnables
        if r.segment.kind == "compute"
    ]
    assert sum(cut) <= share * whole, (cut, whole)


@pytest.mark.integration
def test_exchange_copies_only_into_and_out_of_messages() -> None:
    """Small sums share a message, so each is copied twice. Large ones are sent in place."""

    def copied(width: int) -> tuple[int, int]:
        trees = [jnp.ones((width, 64)), jnp.ones((width, 32))]
        done, _ = compiled(lambda a, b: lax.psum((a, b), "batch"), args=trees, donate=())
        (module,) = [r.call.as_text() for r in done.runnables if r.segment.kind == "collective"]
        return copied_bytes(module, "copy|concatenate|slice"), sum(x.nbytes for x in trees)

    moved, size = copied(64)
    assert 0 < moved <= 2 * size, (moved, size)
    moved, size = copied(2**16)
    assert moved == 0, (moved, size)


def copied_bytes(module: str, what: str = "copy") -> int:
    found = re.findall(rf"= (\w+)\[([\d,]*)\]\S* (?:{what})\(", module)
    sizes = {"f32": 4, "u32": 4, "s32": 4, "pred": 1, "bf16": 2}
    return sum(
        sizes[kind] * math.prod(int(n) for n in shape.split(",") if n) for kind, shape in found
    )


@pytest.mark.mostly_integration("4")
@pytest.mark.parametrize("cut", ["whole", 4])
def test_ordered_callbacks_keep_their_order(cut: Any) -> None:
    said = []

    def say(word: str) -> Any:
        return lambda value: said.append((word, int(value)))

    def step(w: Any, x: Any) -> Any:
        jax.debug.callback(say("first"), w.size * w.sum(), ordered=True)
        g = lax.pmean(w * x, "batch")
        jax.debug.callback(say("second"), (w * x).sum(), ordered=True)
        h = lax.pmean(jnp.tanh(g), "batch")
        jax.debug.callback(say("third"), (x * x).sum(), ordered=True)
        return w - h

    args = [jnp.ones(4), jnp.full(4, 2.0)]
    done, _ = compiled(step, args=args, donate=(), cut=cut)
    execution = done.execution(args)
    for segment in range(len(done.program.segments)):
        execution.run(segment)
    jax.block_until_ready(execution.outputs())
    jax.effects_barrier()
    assert said == [("first", 16), ("second", 8), ("third", 16)]


def test_segments_may_overtake_unrelated_earlier_ones() -> None:
    """Segments may run ahead, as during an exchange: a late segment keeps its inputs."""

    def two_exchanges(state: Any, x: Any) -> Any:
        y = jnp.tanh(x)
        return state + lax.psum(y, "batch"), lax.psum(jnp.sin(y), "batch")

    done, args = compiled(two_exchanges, cut=2, args=(jnp.zeros((N, N)), jnp.ones((N, N))))
    kinds = [s.kind for s in done.program.segments]
    assert kinds == ["compute", "collective", "compute", "collective", "compute"]
    results = []
    for order in ((0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 2, 3, 1, 4)):
        execution = done.execution([jnp.copy(a) for a in args])
        for index in order:
            execution.run(index)
        assert alive(execution) <= set(done.program.outputs) | set(done.program.inputs)
        results.append([np.asarray(x) for x in jax.tree.leaves(execution.outputs())])
    for result in results[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results[0], result, strict=True))


def written_peak_bytes(traced: Any) -> int:
    """Returns the peak if equations ran as written and values died at their last use."""
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    last = {
        v: n
        for n, e in enumerate(inner.eqns)
        for v in e.invars
        if not isinstance(v, compat.Literal)
    }
    last |= {v: len(inner.eqns) for v in inner.outvars if not isinstance(v, compat.Literal)}
    live, peak = dict.fromkeys([*inner.invars, *inner.constvars], len(inner.eqns)), 0
    for n, eqn in enumerate(inner.eqns):
        live |= {v: last[v] for v in eqn.outvars if v in last}
        peak = max(peak, sum(map(nbytes, live)))
        live = {v: end for v, end in live.items() if end > n}
    return peak


def program_peak_bytes(program: Any) -> int:
    """Returns the peak between segments, if the step's inputs stay alive."""
    live, peak = {v: program.values[v].nbytes for v in program.inputs}, 0
    for segment in program.segments:
        live |= {v: program.values[v].nbytes for v in segment.outputs}
        peak = max(peak, sum(live.values()))
        live = {v: n for v, n in live.items() if v not in segment.last_uses or v in program.inputs}
    return peak


@pytest.mark.integration
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"side": 2}, id="2-D"),
        pytest.param({"tensor": 4}, id="1-D", marks=pytest.mark.exhaustive),
    ],
)
def test_cutting_keeps_what_a_large_model_saves(sizes: dict[str, int], remat: bool) -> None:
    """Uses gathered weights of one layer at a time, and `remat`, which recomputes values."""
    mesh, length = tensor.Mesh(**sizes), 64
    model = tensor.Transformer(512, 256, 4, 8, length, mesh, remat=remat)
    tokens = jax.ShapeDtypeStruct((32 // mesh.size(mesh.batch), length), jnp.int32)
    params = jax.eval_shape(
        lambda: tensor.init(model, jax.random.key(0), jnp.zeros((1, length), jnp.int32), 0)
    )

    def loss_and_gradients(params: Any, tokens: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return tensor.cross_entropy(model.apply({"params": params}, tokens), tokens, mesh)

        return jax.value_and_grad(loss_fn)(params)

    traced = trace(loss_and_gradients, (params, tokens), axes=mesh.axes, wire=LocalRanks())
    program = stages.cut(traced, "whole")
    assert program_peak_bytes(program) < 1.05 * written_peak_bytes(traced)
