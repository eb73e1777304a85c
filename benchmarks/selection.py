"""How long does it take to find the largest elements of a vector, and does the library take the faster way?

    python benchmarks/selection.py [--json FILE] [--smoke] [--cores N]

`lax.top_k` (`exact`) and the threshold search of `jaxcross.exchange.select`, in turn, for vectors up to as long as
ResNet-50's gradients. count_error: how far the number of selected elements is from k, over k. recovered: the sum of
their magnitudes over that of the k largest. The targets are those of the longest vector at 1%: 0.15 s on one core, a
count within 1% of k.

A process has one core, as where ranks share a host; `--cores 0` takes all. On an accelerator it measures that one.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from workloads import in_turn, parser, spread, write_json

from jaxcross.exchange import sparse
from jaxcross.exchange.select import chosen, select
from jaxcross.world import pages

WAYS = ("exact", "threshold")
LONGEST = 25_600_000
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, LONGEST)
DENSITIES = (0.001, 0.01, 0.1)
TARGET_S, TARGET_COUNT_ERROR = 0.15, 0.01


def measure(size: int, density: float, repeats: int) -> dict[str, Any]:
    """One length and density: seconds of each way, and what it found."""
    k = sparse.slots(density, size)
    x = jnp.asarray(np.random.default_rng(size).standard_normal(size, dtype=np.float32))
    ways = {way: jax.jit(functools.partial(select, k=k, selection=way)) for way in WAYS}
    # A few milliseconds a turn: a call of a short vector's is as short as the clock's and the dispatch's noise.
    steps = max(1, min(100, (1 << 20) // size))
    raw = in_turn({way: lambda _, x, f=f: (f(x), None) for way, f in ways.items()}, dict.fromkeys(ways), x,
                  repeats=repeats, steps=steps)  # fmt: skip
    largest = float(np.sum(np.sort(np.abs(np.asarray(x, np.float64)))[size - k :]))
    row: dict[str, Any] = {"size": size, "density": density, "k": k, "chosen": chosen(size, k), "ways": {}}
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
    """What the library's way takes of the longest vector at 1%, against the targets."""
    own = row["ways"][row["chosen"]]
    return {
        "s": own["s"]["median"], "target_s": TARGET_S, "count_error": own["count_error"],
        "target_count_error": TARGET_COUNT_ERROR,
        "met": own["s"]["median"] <= TARGET_S and own["count_error"] <= TARGET_COUNT_ERROR,
    }  # fmt: skip


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cores", type=int, default=1, metavar="N", help="cores of the process, 0: all (default: 1)")
    options.add_argument("--repeats", type=int, default=11, help="default %(default)s")
    args = options.parse_args()
    if environment := pages.settings(os.environ):  # as `jaxcross launch` starts a rank
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.cores :])
    sizes, repeats = ((1 << 12,), 1) if args.smoke else (SIZES, args.repeats)
    result: dict[str, Any] = {"backend": jax.default_backend(), "cores": len(os.sched_getaffinity(0)), "rows": []}
    for size in sizes:
        for density in DENSITIES:
            row = measure(size, density, repeats)
            result["rows"].append(row)
            times = ", ".join(f"{way} {row['ways'][way]['s']['median'] * 1e3:.3g} ms" for way in WAYS)
            print(f"{row['k']} of {size}: {times}; the library takes {row['chosen']}, "
                  f"{row['chosen_over_faster']:.2f} times the faster one", flush=True)  # fmt: skip
    longest = {row["density"]: row for row in result["rows"] if row["size"] == sizes[-1]}
    result["largest"] = found = verdict(longest[0.01])
    print(f"1% of {sizes[-1]}: {found['s']:.3f} s (target {TARGET_S}), count {found['count_error']:.2%} off k: "
          f"{'met' if found['met'] else 'missed'}")  # fmt: skip
    write_json(args.json, __doc__, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
