"""A collective segment run by the host equals the segment in one executable, on unshared memory."""

import gc
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

from jaxcross import _jax_compat as compat
from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks
from jaxcross.wire import arena as arena_module
from jaxcross.wire import host_calls, host_program
from jaxcross.wire.arena import IDLE_S, SMALLEST_BYTES, Arena
from jaxcross.wire.host_program import HostLowered
from jaxcross.wire.lower import lower
from jaxcross.wire.mpi_messages import Channel
from jaxcross.wire.rank_grid import make_rank_grid

RANKS = 2
AXES = {"r": RANKS}
HOST = jax.devices("cpu")[0]


class EqualRanks:
    """A fake mpi4py communicator of two ranks, in which both ranks always send the same values."""

    def __init__(self, broken=False):
        self.sent = []
        self.broken = broken

    def Get_size(self):  # noqa: N802
        return RANKS

    def Get_rank(self):  # noqa: N802
        return 0

    def Allreduce(self, x, result, op):  # noqa: N802
        if self.broken:
            raise MPI.Exception(MPI.ERR_OTHER)
        result[...] = x + x if op == MPI.SUM else x
        self.sent.append(np.array(x))

    def Allgather(self, x, result):  # noqa: N802
        result[...] = np.stack([x] * RANKS)

    def Alltoall(self, x, result):  # noqa: N802
        result[...] = np.stack([x[0]] * RANKS)

    def Bcast(self, x, root):  # noqa: N802
        assert root == 0

    def Sendrecv(self, x, dest, sendtag, result, source, recvtag):  # noqa: N802
        result[...] = x


def lowered(step, *args, comm=None, arena=None):
    jaxpr = jax.make_jaxpr(step, axis_env=list(AXES.items()))(*args)
    comm = EqualRanks() if comm is None else comm
    channel = Channel(calls=host_calls, comm=comm, rank=0, size=RANKS)
    messages = lower(jaxpr, make_rank_grid(AXES, rank=0, size=RANKS), lambda *_: channel)

    def abort(text):
        raise RuntimeError(text)

    return jaxpr, HostLowered(messages, (Arena() if arena is None else arena).take, abort)


def compiled(step, *args, **options):
    return lowered(step, *args, **options)[1].compile(list(args), name="t", host=HOST, place=None)


def scan_in_reverse(x):
    def body(carry, item):
        carry = lax.psum(carry * item, "r") / 2
        return carry, (carry.sum(), item)

    return lax.scan(body, x, jnp.arange(4.0) + 1, reverse=True)


def scan_in_a_scan(x):
    def inner(carry, item):
        return lax.psum(carry, "r") + item, carry

    def outer(carry, _):
        carry, seen = lax.scan(inner, carry, jnp.ones((3, *x.shape)))
        return carry / 8, seen

    return lax.scan(outer, x, None, length=2)


def scan_with_keys(x):
    def body(key, _):
        key, own = jax.random.split(key)
        return key, (lax.psum(jax.random.normal(own, (2,)), "r"), own)

    return lax.scan(body, jax.random.key(3), None, length=3), x


def no_iteration(x):
    def body(carry, item):
        return lax.psum(carry, "r"), carry + item

    return lax.scan(body, x, jnp.zeros((0, *x.shape)))


def while_some_rank_is_small(x):
    def body(carry):
        return carry[0] + 1, lax.psum(carry[1], "r")

    return lax.while_loop(lambda carry: lax.pmax(carry[1].sum(), "r") < 100, body, (0, x))


def while_of_each_element(x):
    """The number of iterations differs by batch element, but is identical across ranks."""

    def one(n, key):
        def body(_, carry):
            total, key = carry
            return lax.psum(total, "r") + x.sum(), jax.random.split(key)[0]

        return lax.fori_loop(0, n, body, (x, key))

    return jax.vmap(one)(jnp.array([2, 0, 3]), jax.random.split(jax.random.key(3), 3))


def one_branch(x):
    return lax.switch(
        jnp.int32(1),
        [lambda x: x, lambda x: lax.psum(x, "r"), lambda x: lax.pmax(x, "r") + 1, lambda x: 2 * x],
        x,
    )


def several_exchanges(x):
    total = lax.psum(x * 2, "r")
    every = lax.all_gather(x + 1, "r")
    again = lax.psum(every.sum(0), "r")  # needs the second
    return total, every, again, lax.ppermute(x, "r", [(0, 1), (1, 0)]), lax.pbroadcast(x, "r", 0)


def results_that_are_arguments(x):
    total = lax.psum(x, "r")
    return x, total, total, x, 3.0, jnp.zeros(2)


def blocks(x):
    pair = jnp.stack([x, x + 1])
    return lax.psum_scatter(pair, "r"), lax.pmin(x > 1, "r")


STEPS = [
    scan_in_reverse,
    scan_in_a_scan,
    scan_with_keys,
    no_iteration,
    while_some_rank_is_small,
    while_of_each_element,
    one_branch,
    several_exchanges,
    results_that_are_arguments,
    blocks,
]


def data_of(value):
    return np.asarray(
        jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    )


@pytest.fixture(params=["small", "large"])
def messages(request, monkeypatch):
    """Small results stay NumPy arrays; large ones become JAX arrays inside an arena."""
    if request.param == "large":
        for module in (arena_module, host_program):
            monkeypatch.setattr(module, "SMALLEST_BYTES", 1)


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_results_are_those_of_one_executable(step):
    x = jnp.arange(3.0) + 1
    jaxpr, host = lowered(step, x)
    # With equal operands on all ranks, `LocalRanks` computes the step in one executable.
    expected = jax.jit(LocalRanks().lower(jaxpr, AXES))(x)
    program = host.compile([x], name="t", host=HOST, place=None)
    for _ in range(2):
        got = program(x)
        assert [g.dtype for g in got] == [e.dtype for e in expected]
        for mine, whole in zip(got, expected, strict=True):
            np.testing.assert_array_equal(data_of(mine), data_of(whole))


@pytest.mark.usefixtures("messages")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_no_two_results_share_memory_and_none_is_an_argument(step):
    x = jnp.arange(3.0) + 1
    got = [
        g
        for g in compiled(step, x)(x)
        if not jnp.issubdtype(g.dtype, jax.dtypes.prng_key) and g.size
    ]
    places = [a.unsafe_buffer_pointer() for a in (x, *got)]
    assert len(set(places)) == len(places)


def test_sixty_four_bits_survive_in_a_thread_without_the_setting():
    with jax.enable_x64(True):
        x = jnp.arange(3, dtype=jnp.float64) + 2**-40
        program = compiled(
            lambda x: [lax.psum(x, "r"), lax.psum(x.astype(jnp.int64) + 2**40, "r")], x
        )
    total, count = program(x)
    assert (total.dtype, count.dtype) == (np.float64, np.int64)
    assert np.asarray(total)[0] == 2**-39 and np.asarray(count)[0] == 2**41


def test_a_guard_against_implicit_transfers_is_about_the_users_own():
    for x in (jnp.ones(2), jnp.ones(BIG)):
        program = compiled(lambda x: lax.psum(lax.psum(x, "r") + 1, "r") + 1, x)
        with jax.transfer_guard("disallow"):
            (total,) = program(x)
        assert np.asarray(total)[0] == 7


def test_numbers_of_python_and_numpy_have_the_types_that_the_step_was_traced_with():
    for number in (1.5, np.float64(1.5), np.full((), 1.5)):
        (total,) = compiled(lambda x: lax.psum(x * 2, "r") + x, number)(number)
        assert total.dtype == np.float32 and float(total) == 7.5


def test_there_are_as_few_executables_as_the_order_of_messages_allows(monkeypatch):
    made = []
    compile_part = host_program.compile_with_arguments
    monkeypatch.setattr(
        host_program,
        "compile_with_arguments",
        lambda *a, **k: made.append(1) or compile_part(*a, **k),
    )
    large = jnp.ones(2**21)  # two sums of this size are sent separately

    def executables(step):
        made.clear()
        compiled(step, large)
        return len(made)

    assert executables(lambda x: lax.psum(x, "r")) == 0
    assert executables(lambda x: [lax.psum(x, "r"), lax.psum(x, "r")]) == 0
    assert executables(lambda x: [lax.psum(x * 2, "r"), lax.psum(x * 3, "r")]) == 1
    assert executables(lambda x: [lax.psum(x * 2, "r") + 1, lax.psum(x * 3, "r") + 1]) == 2
    assert executables(lambda x: lax.psum(lax.psum(x * 2, "r") + 1, "r") + 1) == 3


def test_callbacks_keep_their_place_among_the_messages():
    comm = EqualRanks()
    seen = []

    def step(x):
        total = lax.psum(x, "r")
        jax.debug.callback(lambda v: seen.append((len(comm.sent), float(v[0]))), x, ordered=True)
        return lax.psum(total * 2, "r")

    x = jnp.ones(2)
    (got,) = compiled(step, x, comm=comm)(x)
    jax.block_until_ready(got)
    jax.effects_barrier()
    assert seen == [(1, 1.0)] and np.asarray(got).tolist() == [8.0, 8.0]


def test_an_error_of_mpi_ends_all_ranks_with_the_line():
    x = jnp.ones(2)
    with pytest.raises(
        RuntimeError,
        match=r"^MPI failed in `allreduce`, at .*test_host_program\.py:\d+.*Other MPI error",
    ):
        compiled(lambda x: lax.psum(x, "r"), x, comm=EqualRanks(broken=True))(x)


def test_memory_of_a_run_counts_the_values_between_its_stages():
    x = jnp.ones(50_000)
    assert compiled(lambda x: lax.psum(x, "r"), x).memory_analysis().temp_size_in_bytes == 0
    between = compiled(lambda x: lax.psum(x * 2, "r") + 1, x).memory_analysis().temp_size_in_bytes
    assert 0 <= between - 2 * x.nbytes < 1000  # the operand, and the sum, whose buffer stays inside


def test_lent_results_are_large_ones_of_messages_and_any_of_loops():
    def step(x, small):
        total = lax.psum(x, "r")
        looped, _ = lax.scan(lambda carry, _: (lax.psum(carry, "r"), None), x, length=2)
        return total, total + 1, lax.psum(small, "r"), looped, x, total

    _, program = lowered(step, jnp.ones(BIG), jnp.ones(2))
    assert program.lent == [0, 3], (
        "the last result is a copy, because the first one is the same value"
    )


def test_results_are_free_to_move_if_the_arguments_were():
    big = jnp.ones(BIG)
    for step in (
        lambda x: lax.psum(x, "r"),
        lambda x: lax.psum(x, "r") + 1,
        lambda x: lax.all_gather(x[:3], "r"),
    ):
        (got,) = compiled(step, big)(big)
        assert not got.committed
    place = jax.sharding.SingleDeviceSharding(HOST)
    _, host = lowered(lambda x: lax.psum(x, "r"), big)
    (got,) = host.compile([big], name="t", host=HOST, place=place)(jax.device_put(big, place))
    assert got.committed


def test_an_invalid_value_is_found_after_the_last_message():
    comm = EqualRanks()
    program = compiled(
        lambda x: lax.psum(jnp.log(lax.psum(x, "r")) * 0, "r"), x := -jnp.ones(2), comm=comm
    )
    with jax.debug_nans(True), pytest.raises(compat.InternalFloatingPointError):
        program(x)
    assert len(comm.sent) == 2


def test_a_failure_between_two_messages_ends_all_ranks():
    def fails(x):
        raise OSError("disk gone")

    def between(x):
        return lax.psum(jax.pure_callback(fails, x, lax.psum(x, "r")), "r")

    def in_a_loop(x):
        return lax.scan(
            lambda x, _: (jax.pure_callback(fails, x, lax.psum(x, "r")), None), x, None, length=2
        )

    x = jnp.ones(2)
    for step in (between, in_a_loop):
        with pytest.raises(
            RuntimeError, match=r"(?s)^`t` failed between two of its exchanges: .*disk gone"
        ):
            compiled(step, x)(x)
    with pytest.raises(Exception, match="disk gone") as caught:
        compiled(lambda x: lax.psum(jax.pure_callback(fails, x, x), "r"), x)(x)
    assert "between two" not in str(caught.value)


FORKED = """
import os, numpy as np
from jaxcross.wire.arena import Arena
arena = Arena()
memory = arena.take((1 << 20,), np.float32)
memory[:] = 1
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.read(reader, 1)  # until the parent has used the slot again
    os._exit(0 if (memory == 1).all() else 7)
place = memory.ctypes.data
del memory
again = arena.take((1 << 20,), np.float32)
assert again.ctypes.data == place
again[:] = 6
os.write(writer, b"x")
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_keeps_what_it_had():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True)


BIG = (SMALLEST_BYTES // 4 + 1,)


def test_a_slot_is_taken_again_when_nothing_refers_to_it():
    arena = Arena()
    first = arena.take(BIG, np.float32)
    assert first.ctypes.data % 4096 == 0
    place, size = first.ctypes.data, arena.nbytes
    view = first[3:]
    del first
    assert arena.take(BIG, np.float32).ctypes.data != place  # `view` still refers to it
    del view
    assert arena.take(BIG, np.int32).ctypes.data == place
    assert arena.nbytes == 2 * size


def test_a_slot_is_taken_again_as_soon_as_its_jax_array_is_gone():
    """JAX would keep the memory until its next call, maybe after the next exchange received."""
    arena = Arena()
    for _ in range(5):
        compat.put_on_host(arena.take(BIG, np.float32), HOST, committed=False).block_until_ready()
    assert arena.nbytes == -(-4 * BIG[0] // 4096) * 4096


def test_a_slot_is_not_taken_while_a_jax_array_or_a_computation_reads_it():
    arena = Arena()

    def filled(value):
        memory = arena.take((1024, 256), np.float32)
        memory[...] = value
        return compat.put_on_host(memory, HOST, committed=False)

    slow = jax.jit(lambda x: lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y.T @ x), x).sum())
    expected = float(slow(jnp.full((1024, 256), 0.5)))
    kept = [filled(float(n)) for n in range(3)]
    running = slow(filled(0.5))
    for n in range(3, 8):
        filled(float(n))
    assert float(running) == expected
    assert [float(x[0, 0]) for x in kept] == [0.0, 1.0, 2.0]


def test_a_donated_array_never_gives_its_slot_away():
    """JAX doesn't write into borrowed memory, so a state can't end up in an arena."""
    arena = Arena()
    memory = arena.take(BIG, np.float32)
    memory[...] = 1
    lent = compat.put_on_host(memory, HOST, committed=False)
    assert lent.unsafe_buffer_pointer() == memory.ctypes.data
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(lent)
    assert result.unsafe_buffer_pointer() != memory.ctypes.data
    assert (memory == 1).all() and (np.asarray(result) == 2).all()


def test_idle_slots_go(monkeypatch):
    clock = itertools.count(0.0, IDLE_S / 2 + 1)
    monkeypatch.setattr("jaxcross.wire.arena.time.monotonic", lambda: next(clock))
    arena = Arena()
    kept, dropped = arena.take(BIG, np.float32), arena.take((2 * BIG[0],), np.float32)
    del dropped
    gc.collect()
    sizes = [arena.nbytes]
    for _ in range(3):
        arena.take((3 * BIG[0],), np.float32)
        sizes.append(arena.nbytes)
    assert sizes[-1] < sizes[1] and kept.size == BIG[0]


class HostRanks:
    """A `Wire` for `crossover`'s compiler, whose other rank sends what this rank sends."""

    def __init__(self):
        self.arena = Arena()

    def recognise(self, eqn, axes):
        return LocalRanks().recognise(eqn, axes)

    def coords(self, axes):
        return LocalRanks().coords(axes)

    def lower(self, jaxpr, axes):
        channel = Channel(calls=host_calls, comm=EqualRanks(), rank=0, size=RANKS)
        messages = lower(jaxpr, make_rank_grid(axes, rank=0, size=RANKS), lambda *_: channel)
        return (
            HostLowered(messages, self.arena.take, print)
            if host_program.holds_message(messages)
            else None
        )


@pytest.mark.parametrize("wire", [HostRanks(), LocalRanks()], ids=["host", "executable"])
def test_only_memory_of_xla_is_overwritten(wire):
    """The new parameters can reuse the gradients' memory, unless the wire lent it to XLA."""
    w = jnp.ones((256, 256))
    traced = trace(lambda w, x: w - lax.psum(w * x, "r"), (w, w), axes=AXES, wire=wire)
    done = stages.compile(stages.cut(traced), [w, w])
    overwritten = [r.memory().alias_size_in_bytes for r in done.runnables if r.device is None]
    assert overwritten[-1] == (0 if isinstance(wire, HostRanks) else w.nbytes)
    run = done.execution([w, w])
    for n in range(len(done.runnables)):
        run.run(n)
    assert (np.asarray(run.outputs()) == -1).all()


def late_exchange(x):
    """The peak comes long before anything is received."""
    large = jnp.outer(x[:1024], x[:1024]) @ jnp.ones((1024, 1024))
    return lax.psum(x * jnp.max(large), "r")


def masked_sum(x):
    """The first sum leaves its segment only through a maximum.

    The segment therefore returns the sum in addition to its outputs.
    """
    return lax.psum(jnp.maximum(lax.psum(x * 2, "r"), 0), "r") + 1


def exchanged_result(x):
    return lax.psum(x, "r")


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("step", [late_exchange, masked_sum, exchanged_result])
def test_both_sets_of_receive_buffers_are_booked_whatever_is_alive(step, committed):
    x = jax.device_put(jnp.ones(102_400), HOST if committed else None)
    wire = HostRanks()
    done = stages.compile(stages.cut(trace(step, (x,), axes=AXES, wire=wire)), [x])
    results = []
    for _ in range(2):
        run = done.execution([x])
        for n in range(len(done.runnables)):
            run.run(n)
        results.append(run.outputs())
    computing = [
        r.memory().temp_size_in_bytes
        + sum(done.program.values[v].nbytes for v in r.segment.outputs)
        for r in done.runnables
        if r.device is None
    ]
    assert wire.arena.nbytes >= x.nbytes
    assert done.boundary_live_bytes() >= x.nbytes + wire.arena.nbytes
    assert done.peak_live_bytes() >= x.nbytes + max(computing, default=0) + wire.arena.nbytes
    assert not np.shares_memory(*(np.asarray(jax.tree.leaves(result)[0]) for result in results))
