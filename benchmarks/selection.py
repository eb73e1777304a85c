"""How long does it take to find the largest elements of a vector, and does the library take the
faster way?

    python benchmarks/selection.py [--json FILE] [--smoke] [--cores N]

We compare `lax.top_k` (`exact`) with the threshold search of `jaxcross.exchange.select`. The two
take turns, on vectors that are up to as long as ResNet-50's gradients. We report:
  count_error  how far the number of selected elements is from k, over k
  recovered    the sum of the magnitudes of the selected elements over that of the k largest
               elements
There are targets for the longest vector at 1%. On a CPU, the selection should take at most 0.15 s
on one core. On an accelerator, it should take at most a fifth of the time of `lax.top_k`. On both,
the number of selected elements should be within 1% of k.

The vectors have normally distributed numbers. The longest vector is also measured with two other
kinds of data. `layers` has blocks with different scales, like the layers of a model. In
`misleading`, all elements that the search looks at in its sample are small, so that it has to look
through the whole vector.

The process uses only one core, as if several ranks shared a host. With `--cores 0`, it uses all
cores. On a machine with an accelerator, the accelerator is measured instead.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ranks import as_rank
from workloads import in_turn, parser, spread, write_json

from jaxcross.exchange import sparse
from jaxcross.exchange.select import faster_selection, sample_stride, select

WAYS = ("exact", "threshold")
LONGEST = 25_600_000
SIZES = (1 << 12, 1 << 14, 1 << 15, 1 << 16, 1 << 18, 1 << 20, 1 << 22, LONGEST)
DENSITIES = (0.001, 0.01, 0.1)
DATA = ("normal", "layers", "misleading")
TARGET_S, TARGET_COUNT_ERROR, TARGET_OVER_EXACT = 0.15, 0.01, 1 / 5


def vector(data: str, size: int, seed: int = 0) -> np.ndarray:
    """Returns the data that the module's head describes: `normal`, `layers` or `misleading`."""
    rng = np.random.default_rng((size, seed))
    x = rng.standard_normal(size, dtype=np.float32)
    if data == "layers":
        for block, scale in zip(
            np.array_split(x, min(161, size)), 10 ** rng.uniform(-4, 0, 161), strict=False
        ):
            block *= np.float32(scale)
    elif data == "misleading":
        x[:: sample_stride(size)] *= np.float32(1e-6)
    return x


def measure(size: int, density: float, repeats: int, data: str = "normal") -> dict[str, Any]:
    """Times both ways on one length, density and kind of data, and checks what they select."""
    k = sparse.slots(density, size)
    # On a short vector, a single call takes no longer than the noise of the clock and of JAX's
    # dispatch, so we time many calls at once. Each call gets different numbers, because a processor
    # learns to predict the branches of a sort if it sorts the same numbers again.
    steps = max(1, min(100, (1 << 20) // size))
    xs = [jnp.asarray(vector(data, size, seed)) for seed in range(steps)]
    x = xs[0]
    ways = {way: jax.jit(functools.partial(select, k=k, selection=way)) for way in WAYS}
    raw = in_turn(
        {way: lambda _, batch, f=f: (f(next(batch)), None) for way, f in ways.items()},
        dict.fromkeys(ways),
        itertools.cycle(xs),
        repeats=repeats,
        steps=steps,
    )
    largest = float(np.sum(np.sort(np.abs(np.asarray(x, np.float64)))[size - k :]))
    row: dict[str, Any] = {
        "size": size,
        "density": density,
        "data": data,
        "k": k,
        "chosen": faster_selection(size, k),
        "ways": {},
    }
    for way, function in ways.items():
        values, indices = map(np.asarray, function(x))
        row["ways"][way] = {
            "s": spread(raw[way]),
            "count_error": abs(int((indices < size).sum()) - k) / k,
            "recovered": float(np.abs(values.astype(np.float64)).sum()) / largest,
        }
    row["faster"] = min(WAYS, key=lambda way: row["ways"][way]["s"]["median"])
    best, own = (row["ways"][way]["s"]["median"] for way in (row["faster"], row["chosen"]))
    row["chosen_over_faster"] = own / best
    return row


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Compares the way that the library chooses for the longest vector at 1% with the targets."""
    own, exact = (row["ways"][way] for way in (row["chosen"], "exact"))
    over = own["s"]["median"] / exact["s"]["median"]
    fast = (
        own["s"]["median"] <= TARGET_S
        if jax.default_backend() == "cpu"
        else over <= TARGET_OVER_EXACT
    )
    return {
        "s": own["s"]["median"],
        "target_s": TARGET_S,
        "over_exact": over,
        "target_over_exact": TARGET_OVER_EXACT,
        "count_error": own["count_error"],
        "target_count_error": TARGET_COUNT_ERROR,
        "met": fast and own["count_error"] <= TARGET_COUNT_ERROR,
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--cores",
        type=int,
        default=1,
        metavar="N",
        help="number of cores to use, or 0 for all (default: 1)",
    )
    options.add_argument("--repeats", type=int, default=11, help="default %(default)s")
    options.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="D", help="lengths (default: 8)"
    )
    args = options.parse_args()
    as_rank(args.cores)
    sizes, repeats = ((1 << 12,), 1) if args.smoke else (args.sizes, args.repeats)
    result: dict[str, Any] = {
        "backend": jax.default_backend(),
        "cores": len(os.sched_getaffinity(0)),
        "rows": [],
    }
    cases = [(size, density, "normal") for size in sizes for density in DENSITIES]
    for size, density, data in (*cases, *((sizes[-1], 0.01, data) for data in DATA[1:])):
        row = measure(size, density, repeats, data)
        result["rows"].append(row)
        times = ", ".join(f"{way} {row['ways'][way]['s']['median'] * 1e3:.3g} ms" for way in WAYS)
        print(
            f"{row['k']} of {size} {data}: {times}; the library takes {row['chosen']}, "
            f"{row['chosen_over_faster']:.2f} times the faster one",
            flush=True,
        )
    wanted = sizes[-1], 0.01, "normal"
    (longest,) = (
        row for row in result["rows"] if (row["size"], row["density"], row["data"]) == wanted
    )
    result["largest"] = found = verdict(longest)
    print(
        f"1% of {sizes[-1]}: {found['s']:.3f} s (target {TARGET_S} on a CPU), "
        f"{found['over_exact']:.2f} of exact's (target {TARGET_OVER_EXACT} elsewhere), count "
        f"{found['count_error']:.2%} off k: {'met' if found['met'] else 'missed'}"
    )
    write_json(args.json, __doc__, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
