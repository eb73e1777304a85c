"""The least compression that hides exchanges, never more; predicted bytes are the actual ones."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross import exchange
from jaxcross.plan import JobCost, Profile, choose_compression
from jaxcross.plan.compression import CANDIDATES, _least_compression, _total, received_bytes
from tests.support.examples import scaled
from tests.support.exchange_table import TABLE, params

PARAMS = {
    "kernel": jax.ShapeDtypeStruct((512, 1024), jnp.float32),
    "bias": jax.ShapeDtypeStruct((1024,), jnp.float32),
}
# Short enough for `top_k` to sort it: the search for a threshold takes ten times as long to trace.
SMALL = {
    "kernel": jax.ShapeDtypeStruct((64, 128), jnp.float32),
    "bias": jax.ShapeDtypeStruct((128,), jnp.float32),
}


def choose(target, *times, ranks=2):
    logged = []
    jobs = [
        JobCost(name=f"job{n}", compute_s=c, exchange_s=m, params=SMALL)
        for n, (c, m) in enumerate(times)
    ]
    chosen = choose_compression(target, jobs, "batch", ranks=ranks, log=logged.append)
    assert len(chosen) == len(times)
    return chosen, logged[0]


def names(text):
    return [line.split(": ")[1].split(";")[0] for line in text.splitlines()[1:]]


def test_nothing_is_compressed_that_hides():
    _, text = choose(1.0, (2.0, 1.0), (1.0, 2.0))
    assert names(text) == ["mean", "mean"]
    assert "compression would buy nothing" in text


@pytest.mark.mostly_integration("1.9-expected1", "2.5-expected2")
@pytest.mark.parametrize(
    ("exchange_s", "expected"),
    [
        (1.3, ["mean", "mean, bfloat16"]),
        (1.9, ["mean, bfloat16", "mean, bfloat16"]),
        (2.5, ["mean, bfloat16", "qsgd, 127 levels"]),
        (57.0, ["top_k, 0.1%", "top_k, 0.1%"]),  # more than any other hides
    ],
)
def test_two_jobs_compress_as_far_as_they_must(exchange_s, expected):
    chosen, text = choose(1.0, (1.0, exchange_s), (1.0, exchange_s))
    assert sorted(names(text)) == sorted(expected), text
    assert "s, no further" in text
    for tx in chosen:
        tx.init({"w": jnp.ones((4, 4))})


def test_a_profile_says_the_cost():
    nbytes = 4 * (512 * 1024 + 1024)
    profile = Profile.whole("a", compute_s=1.0, exchange_s=2.0, nbytes=nbytes, ranks=2)
    cost = JobCost.of(profile, PARAMS)
    assert (cost.name, cost.compute_s, cost.exchange_s) == ("a", 1.0, 2.0)
    found, numbers = [], [JobCost(name="a", compute_s=1.0, exchange_s=2.0, params=PARAMS)]
    for jobs in ([cost], numbers):
        choose_compression(1.0, jobs, "batch", ranks=2, candidates=CANDIDATES[:2], log=found.append)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("nbytes", "ranks", "message"),
    [
        (4 * 513 * 1024, 4, "the profile of `a` was measured on 4 ranks, and `ranks` is 2"),
        (4 * 513 * 1024 - 4, 2, "exchanges 2.1 MB, but `params` has 2.1 MB. So the profile is of"),
        (
            10**7,
            2,
            (
                "exchanges 10.0 MB, but `params` has 2.1 MB. "
                "So the profile is of a different step, or it wasn't measured"
            ),
        ),
    ],
)
def test_the_profile_of_something_else_is_refused(nbytes, ranks, message):
    profile = Profile.whole("a", compute_s=1.0, exchange_s=2.0, nbytes=nbytes, ranks=ranks)
    with pytest.raises(ValueError, match=message):
        choose_compression(1.0, [JobCost.of(profile, PARAMS)], "batch", ranks=2)


def test_exchanges_that_cannot_hide_are_logged():
    _, text = choose(1.0, (1e-6, 1.0))
    assert names(text) == ["top_k, 0.1%"]
    assert "the strongest compression leaves" in text


def test_a_candidate_that_refuses_leaves_is_left_out():
    counts = SMALL | {"count": jax.ShapeDtypeStruct((3,), jnp.int32)}
    for exchange_s, expected in (
        (0.0, "mean"),
        (0.1, "mean"),
        (3.0, "power_sgd, rank 8"),
        (1e6, "top_k, 0.1%"),
    ):
        logged = []
        cost = JobCost(name="a", compute_s=1.0, exchange_s=exchange_s, params=counts)
        choose_compression(1.0, [cost], "batch", ranks=2, log=logged.append)
        *chosen, left_out = logged[0].splitlines()
        assert names("\n".join(chosen)) == [expected]
        assert left_out.startswith(
            "  a cannot have qsgd, 127 levels: the update `['count']` is int32"
        )
    with pytest.raises(TypeError):
        choose_compression(
            1.0,
            [JobCost(name="a", compute_s=1.0, exchange_s=1.0, params=jax.random.key(0))],
            "batch",
            ranks=2,
        )


def test_one_rank_exchanges_nothing():
    _, text = choose(1.0, (1.0, 5.0), ranks=1)
    assert names(text) == ["mean"]


@pytest.mark.parametrize(
    "bad", [dict(target=0), dict(target=1, compute_s=0), dict(target=1, jobs=0)]
)
def test_invalid_costs_are_refused(bad):
    jobs = [
        JobCost(name="a", compute_s=bad.get("compute_s", 1.0), exchange_s=1.0, params=PARAMS)
    ] * bad.get("jobs", 1)
    with pytest.raises(ValueError, match="must be positive|needs at least one job"):
        choose_compression(bad["target"], jobs, "batch", ranks=2)


def test_several_axes_are_refused():
    cost = JobCost(name="a", compute_s=1.0, exchange_s=1.0, params=PARAMS)
    with pytest.raises(
        ValueError,
        match=r"^`axes` of `choose_compression` must be a single axis, got `\('node', 'local'\)`",
    ):
        choose_compression(1.0, [cost], ("node", "local"), ranks=4)


@settings(deadline=None, max_examples=scaled(300))
@given(
    st.lists(st.lists(st.floats(0.01, 10), min_size=4, max_size=4), min_size=1, max_size=3),
    st.floats(0.05, 20),
)
def test_no_job_can_step_back(seconds, limit):
    at = _least_compression(seconds, limit)
    if _total(seconds, at) <= limit:
        for job, step in enumerate(at):
            for lower in range(step):
                assert _total(seconds, [*at[:job], lower, *at[job + 1 :]]) > limit
    else:
        best = min(
            _total(seconds, choice) for choice in itertools.product(range(4), repeat=len(seconds))
        )
        assert _total(seconds, at) == pytest.approx(best)


@pytest.mark.integration
def test_job_that_skips_candidates_waits_for_others():
    """16 bits save nothing for bfloat16 gradients; bfloat16 in the other job is enough."""
    logged = []
    half = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    single = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    costs = [
        JobCost(name="half", compute_s=1.0, exchange_s=1.2, params=half),
        JobCost(name="single", compute_s=1.0, exchange_s=1.0, params=single),
    ]
    choose_compression(1.0, costs, "batch", ranks=2, log=logged.append)
    assert names(logged[0]) == ["mean", "mean, bfloat16"]


@pytest.mark.integration
def test_the_candidates_descend():
    sent = [received_bytes(candidate.make("batch"), PARAMS, "batch", 2) for candidate in CANDIDATES]
    assert sent == sorted(sent, reverse=True)


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, 4, 5, 8, 16])
def test_what_is_foreseen_is_what_travels(ranks):
    """The wire bytes must match the table of exchanges. If steps differ, the largest counts."""
    rows = {row.name: row for row in TABLE}
    names = [
        "mean",
        "mean, bfloat16",
        "mean, ring",
        "mean, tree",
        "top_k",
        "top_k, bfloat16",
        "top_k, warm-up",
        "power_sgd",
        "qsgd",
        "sign_sgd",
        "local_sgd",
    ]
    shapes = [x.shape for x in params().values()]
    for row in map(rows.__getitem__, names):
        promised = max(row.bytes(shapes, ranks), row.later[1](shapes, ranks) if row.later else 0)
        found = received_bytes(row.made(ranks), params(), "batch", ranks)
        assert found == pytest.approx(promised, abs=ranks), row.name


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_sums_in_16_bits_are_counted_as_they_travel(ranks):
    def received(count, leaves=1, **options):
        layers = [jax.ShapeDtypeStruct((count,), jnp.float32)] * leaves
        return received_bytes(exchange.mean("batch", **options), layers, "batch", ranks)

    half = partial(received, wire_dtype=jnp.bfloat16)
    # Up to 64 KiB on all ranks together, every rank gathers everything.
    count = 64 * 1024 // (2 * ranks)
    assert half(count) == (ranks - 1) * 2 * count == ranks / 4 * received(count)
    assert half(2 * count) == received(2 * count) / 2
    # Small layers of a step share a buffer, so they count as one.
    assert half(count, leaves=16) == received(count, leaves=16) / 2


def test_init_may_ask_for_the_axis():
    unsized, sized = (
        exchange.sharded_optimizer(optax.adam(0.1), "batch", ranks=ranks) for ranks in (None, 4)
    )
    assert (
        received_bytes(unsized, PARAMS, "batch", 4) == received_bytes(sized, PARAMS, "batch", 4) > 0
    )


@pytest.mark.mostly_integration("2-mean, bfloat16", "8-power_sgd, rank 8")
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, "mean, bfloat16"),
        (4, "qsgd, 127 levels"),
        (8, "power_sgd, rank 8"),
        (16, "power_sgd, rank 8"),
    ],
)
def test_nothing_is_chosen_that_sends_no_less(ranks, expected):
    small = JobCost(
        name="small",
        compute_s=1.0,
        exchange_s=1.5,
        params=jax.ShapeDtypeStruct((64, 32), jnp.float32),
    )
    logged = []
    choose_compression(1.0, [small], "batch", ranks=ranks, log=logged.append)
    assert names(logged[0]) == [expected]
