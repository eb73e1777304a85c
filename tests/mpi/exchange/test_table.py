"""The table of exchanges over MPI: one `mpirun` a world size runs every row."""

from __future__ import annotations

from typing import Any

import pytest

# A sum in 16 bits, a selection and dot products over two axes; state and two phases, of a sum and of bits.
QUICK = ("mean, hierarchical, bfloat16", "top_k, hierarchical", "adasum, hierarchical", "one_bit_adam")
# Of each kind of arithmetic one row, `power_sgd` and `local_sgd` also in one crossover. Gossip and stale gradients are
# compiled as users have them in tests/cpu/exchange.
EACH = (
    "mean, ring, bfloat16", "top_k, bucket", "power_sgd", "qsgd", "sign_sgd", "adasum", "sharded_optimizer",
    "local_sgd", "demo", "no_loco", "sparse_loco",
)  # fmt: skip

REFUSED = """
import jax.numpy as jnp, optax, jaxcross
from jaxcross import exchange
world = jaxcross.initialize(stall_timeout_s=60)
params = {"w": jnp.full((4, 4), float(world.rank))}
for tx, words in (
    (exchange.gtop_k(0.5, "batch"), "`gtop_k` over axis `batch` of 3 ranks: its tree needs a power of two"),
    (exchange.gossip(optax.sgd(0.1), "batch", "torus"), "`torus`, but 3 ranks make no grid"),
    (exchange.top_k(0.5, "rows"), "uses an axis that is not bound"),
    (exchange.elastic_average(optax.sgd(0.1), "batch", every=1, alpha=1, beta=1 / 3), "change places at every"),
    (exchange.sharded_optimizer(optax.sgd(0.1), "batch", ranks=2), "`sharded_optimizer` is 2, but the axis has 3"),
    (exchange.federated_average(optax.sgd(0.1), "batch", every=1, weights=[1, 1]), "are 2, but the axis has 3 ranks"),
    (exchange.asynchronous(optax.sgd(0.1), "batch", delays=[[0, 1]]), "are for 2 ranks, but the axis has 3"),
    (exchange.one_bit_adam(2, "batch", ranks=2), "`ranks` of `one_bit_adam` is 2, but axis `batch` has 3"),
    (optax.chain(exchange.top_k(0.5, "batch"), exchange.mean("batch")), "`mean` is given the leaf `['w']`, which"),
):
    try:
        jaxcross.crossover(tx.update, axes="batch")(params, tx.init(params), params)
    except (ValueError, jaxcross.CutError) as error:
        assert words in str(error), error
        print(f"rank {world.rank} refused", flush=True)
mean = exchange.mean("batch")
(w,) = jaxcross.crossover(mean.update, axes="batch")(params, mean.init(params))[0].values()
assert (w == 1).all(), "the world works on"
"""


@pytest.mark.integration
def test_unsupported_worlds_are_rejected_on_every_rank(mpirun: Any) -> None:
    """Worlds that an exchange cannot serve are refused on every rank."""
    done = mpirun(3, REFUSED).check()
    assert [done.stdout.count(f"rank {rank} refused") for rank in range(3)] == [9] * 3, done.stdout


def check(mpirun: Any, ranks: int, *names: str, env: dict[str, str]) -> None:
    done = mpirun(ranks, "exchanges.py", *names, timeout=900, env=env).check()
    for rank in range(ranks):
        assert f"rank {rank}: exchanges done" in done.stdout, done.stdout + done.stderr


@pytest.mark.integration
def test_one_exchange_of_each_kind_on_two_nodes_of_two(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    check(mpirun, 4, *QUICK, env=quick_compiler)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_exchanges_equal_vmap_formulas_and_solo(mpirun: Any, ranks: int, quick_compiler: dict[str, str]) -> None:
    """Exchanges equal `vmap` and their formulas, and `crossover` gives the same as a solo run."""
    check(mpirun, ranks, env=quick_compiler)


@pytest.mark.integration
@pytest.mark.parametrize("names", [EACH, pytest.param((), marks=pytest.mark.exhaustive)], ids=["each kind", "all"])
def test_so_it_is_at_full_optimisation(mpirun: Any, names: tuple[str, ...]) -> None:
    """As users run it: XLA fuses and contracts, and the same arithmetic may have other bits in another program."""
    check(mpirun, 3, *names, env={"XLA_FLAGS": ""})
