"""Checks that the table of collectives doesn't cover, on NumPy arrays.

All ranks run each check, and the results are printed as JSON.
"""

import json
import traceback

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from mpi4py import MPI

from jaxcross import _jax_compat as compat
from jaxcross.errors import ExchangeError
from jaxcross.program.lowered import Traceable
from jaxcross.wire import MpiWire, host_calls, wire_bytes
from jaxcross.wire.bytes import call_of, issued_bytes
from jaxcross.wire.mpi_messages import split_counts
from jaxcross.wire.recognition import recognise
from jaxcross.world import initialize
from tests.support.quick_compiler import AS_USERS_HAVE_IT

world = initialize(stall_timeout_s=60)
P, RANK = world.size, world.rank
AXES = {"r": P}
WIRE = world.wire()
IN_XLA = world.over == "mpi4jax"


def lowered(function, *args, wire=WIRE, axes=AXES):
    jaxpr = jax.make_jaxpr(function, axis_env=list(axes.items()))(*args)
    return jaxpr, wire.lower(jaxpr, axes)


def call(function, *args, options=None):
    run = jax.jit(function, compiler_options=options) if IN_XLA else compiled(function, *args)
    return jax.tree.map(np.asarray, run(*args))


def compiled(function, *args):
    return function.compile(list(args), name="checks", host=jax.devices("cpu")[0], place=None)


def lowered_jaxpr(function, *args):
    return jax.make_jaxpr(function)(*args) if isinstance(function, Traceable) else function.jaxpr


def run(function, *args, options=None, **kwargs):
    return call(lowered(function, *args, **kwargs)[1], *args, options=options)


def messages(function, *args):
    """The calls and operands of a lowered function's messages, in program order.

    Each loop is entered once.
    """

    def walk(jaxpr):
        for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
            if (name := call_of(eqn)) is not None:
                yield name, eqn.invars[0].aval
            for sub in compat.sub_jaxprs(eqn):
                yield from walk(sub)

    return list(walk(lowered_jaxpr(function, *args)))


def groups_of_ranks():
    groups = [[i for i in range(P) if i % 2 == 0], [i for i in range(P) if i % 2 == 1]]
    groups = [g for g in groups if g]
    (got,) = run(lambda x: lax.psum(x, "r", axis_index_groups=groups), np.float32(RANK + 1))
    assert got == sum(i + 1 for i in groups[RANK % 2])


def sixteen_bits_round_once():
    x = np.full((5,), 1 + RANK / 128, jnp.bfloat16)
    expected = sum(np.float32(1 + r / 128) for r in range(P)).astype(jnp.bfloat16)
    small = run(lambda x: lax.psum(x, "r"), x)[0]
    assert (small == expected).all() and small.dtype == jnp.bfloat16
    large = np.full((50_001,), 1 + RANK / 128, jnp.bfloat16)
    _, function = lowered(lambda x: lax.psum(x, "r"), large)
    assert [name for name, _ in messages(function, large)] == ["alltoall", "allgather"]
    assert (call(function, large)[0] == expected).all()


def eight_bit_floats():
    x = np.full((3,), RANK + 1, jnp.float8_e4m3fn)
    total, moved = run(lambda x: (lax.psum(x, "r"), lax.ppermute(x, "r", [(0, P - 1)])), x)
    assert total.dtype == x.dtype and (total.astype(np.float32) == P * (P + 1) / 2).all()
    assert (moved.astype(np.float32) == (1 if RANK == P - 1 else 0)).all()


def extremes_of_nan_and_signed_zero():
    x = np.array([np.nan if RANK == 0 else 1.0, -np.inf, -0.0 if RANK else 0.0, -RANK], np.float32)
    top, low = run(lambda x: (lax.pmax(x, "r"), lax.pmin(x, "r")), x)
    assert np.isnan(top[0]) and np.isnan(low[0])
    assert (top[1:] == np.array([-np.inf, 0, 0])).all() and (
        low[1:] == np.array([-np.inf, 0, 1 - P])
    ).all()
    assert not np.signbit(top[2]) and np.signbit(low[2])
    # In these 8-bit types, every bit pattern but one is a number. That one is NaN, between them.
    for dtype in (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz, jnp.float8_e4m3b11fnuz):
        most = float(jnp.finfo(dtype).max)
        x = np.array(
            [np.nan if RANK == 0 else 1.0, most if RANK else 1.0, -most if RANK else 1.0, -RANK]
        )
        top, low = run(lambda x: (lax.pmax(x, "r"), lax.pmin(x, "r")), x.astype(dtype))
        assert (top.dtype, low.dtype) == (dtype, dtype)
        top, low = top.astype(np.float32), low.astype(np.float32)
        assert np.isnan(top[0]) and np.isnan(low[0]), (dtype, top, low)
        assert top[1:].tolist() == [most, 1, 0] and low[1:].tolist() == [1, -most, 1 - P], (
            dtype,
            top,
            low,
        )


def extremes_of_a_type_without_a_sign():
    x = np.array([0.5 if RANK else 4.0, 1.0, np.nan if RANK else 2.0]).astype(jnp.float8_e8m0fnu)
    top, low = (
        v.astype(np.float32) for v in run(lambda x: (lax.pmax(x, "r"), lax.pmin(x, "r")), x)
    )
    assert (top[:2] == np.array([4.0, 1.0])).all() and (low[:2] == np.array([0.5, 1.0])).all()
    assert np.isnan(top[2]) and np.isnan(low[2])


def order_is_the_equations_order():
    def step(x):
        a = lax.psum(x, "r")
        lax.pmin(x, "r")  # an unused result, but the peers still take part
        b = lax.all_gather(jnp.sin(x), "r")
        c, _ = lax.scan(lambda c, _: (lax.pmax(c, "r") + 1, None), a, None, length=2)
        d = lax.cond(a[0] > 0, lambda v: lax.psum(v, "r"), lambda v: v, c)
        return b, lax.ppermute(x, "r", [(i, (i + 1) % P) for i in range(P)]), d

    x = np.arange(3, dtype=np.float32) + 1
    _, function = lowered(step, x)
    order = ["allreduce"] * 2 + ["allgather"] + ["allreduce"] * 2 + ["sendrecv"]
    assert [name for name, _ in messages(function, x)] == order
    if IN_XLA:
        text = jax.jit(function).lower(x).as_text()
        assert text.count("create_token") == 1, text
        assert not jax.make_jaxpr(function)(x).effects
    b, c, d = call(function, x)
    assert (c == x).all() and b.shape == (P, 3) and (d == P * (P * x + 2)).all()


def loops_run_their_exchanges():
    def step(x):
        def body(carry):
            i, v = carry
            return i + 1, lax.psum(v, "r") / P + lax.axis_index("r") * 0

        inner = jax.checkpoint(lambda v: lax.pmean(jnp.sin(v), "r"))
        return lax.while_loop(lambda c: lax.pmax(c[0], "r") < 3, body, (0, x))[1], jax.grad(
            lambda v: inner(v).sum()
        )(x)

    x = np.arange(4, dtype=np.float32)
    value, gradient = run(step, x)
    assert np.allclose(value, x) and np.allclose(gradient, np.cos(x), atol=1e-6)


def compiled_many_times_and_called_again():
    _, function = lowered(lambda x: lax.psum(x, "r"), x := np.zeros(2, np.float32))
    executable = compiled(function, x)
    for i in range(3):
        assert (np.asarray(executable(np.full(2, i, np.float32))[0]) == i * P).all()


def nothing_to_return():
    _, function = lowered(lambda x: [lax.psum(x, "r"), ()][1], x := np.ones(3, np.float32))
    assert compiled(function, x)(x) == []
    assert [name for name, _ in messages(function, x)] == ["allreduce"]
    if IN_XLA:
        assert "mpi_allreduce_ffi" in jax.jit(function).lower(x).as_text()


def long_messages_are_split_without_being_made():
    huge = jax.ShapeDtypeStruct((2**31 + 10,), jnp.float32)
    _, function = lowered(lambda x: lax.psum(x, "r"), huge)
    sizes = tuple(x.size for _, x in messages(function, huge))
    assert sizes == split_counts(2**31 + 10) == (2**30 + 5, 2**30 + 5)
    tall = jax.ShapeDtypeStruct((P, 2**31 + 10), jnp.int8)
    _, function = lowered(lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True), tall)
    assert [x.shape for _, x in messages(function, tall)] == [(P, 2**30 + 5)] * 2


def large_arrays_are_not_copied():
    if not IN_XLA:
        # MPI reads the operand in place, and the buffer that MPI fills is the result.
        x = jnp.full((64, 1024), RANK, jnp.float32)
        sums, maker = [], host_calls.maker

        def noting(eqn, receive):
            send = maker(eqn, receive)
            return lambda x: sums.append((x, send(x))) or sums[-1][1]

        try:
            host_calls.maker = noting
            (got,) = compiled(lowered(lambda x: lax.psum(x, "r"), x)[1], x)(x)
        finally:
            host_calls.maker = maker
        ((operand, result),) = sums
        assert operand.ctypes.data == x.unsafe_buffer_pointer()
        assert result.ctypes.data == got.unsafe_buffer_pointer()
        return
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    _, function = lowered(lambda x: lax.psum(x, "r"), x)
    text = jax.jit(function).lower(x).as_text()
    operations = [line for line in text.splitlines() if "stablehlo." in line]
    assert ["create_token" in operations[0], "custom_call" in operations[1], len(operations)] == [
        True,
        True,
        2,
    ], text
    text = jax.jit(function).lower(x).compile(AS_USERS_HAVE_IT).as_text()
    assert " copy(" not in text and "fusion" not in text, text
    # MPI has no 16-bit floats, so ranks exchange them as integers and do the sum themselves. There
    # should be just three passes over memory: one converts the floats to integers, one widens, sums
    # and rounds the received numbers, and one converts the result back to floats.
    narrow = jax.ShapeDtypeStruct((64, P * 1024), jnp.bfloat16)
    _, function = lowered(lambda x: lax.psum(x, "r"), narrow)
    assert [name for name, _ in messages(function, narrow)] == ["alltoall", "allgather"]
    _, entry = jax.jit(function).lower(narrow).compile(AS_USERS_HAVE_IT).as_text().split("\nENTRY ")
    assert not any(
        f" {name}(" in entry for name in ("copy", "concatenate", "pad", "slice", "transpose")
    ), entry
    assert entry.count(" fusion(") + entry.count(" call(") == 3, entry


def small_sums_travel_together():
    def step(a, b, c, d, e):
        a, b, d = lax.psum(a, "r"), lax.psum(b, "r"), lax.psum(d, "r")
        c, e = lax.psum(c, "r"), lax.psum(e, "r")
        return a, b, c, d, e, lax.psum(a, "r")

    counted = np.arange(6, dtype=np.float32).reshape(2, 3)
    a, b, c = counted + RANK, np.float32(RANK), np.full((4,), RANK, np.int32)
    large, narrow = np.full((1025, 1024), RANK, np.float32), np.full((5,), RANK + 1, jnp.bfloat16)
    _, function = lowered(step, a, b, c, large, narrow)
    # We expect five messages: a and b are small and of the same type, so they share one. The large
    # array, the integers, and the 16-bit floats, which are summed differently, each have their own.
    # The last sum depends on the first one, so it can't be sent along with it.
    sizes = [x.size for _, x in messages(function, a, b, c, large, narrow)]
    assert sizes == [7, large.size, 4, 5, 6], sizes
    sums = call(function, a, b, c, large, narrow)
    total = P * (P - 1) / 2
    assert (sums[0] == P * counted + total).all() and sums[1] == total
    assert (sums[2] == total).all() and sums[2].dtype == np.int32 and (sums[3] == total).all()
    assert (sums[4] == total + P).all() and (sums[5] == P * sums[0]).all()
    many = [jax.ShapeDtypeStruct((2**20,), jnp.float32)] * 20  # 4 MiB each, 32 MiB per message
    _, function = lowered(lambda *xs: [lax.psum(x, "r") for x in xs], *many)
    assert [x.size / 2**20 for _, x in messages(function, *many)] == [8, 8, 4]


def sums_travel_together_whatever_is_computed_between_them():
    def step(a, b, c):
        a = lax.psum(a * 2, "r")
        half = a / 2  # computed after the message
        b = lax.psum(b + 1, "r")
        return a, b, lax.psum(c, "r"), lax.psum(half, "r")  # the last sum needs the first

    counted = np.arange(3, dtype=np.float32)
    args = counted + RANK, np.full((2, 2), RANK, np.float32), np.float32(RANK)
    _, function = lowered(step, *args)
    assert [x.size for _, x in messages(function, *args)] == [3 + 4 + 1, 3]
    a, b, c, last = call(function, *args)
    total = P * (P - 1) / 2
    assert (a == 2 * (P * counted + total)).all() and (b == total + P).all() and c == total
    assert (last == P * a / 2).all()


def sixteen_bit_sums_travel_together():
    xs = [
        np.full((n,), (1 + i) * (RANK + 1), jnp.bfloat16)
        for i, n in enumerate((40_001, 50_000, 45_003))
    ]
    jaxpr, function = lowered(lambda *xs: [lax.psum(x, "r") for x in xs], *xs)
    assert [name for name, _ in messages(function, *xs)] == ["alltoall", "allgather"]
    exchanges = [x for eqn in compat.open_jaxpr(jaxpr)[0].eqns for x in recognise(eqn, AXES)]
    assert issued_bytes(lowered_jaxpr(function, *xs), P) == sum(
        wire_bytes(x, AXES) for x in exchanges
    )
    alone = [run(lambda x: lax.psum(x, "r"), x, options=AS_USERS_HAVE_IT)[0] for x in xs]
    for got, expected, x in zip(
        call(function, *xs, options=AS_USERS_HAVE_IT), alone, xs, strict=True
    ):
        assert (got == expected).all() and (got.shape, got.dtype) == (x.shape, x.dtype)


def bytes_follow_the_formula():
    ring = [(i, (i + 1) % P) for i in range(P)]
    x = np.ones((P * 1000 + P, 8), np.float32)
    half = x.astype(jnp.bfloat16)
    table = {
        "psum": (lambda v: lax.psum(v, "r"), x),
        "pmax": (lambda v: lax.pmax(v, "r"), x),
        "pmax f8": (lambda v: lax.pmax(v, "r"), x.astype(jnp.float8_e4m3fnuz)),
        "psum bf16": (lambda v: lax.psum(v, "r"), half),
        "psum bf16 odd": (lambda v: lax.psum(v, "r"), np.ones(50_003, jnp.bfloat16)),
        "psum bf16 small": (lambda v: lax.psum(v, "r"), half[:3]),
        "all_gather": (lambda v: lax.all_gather(v, "r"), x),
        "reduce_scatter": (lambda v: lax.psum_scatter(v, "r", tiled=True), x),
        "all_to_all": (lambda v: lax.all_to_all(v, "r", 0, 1, tiled=True), x),
        "ppermute": (lambda v: lax.ppermute(v, "r", ring), x),
    }
    for name, (function, operand) in table.items():
        for wire in (WIRE, MpiWire(world, max_count=12_345)):
            jaxpr, low = lowered(function, operand, wire=wire)
            exchanges = [
                e
                for eqn in compat.open_jaxpr(jaxpr)[0].eqns
                for e in wire.recognise(eqn, AXES) or ()
            ]
            issued = MPI.COMM_WORLD.allreduce(
                issued_bytes(lowered_jaxpr(low, operand), P), op=MPI.MAX
            )
            assert [wire_bytes(e, AXES) for e in exchanges] == [issued], (name, issued, exchanges)
    mean = wire_bytes(exchanges[0], AXES) if P == 1 else x.size * 4
    assert mean == (0 if P == 1 else x.size * 4)


def mpi4jax_equations_are_exchanges_too():
    import mpi4jax  # may not be installed

    comm = MPI.COMM_WORLD.Dup()

    def step(x):
        y = mpi4jax.allreduce(x, MPI.SUM, comm=comm)
        z = mpi4jax.sendrecv(y, y, np.int64((RANK - 1) % P), np.int64((RANK + 1) % P), comm=comm)
        mpi4jax.barrier(comm=comm)
        b = mpi4jax.bcast(x, 0, comm=comm)
        return (
            z,
            b,
            jax.grad(lambda v: mpi4jax.allreduce(v, MPI.SUM, comm=comm).sum())(x),
            lax.psum(x, "r"),
        )

    counted = np.arange(3, dtype=np.float32)
    x = counted + RANK
    jaxpr, function = lowered(step, x)
    found = [e for eqn in compat.open_jaxpr(jaxpr)[0].eqns for e in WIRE.recognise(eqn, AXES) or ()]
    ops = ["mpi.allreduce", "mpi.sendrecv", "mpi.barrier", "mpi.bcast", "mpi.allreduce", "psum"]
    assert [e.op for e in found if e.op != "mpi.allreduce"] == [
        o for o in ops if o != "mpi.allreduce"
    ], found
    assert dict(found[0].params) == {"ranks": tuple(range(P)), "reduction": "SUM"}
    assert isinstance(function, Traceable)  # mpi4jax's own calls, whichever wire the world has
    z, b, gradient, total = jax.tree.map(np.asarray, compiled(function, x)(x))
    everything = P * counted + P * (P - 1) / 2
    assert (z == everything).all() and (b == counted).all()
    assert (gradient == 1).all() and (total == everything).all()


def a_shard_map_body_runs_on_each_rank():
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.AbstractMesh(
        (P,), ("r",), axis_types=(jax.sharding.AxisType.Auto,)
    )  # the default in JAX 0.10
    step = jax.shard_map(
        lambda w, x: jax.grad(lambda w: jnp.sin(w * x).sum())(w),
        mesh=mesh,
        in_specs=(spec(), spec("r")),
        out_specs=spec(),
    )
    (eqn,) = compat.open_jaxpr(
        jax.make_jaxpr(step)(np.ones(3, np.float32), np.ones(3 * P, np.float32))
    )[0].eqns
    (body,) = compat.sub_jaxprs(eqn)
    function = WIRE.lower(jax.extend.core.ClosedJaxpr(*compat.open_jaxpr(body)), AXES)
    (gradient,) = call(function, np.ones(3, np.float32), np.full(3, RANK + 1.0, np.float32))
    assert np.allclose(gradient, sum((r + 1) * np.cos(r + 1.0) for r in range(P)), atol=1e-6), (
        gradient
    )


def an_exchange_that_is_no_part_of_a_loop_is_refused():
    def body(c, _):
        return lax.custom_linear_solve(lambda v: 2 * lax.pmean(v, "r"), c, lambda _, b: b / 2), None

    try:
        lowered(lambda x: lax.scan(body, x, None, length=3)[0], np.ones(3, np.float32))
    except ExchangeError as error:
        assert str(error).startswith(
            "An exchange inside `custom_linear_solve` is not supported, at "
        ), error
    else:
        raise AssertionError("its solution would be the sum")


def ordered_callbacks_in_a_loop_keep_their_order():
    said = []

    def body(c, _):
        total = lax.psum(c, "r")
        jax.debug.callback(lambda _: said.append("total"), total, ordered=True)
        jax.debug.callback(lambda _: said.append("carry"), c, ordered=True)
        return total / P, None

    run(lambda x: lax.scan(body, x, None, length=2)[0], np.ones(3, np.float32))
    assert said == ["total", "carry"] * 2, said


def mean_halves_the_bytes():
    from jaxcross.exchange import mean

    tx = mean("r", wire_dtype=jnp.bfloat16)
    grads = {"w": np.full((4,), 1.0 + RANK, np.float32), "n": np.full((2,), 2.0, jnp.bfloat16)}
    flat, tree = jax.tree.flatten(grads)
    got = run(
        lambda *g: jax.tree.leaves(tx.update(jax.tree.unflatten(tree, g), tx.init(grads))[0]), *flat
    )
    assert [str(g.dtype) for g in got] == ["bfloat16", "float32"]
    assert (got[0] == 2).all() and (got[1] == (P + 1) / 2).all()


def main():
    names = [
        n
        for n, f in globals().items()
        if callable(f) and getattr(f, "__module__", "") == "__main__"
    ]
    helpers = {"lowered", "lowered_jaxpr", "call", "compiled", "run", "messages", "main"}
    found = {}
    for name in [n for n in names if n not in helpers]:
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
