"""Checks communicators, agreements and states.

Each function is a check that all ranks run. The results are printed as JSON.
"""

import json
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from jaxcross.errors import ExchangeError
from jaxcross.world import initialize

world = initialize(stall_timeout_s=60)
P, RANK = world.size, world.rank


def who_is_where():
    assert (world.size, world.rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
    assert (world.local_rank, world.local_size) == (RANK, P)
    assert world.vendor in ("mpich", "openmpi")
    assert len(set(MPI.COMM_WORLD.allgather(world.pool_size))) == 1 and world.pool_size >= 2


def a_second_call_is_the_same_world():
    assert initialize() is world and initialize(stall_timeout_s=60) is world
    try:
        initialize(stall_timeout_s=5)
    except ValueError as error:
        assert str(error).startswith(
            "jaxcross is initialised already, with `stall_timeout_s=60` and "
            "`heartbeat_timeout_s=30.0`"
        )
    else:
        raise AssertionError("another watchdog was accepted and ignored")


def communicators_are_made_in_any_order_from_several_threads():
    mesh = world.rank_grid({"a": 2, "b": -1})
    wanted = [("a",), ("b",), ("a", "b")]
    found, errors = {}, []

    def make(keys):
        try:
            for axes in keys:
                found[threading.current_thread().name, axes] = world.communicator(mesh, axes)
        except Exception:
            errors.append(traceback.format_exc())

    orders = [wanted, wanted[::-1]] if RANK % 2 else [wanted[::-1], wanted]
    threads = [threading.Thread(target=make, args=(o,), name=str(i)) for i, o in enumerate(orders)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors
    for axes in wanted:
        comm = found["0", axes]
        assert comm is found["1", axes] or comm.size == 1
        assert comm.allgather(RANK) == list(mesh.group(axes))
    groups = {mesh.group(axes) for axes in wanted}
    assert len({id(found["0", axes]) for axes in wanted}) == len(groups)


def control_agrees():
    assert (world.control.allreduce_min(np.array([RANK, -RANK, 5])) == [0, 1 - P, 5]).all()
    assert world.control.allgather_text(f"rank {RANK}") == [f"rank {r}" for r in range(P)]


def equal_state_passes_and_unequal_is_named():
    state = {"w": jnp.arange(4.0), "key": jax.random.key(3), "step": 7}
    assert world.broadcast_or_check(state) is state
    wrong = {**state, "w": state["w"] + (RANK == P - 1)}
    try:
        world.broadcast_or_check(wrong)
        raise AssertionError("not noticed")
    except ExchangeError as error:
        assert str(error).startswith(
            f"The state differs between ranks 0 and {P - 1}, first at `['w']`: "
        ), error


def broadcast_gives_rank_zeros_values():
    state = {
        "w": jnp.full((3,), RANK, jnp.bfloat16),
        "key": jax.random.key(RANK),
        "step": RANK,
        "e": jnp.zeros((0, 2)),
    }
    got = world.broadcast_or_check(state, mode="broadcast")
    assert (
        (got["w"] == 0).all()
        and got["w"].dtype == jnp.bfloat16
        and got["step"] == 0
        and type(got["step"]) is int
    )
    assert (
        jax.random.key_data(got["key"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
    )
    assert got["e"].shape == (0, 2)
    try:
        world.broadcast_or_check({"w": jnp.zeros(3 + RANK)}, mode="broadcast")
        raise AssertionError("not noticed")
    except ExchangeError as error:
        assert "first at `['w']`: float32[3] on rank 0, and float32[4] on rank 1" in str(error), (
            error
        )


def leaves_of_a_rank_stay_as_they_are():
    mine = {"w": jnp.zeros(3) + RANK, "mask": {"a": jnp.zeros(2 + RANK) + RANK}}
    named = ("['mask']['a']",)
    got = world.broadcast_or_check(mine, mode="broadcast", rank_local=named)
    assert (got["w"] == 0).all() and got["mask"]["a"] is mine["mask"]["a"]
    assert (
        world.broadcast_or_check({**mine, "w": jnp.zeros(3)}, rank_local=named)["mask"]
        == mine["mask"]
    )
    for mode in ("check", "broadcast"):
        try:
            wrong = {"w": jnp.zeros(3), "mask": {"a": jnp.zeros(2) if RANK else {"text"}}}
            world.broadcast_or_check(wrong, mode=mode, rank_local=named)
            raise AssertionError("not noticed")
        except ExchangeError as error:
            assert "first at `['mask']['a']`: of type set on rank 0, and rank-local on" in str(
                error
            ), error


def what_is_no_array_is_refused_on_every_rank():
    for leaf in ({"text"}, np.array(["text"]), object()):
        for mode in ("check", "broadcast"):
            try:
                world.broadcast_or_check({"w": jnp.zeros(3), "a": {"b": leaf}}, mode=mode)
                raise AssertionError("not noticed")
            except TypeError as error:
                kind = type(leaf).__name__
                assert str(error).startswith(
                    f"`['a']['b']` of the state is of type `{kind}`: its leaves must"
                ), error
    try:
        world.broadcast_or_check({"a": 1.0 if RANK else {"text"}})
        raise AssertionError("not noticed")
    except ExchangeError as error:
        assert (
            "between ranks 0 and 1, first at `['a']`: of type set on rank 0, and float64["
            in str(error)
        ), error


def main():
    names = [
        n
        for n, f in globals().items()
        if callable(f) and getattr(f, "__module__", "") == "__main__"
    ]
    found = {}
    for name in [n for n in names if n != "main"]:
        try:
            globals()[name]()
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc()
        everywhere = world.control.allgather_text(outcome)
        found[name] = "ok" if set(everywhere) == {"ok"} else "\n".join(everywhere)
    if RANK == 0:
        print(json.dumps(found))


main()
