"""Which leaves of a state are rank-local and which are identical across ranks, per strategy."""

from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxcross import exchange
from jaxcross._pytree import digests
from jaxcross.checkpoint.rank_local import RankLocal, common_leaves, named_leaves, rank_local_leaves

PARAMS = {"w": jnp.ones((64, 64)), "bias": jnp.zeros(64)}
ALL = ["['bias']", "['w']"]

MOMENTUM = optax.sgd(0.7, momentum=0.9)

# Per strategy: the common parameters, and the names of the common fields of its state.
STRATEGIES = {
    "top_k": (lambda: exchange.top_k(0.1, "b"), ALL, {"step"}),
    "gtop_k": (lambda: exchange.gtop_k(0.1, "b"), ALL, {"step"}),
    "decoupled_momentum": (lambda: exchange.decoupled_momentum(0.1, "b"), ALL, set()),
    "power_sgd": (lambda: exchange.power_sgd(1, "b"), ALL, {"factor"}),
    "one_bit_adam": (
        lambda: exchange.one_bit_adam(3, "b", ranks=2),
        ALL,
        {"step", "nu_steps", "mu", "nu"},
    ),
    "asynchronous": (
        lambda: exchange.asynchronous(optax.adam(0.1), "b", delays=2),
        ALL,
        {"step", "inner"},
    ),
    "bounded_stale": (
        lambda: exchange.bounded_stale(optax.adam(0.1), "b", staleness=2),
        [],
        {"step"},
    ),
    "bounded_stale of 0": (
        lambda: exchange.bounded_stale(optax.adam(0.1), "b", staleness=0),
        ALL,
        {"step", "inner"},
    ),
    "local_sgd": (lambda: exchange.local_sgd(optax.adam(0.1), "b", every=4), [], {"since"}),
    "delayed_mean": (lambda: exchange.delayed_mean(optax.adam(0.1), "b"), ALL, {"inner"}),
    "streaming_diloco": (
        lambda: exchange.streaming_diloco(
            optax.adam(0.1), MOMENTUM, "b", every=4, fragments=2, delay=2, bits=8
        ),
        [],
        {"clock", "anchor", "outer", "arrived"},
    ),
    "diloco": (
        lambda: exchange.diloco(optax.adam(0.1), MOMENTUM, "b", every=4),
        [],
        {"since", "anchor", "outer"},
    ),
    "federated": (
        lambda: exchange.federated_average(optax.adam(0.1), "b", every=4),
        [],
        {"since", "round"},
    ),
    "elastic": (
        lambda: exchange.elastic_average(optax.sgd(0.1), "b", every=4, alpha=0.1),
        [],
        {"since", "centre"},
    ),
    "gossip": (lambda: exchange.gossip(optax.adam(0.1), "b"), [], {"round"}),
    "sparse_loco": (
        lambda: exchange.sparse_loco(optax.adam(0.1), optax.sgd(0.5, momentum=0.9), "b", every=4),
        [],
        {"since", "anchor", "outer"},
    ),
    "no_loco": (lambda: exchange.no_loco(optax.adam(0.1), "b", every=4), [], {"since", "round"}),
    "adasum of deltas": (lambda: exchange.adasum("b", optax.adam(0.1)), ALL, set()),
    "sharded_optimizer": (
        lambda: exchange.sharded_optimizer(optax.adam(0.1), "b", ranks=2),
        ALL,
        set(),
    ),
    "accumulate": (
        lambda: exchange.accumulate(optax.adam(0.1), every=4),
        ALL,
        {"mini_step", "inner"},
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(optax.adam(0.1), 4),
        ALL,
        {"mini_step", "gradient_step", "inner_opt_state"},
    ),
}


@pytest.mark.mostly_integration("gtop_k", "local_sgd", "elastic", "gossip", "adasum of deltas")
@pytest.mark.parametrize(("make", "params", "fields"), STRATEGIES.values(), ids=STRATEGIES)
def test_common_leaves_of_each_strategy(make, params, fields):
    state = {"opt": make().init(PARAMS), "params": PARAMS, "step": jnp.int32(0)}
    found = common_leaves(state)
    assert [
        path.removeprefix("['params']") for path in found if path.startswith("['params']")
    ] == params
    inside = [path.removeprefix("['opt']") for path in found if path.startswith("['opt']")]
    assert {path.lstrip("[01].").partition("[")[0].partition(".")[0] for path in inside} == fields
    assert "['step']" in found
    assert not set(found) & set(rank_local_leaves(state))


VECTORS = {"a": jnp.ones(64), "b": jnp.zeros(3)}
ON_VECTORS = {
    "sparse_loco": (
        lambda: exchange.sparse_loco(
            optax.adam(0.1),
            optax.sgd(0.5, momentum=0.9),
            "b",
            every=4,
            skip=lambda path, leaf: True,
        ),
        {"since", "anchor", "outer"},
    ),
    "top_k": (lambda: exchange.top_k(0.1, "b", skip=lambda path, leaf: True), {"step", "params"}),
    "decoupled_momentum": (
        lambda: exchange.decoupled_momentum(0.1, "b", skip=lambda path, leaf: True),
        {"params"},
    ),
    "power_sgd": (lambda: exchange.power_sgd(1, "b"), {"params"}),
}


@pytest.mark.parametrize("nnx_dicts", [False, True])
@pytest.mark.parametrize(("make", "common"), ON_VECTORS.values(), ids=ON_VECTORS)
def test_a_strategy_that_compresses_nothing_is_recognised(make, common, nnx_dicts):
    """With vectors only there are no residuals, yet `sparse_loco` has rank-local parameters."""
    inner = make().init(VECTORS)
    dicts = {name: value for name, value in inner._asdict().items() if jax.tree.leaves(value)}
    state = {"params": VECTORS, "opt_state": dicts if nnx_dicts else inner}
    found = {
        path.removeprefix("['opt_state']").strip(".['").partition("'")[0]
        for path in common_leaves(state)
    }
    assert {name.partition("[")[0].partition(".")[0] for name in found} == common
    assert rank_local_leaves(state) == []


def test_all_leaves_of_a_plain_optimizer_are_common():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert common_leaves(state) == paths


def test_leaves_are_named_by_a_key_or_the_beginning_of_a_path():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    named = named_leaves(state, ["mu", ".params['w']"])
    assert sorted(named) == sorted(
        path for path in paths if ".mu" in path or path == ".params['w']"
    )
    assert named_leaves(state, ["params", ".params['w']"]) == [".params['bias']", ".params['w']"]
    assert named_leaves({}, []) == []
    for part in ("para", "'w'", ".params['"):
        with pytest.raises(
            ValueError,
            match="^`rank_local` names .* which no leaf has in its path.* leaves are `.step`, ",
        ):
            named_leaves(state, ["mu", part])


class Progress(NamedTuple):
    """A user's own type, with field names from `GossipState` and `LocalSGDState`."""

    round: Any
    since: Any = None
    inner: Any = None


@flax.struct.dataclass  # pyright: ignore[reportAttributeAccessIssue]
class Clock:
    round: Any


OWN = (
    {"round": 1},
    {"since": 1},
    {"inner": {"w": jnp.ones(2)}, "round": 1},
    Clock(1),  # pyright: ignore[reportCallIssue]
    Progress(1),
    Progress(1, 2, 3),
)


@pytest.mark.parametrize("own", OWN)
def test_names_of_a_users_leaves_mean_nothing(own):
    state = {"params": PARAMS, "progress": own}
    assert common_leaves(state) == [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    assert rank_local_leaves(state) == []


def test_names_of_a_users_nnx_variables_mean_nothing():
    class Model(nnx.Module):
        def __init__(self):
            self.progress = nnx.List([nnx.Dict(round=nnx.Variable(jnp.ones(2)))])
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    model = Model()
    state = nnx.split((model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)))[1]
    assert common_leaves(state) == [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)
    ]


def test_nested_and_nnx_strategy_states_are_recognised():
    """Strategy states are recognised when nested inside one another and when held by `nnx`."""
    tx = exchange.local_sgd(exchange.top_k(0.1, "b"), "b", every=4)
    state = {"opt": (optax.EmptyState(), tx.init(PARAMS)), "params": PARAMS}
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    nnx_state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))[1]
    pure = nnx.to_pure_dict(nnx_state)
    for made, params in ((state, "['params']"), (nnx_state, "[0]"), (pure, "[0]")):
        found = common_leaves(made)
        assert found and not any(path.startswith(params) for path in found)
        assert rank_local_leaves(made) and all(
            "residual" in path for path in rank_local_leaves(made)
        )


class OwnState(NamedTuple):
    """The state of a user's own exchange, which declares its rank-local field."""

    age: Any
    unsent_part: Any

    rank_local = RankLocal(unsent=("unsent_part",))


def test_state_of_a_users_own_exchange_may_declare_its_fields():
    """It's recognised by its class, and as a dict of NNX by the names of its fields."""
    own = OwnState(jnp.int32(0), {"w": jnp.zeros(2)})
    for state, path in (
        ({"opt": (own,), "params": PARAMS}, "['opt'][0].unsent_part['w']"),
        ({"opt_state": own._asdict(), "params": PARAMS}, "['opt_state']['unsent_part']['w']"),
    ):
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
        assert rank_local_leaves(state) == [path]
        assert common_leaves(state) == [each for each in paths if each != path]


def test_batch_statistics_of_linen_are_left_out():
    variables = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), jnp.ones((2, 3)))
    assert common_leaves(dict(variables)) == ["['params']['bias']", "['params']['scale']"]


def test_digests_cover_the_values_of_every_leaf_kind():
    state = {"a": jnp.arange(3), "k": jax.random.key(1), "n": np.float64(2), "p": 3}
    paths = set(common_leaves(state))
    found = digests(state, paths)
    assert list(found) == ["['a']", "['k']", "['n']", "['p']"]
    assert digests(dict(state), paths) == found
    other = digests({**state, "k": jax.random.key(2)}, paths)
    assert {path for path in found if found[path] != other[path]} == {"['k']"}
