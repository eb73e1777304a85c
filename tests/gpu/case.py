"""The cases that this folder's tests run in separate processes, directly or under mpirun.

    python case.py NAME [--stand-in]

With `--stand-in`, a second CPU device replaces the accelerator, so the cases themselves can be
tested on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxcross
from jaxcross.exchange.select import Selection, select
from jaxcross.program import hand_over, stages
from jaxcross.program.host_work import HostWork
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, vmap_oracle

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_ranks import accelerator, prepare  # pyright: ignore[reportMissingImports]
from workloads import Workload, mlp, resnet  # pyright: ignore[reportMissingImports]

STAND_IN = "--stand-in" in sys.argv


def workloads() -> dict[str, Workload]:
    small = resnet("resnet8", batch_size=4, image_size=32, classes=8)
    return {"mlp": mlp(width=32, batch_size=8), "resnet8": small}


def exchanged(work: Workload) -> Callable[..., Any]:
    return work.make(lambda tree: lax.pmean(tree, "batch"))


def close(got: Any, expected: Any, where: str) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a),
            np.asarray(b),
            rtol=1e-3,
            atol=1e-4,
            err_msg=f"{where} {jax.tree_util.keystr(path)}",
        )


def bits(tree: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def step(world: Any, device: Any, host: Any) -> None:
    """A cut step on the accelerator matches plain jit on the CPU within a tolerance."""
    for name, work in workloads().items():
        plain = jax.jit(work.make(lambda tree: tree))
        state, batch = work.state(0), work.batch(0)
        expected = plain(*jax.device_put((state, batch), host))
        assert bits(expected[0][0]) != bits(state[0]), "the step moves no parameter"
        for cut in ("whole", 2):
            crossed = jaxcross.crossover(exchanged(work), axes="batch", cut=cut)
            got = crossed(*jax.device_put((state, batch), device))
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(got[0])), name
            close(got, expected, f"{name}, cut {cut}:")


def placement(world: Any, device: Any, host: Any) -> None:
    """Collective segments run on the host's CPU, and results get the user's sharding back."""
    work = workloads()["mlp"]
    chosen = NamedSharding(Mesh(np.array([device]), ("local",)), PartitionSpec())
    for sharding in (SingleDeviceSharding(device), chosen):
        args = jax.device_put((work.state(0), work.batch(0)), sharding)
        leaves = jax.tree.leaves((args, {}))
        traced = trace(exchanged(work), args, axes={"batch": 2}, wire=LocalRanks(1))
        compiled = stages.compile(stages.cut(traced), leaves)
        kinds = {r.segment.kind: r for r in compiled.runnables}
        assert kinds["collective"].device == host
        assert host.platform == "cpu"
        for kind, where in (("collective", host), ("compute", device)):
            places = jax.tree.leaves(kinds[kind].call.input_shardings[0])
            assert {d for place in places for d in place.device_set} == {where}, (kind, places)
        written = {place.memory_kind for place in compiled.runnables[0].call.output_shardings}
        assert "pinned_host" in written, f"exchanged gradients go through {written}"
        execution = compiled.execution(leaves)
        for segment in compiled.program.segments:
            execution.wait_inputs(segment.index)
            execution.run(segment.index)
            execution.wait_outputs(segment.index)
            for value in (
                segment.outputs
            ):  # before the next segment reads the outputs, which would move them anyway
                assert execution._env[value].devices() == {device}, segment
        state, _ = execution.outputs()
        for before, after in zip(jax.tree.leaves(args[0]), jax.tree.leaves(state), strict=True):
            assert after.sharding.is_equivalent_to(before.sharding, before.ndim), after.sharding
            assert type(after.sharding) is type(sharding), after.sharding
            assert after.committed


def dependent(world: Any, device: Any, host: Any) -> None:
    """A segment that may overwrite an input computes correctly even if two outputs could replace
    it.

    Two of the segment's outputs have the input's shape. Later segments compute with one of them,
    and the other is only exchanged, so it goes to the host.
    """

    def step(x: Any) -> Any:
        h = jax.numpy.tanh(x)
        g = jax.numpy.sin(h * lax.pmean(jax.numpy.sum(h), "batch"))
        y = jax.numpy.dot(g, h)
        return jax.numpy.dot(y, lax.pmean(g, "batch"))

    x = np.linspace(0.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    with jax.default_device(host):
        (expected,) = vmap_oracle(step, {"batch": 1}, [(jax.device_put(x, host),)])
    for cut in ("whole", 2):
        close(
            jaxcross.crossover(step, axes="batch", cut=cut)(jax.device_put(x, device)),
            expected,
            f"cut {cut}:",
        )


def handed_over(traced: Any, leaves: list[Any], host: Any) -> tuple[list[int], Any]:
    """Returns how many bytes each hand-over of a step moves, and the step's result."""
    found: list[int] = []

    def to_host(values: Any, where: Any, through: Any) -> Any:
        found.append(
            sum(x.nbytes for x in values if isinstance(x, jax.Array) and x.devices() != {where})
        )
        return hand_over.to_host(values, where, through)

    def from_host(values: Any, shardings: Any) -> Any:
        found.append(
            sum(x.nbytes for x, place in zip(values, shardings, strict=True) if place is not None)
        )
        return hand_over.from_host(values, shardings)

    execution = stages.compile(stages.cut(traced), leaves, host_device=host).execution(leaves)
    module = "jaxcross.program.execution"
    with mock.patch(f"{module}.to_host", to_host), mock.patch(f"{module}.from_host", from_host):
        for segment in execution._compiled.program.segments:
            execution.wait_inputs(segment.index)
            execution.run(segment.index)
    return found, execution.outputs()


def small_work(world: Any, device: Any, host: Any) -> None:
    """Adasum moves its arrays to the host and back once, with no hand-over between exchanges."""
    tx = jaxcross.exchange.adasum("batch")
    weights = {
        "kernel": np.linspace(-1.0, 1.0, 64 * 32, dtype=np.float32).reshape(64, 32),
        "bias": np.ones(32, "f"),
    }

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jax.numpy.sum(jax.numpy.tanh(x @ p["kernel"] + p["bias"])))(
            params
        )
        return tx.update(grads, optax.EmptyState())[0]

    args = jax.device_put(
        (weights, np.linspace(0.0, 1.0, 8 * 64, dtype=np.float32).reshape(8, 64)), device
    )
    leaves = jax.tree.leaves((args, {}))
    traced = trace(step, args, axes={"batch": 4}, wire=LocalRanks(1))

    with mock.patch("jaxcross.program.cut.on_accelerator", return_value=True):
        with mock.patch.object(HostWork, "costs_less", return_value=False):
            apart, expected = handed_over(traced, leaves, host)
        kept, got = handed_over(traced, leaves, host)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves((expected, got)))
    close(got, expected, "kept on the host:")
    assert len(apart) > 6 and len(kept) == 2, (apart, kept)
    # All gradients go there and back, padded, plus the rank's number, and nothing else.
    nbytes = sum(x.nbytes for x in weights.values())
    assert sum(kept) < 2.2 * nbytes < sum(apart), (nbytes, apart, kept)


def constants(world: Any, device: Any, host: Any) -> None:
    """A constant is copied to the host only once, rather than in every step.

    Here both a compute segment on the accelerator and the small computation between two exchanges,
    which runs on the host, read the same constant.
    """
    table = jax.device_put(np.linspace(0.5, 1.5, 5000, dtype=np.float32), device)

    def step(x: Any) -> Any:
        mean = lax.pmean(jax.numpy.sin(x * table), "batch")
        return lax.pmax(mean * table, "batch") + table

    args = (jax.device_put(np.linspace(0.0, 1.0, 5000, dtype=np.float32), device),)
    leaves = jax.tree.leaves((args, {}))
    traced = trace(step, args, axes={"batch": 2}, wire=LocalRanks(1))
    with mock.patch("jaxcross.program.cut.on_accelerator", return_value=True):
        program = stages.cut(traced)
        (there, back), got = handed_over(traced, leaves, host)
    (constant,) = program.inputs[: program.constants]
    assert {program.segments[n].kind for n in program.order.readers[constant]} == {
        "compute",
        "collective",
    }
    assert there == back == table.nbytes, (there, back)  # the exchanged array, and its result
    mean = np.sin(np.asarray(args[0]) * np.asarray(table))
    close(got, mean * np.asarray(table) + np.asarray(table), "constants:")


def crossover(world: Any, device: Any, host: Any) -> None:
    """Two jobs that cross over end bit for bit as each does alone."""
    for name, work in workloads().items():
        crossed = jaxcross.crossover(exchanged(work), axes="batch", donate_argnums=0)

        def run(
            numbers: tuple[int, ...], work: Any = work, crossed: Any = crossed
        ) -> dict[int, str]:
            jobs = {
                n: jaxcross.Job(
                    f"job{n}", crossed, jax.device_put(work.state(n), device),
                    itertools.repeat(jax.device_put(work.batch(n), device), 4),
                )
                for n in numbers
            }  # fmt: skip
            report = jaxcross.run(list(jobs.values()))
            assert [job.facts.steps for job in report.rounds.jobs] == [4] * len(numbers)
            return {n: bits(job.state) for n, job in jobs.items()}

        alone = run((0,)) | run((1,))
        assert run((0, 1)) == alone, name
        assert alone[0] != alone[1]


def sparse_step(work: Workload, tx: Any) -> Callable[..., Any]:
    """Returns the workload's step with its gradients exchanged by `tx`.

    The step also takes and returns the state of `tx`.
    """

    def step(state: Any, batch: Any, kept: Any) -> Any:
        later = []

        def exchange(values: Any) -> Any:
            grads, new = tx.update(values[0], kept)
            later.append(new)
            return grads, lax.pmean(values[1], "batch")

        return work.make(exchange)(state, batch), later[0]

    return step


def selection(world: Any, device: Any, host: Any) -> None:
    """Both selections find the largest elements there, and a top-k step ends as on the CPU."""
    x, k = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32), 1000
    largest = set(np.argsort(-np.abs(x))[:k].tolist())
    work = mlp(width=32, batch_size=8)
    for way in get_args(Selection):
        values, indices = jax.jit(partial(select, k=k, selection=way))(jax.device_put(x, device))
        assert indices.devices() == {device}
        assert set(np.asarray(indices).tolist()) == largest, way
        np.testing.assert_array_equal(np.asarray(values), x[np.asarray(indices)])

        tx = jaxcross.exchange.top_k(0.1, "batch", selection=way)
        step = sparse_step(work, tx)
        args = work.state(0), work.batch(0), tx.init(work.state(0)[0])
        got = jaxcross.crossover(step, axes="batch")(*jax.device_put(args, device))
        with jax.default_device(host):
            (expected,) = vmap_oracle(step, {"batch": 1}, [jax.device_put(args, host)])
        assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(got[1].residual)), (
            "nothing was left out"
        )
        close(got, expected, f"{way}:")


def ranks(world: Any, device: Any, host: Any) -> None:
    """Two ranks that share the accelerator end bit for bit alike, and match `vmap` on the CPU."""
    assert world.size == 2
    for name, work in workloads().items():
        state, batches = work.state(0), [work.batch(rank) for rank in range(world.size)]
        crossed = jaxcross.crossover(exchanged(work), axes="batch")
        got = crossed(*jax.device_put((state, batches[world.rank]), device))
        with jax.default_device(host):
            everyone = [jax.device_put((state, batch), host) for batch in batches]
            expected = vmap_oracle(exchanged(work), {"batch": world.size}, everyone)[world.rank]
        close(got, expected, f"{name} on rank {world.rank}:")
        # BatchNorm's statistics are rank-local; parameters and loss are identical across ranks.
        shared = (got[0][0], got[1])
        texts = world.control.allgather_text(f"{bits(shared)} {device.device_kind} {device.id}")
        assert len(set(texts)) == 1, texts
        own = world.control.allgather_text(bits(jax.device_get(batches[world.rank])))
        assert len(set(own)) == 2, "both ranks had the same batch: nothing was averaged"


CASES = {
    case.__name__: case
    for case in (step, placement, dependent, small_work, constants, crossover, selection, ranks)
}

if __name__ == "__main__":
    prepare(STAND_IN)
    # Otherwise an accelerator multiplies float32 with less precision than the CPU.
    jax.config.update("jax_default_matmul_precision", "highest")
    the_world = jaxcross.initialize()
    CASES[sys.argv[1]](the_world, accelerator(STAND_IN), jax.local_devices(backend="cpu")[0])
    print(f"rank {the_world.rank}: {sys.argv[1]} holds")
