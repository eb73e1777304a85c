"""Error texts for ranks that are about to make different exchanges.

Each text names two ranks and the first exchange where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

from jaxcross.program.ir import LAYOUT, without_sources

_UNTIL = re.compile(r" until='\w+'")
# If a program calls mpi4jax, all ranks have to take part in comparing their lists of calls. But a
# rank can only tell from its own calls whether the program does so. A rank without any calls would
# conclude that it doesn't, and wouldn't take part.
BARRIER_REMEDY = (
    "a rank without calls must make one to take part: `mpi4jax.barrier(comm=MPI.COMM_SELF)`"
)
_WIDTH = re.compile(r"\b(u?int|float|complex)(32|64|128)\b")


def signature_mismatch(name: str, signatures: Sequence[str]) -> str:
    """Returns the `ExchangeError` text for ranks whose signatures differ.

    Args:
        name: The step.
        signatures: `Program.exchange_signature(sources=True)` of each rank, in rank order. The
            sources aren't compared, since the ranks' files may lie in different folders.

    Raises:
        ValueError: All signatures are equal.
    """
    compared = without_sources(signatures)
    other = next((rank for rank, text in enumerate(compared) if text != compared[0]), None)
    if other is None:
        raise ValueError(f"The ranks' signatures of `{name}` are equal, so no error is needed.")
    first, second = (
        [line for line in signatures[r].splitlines() if not line.startswith(LAYOUT)]
        for r in (0, other)
    )
    lines = zip_longest(first, second, fillvalue="(no further exchange)")
    pairs = ((n, pair, without_sources(pair)) for n, pair in enumerate(lines))
    number, shown, (mine, theirs) = next(
        (each for each in pairs if each[2][0] != each[2][1]), (0, ("", ""), ("", ""))
    )
    here, there = (line.replace("\t", ", at ") for line in shown)
    difference = f"exchange {number} is\n    rank 0: {here}\n    rank {other}: {there}\n"
    layouts = [
        next((x for x in signatures[r].splitlines() if x.startswith(LAYOUT)), LAYOUT)
        for r in (0, other)
    ]
    divided = (
        " into segments differently. The numbers of exchanges in each segment are\n    rank 0: "
        f"{layouts[0].removeprefix(LAYOUT)}\n    rank {other}: "
        f"{layouts[1].removeprefix(LAYOUT)}\nAll ranks must give `crossover` the same `cut` and "
        "`bucket_bytes`, and must all have an accelerator or all have none."
    )
    if mine == theirs:
        return f"ranks 0 and {other} divide the exchanges of `{name}`{divided}"
    if _UNTIL.sub("", mine) == _UNTIL.sub("", theirs):
        return (
            f"ranks 0 and {other} make different numbers of iterations of a loop in `{name}`, or "
            "decide a conditional in it differently, because it only depends on numbers in the "
            f"code, which differ: {difference}If the numbers are supposed to differ, pass them to "
            "the step as an argument, so that ranks agree before each iteration."
        )
    if _WIDTH.sub(r"\1", mine) == _WIDTH.sub(r"\1", theirs):
        return (
            f"ranks 0 and {other} exchange elements of different widths in `{name}`: {difference}"
            "JAX's 64-bit types (`jax_enable_x64`) are probably enabled on some ranks only. Enable "
            "them on all ranks or none: look at the variable `JAX_ENABLE_X64` of each rank, and at "
            "`jax.config.update` and `jax.enable_x64` in the script. Otherwise, look for an "
            "argument that has a different type on some ranks."
        )
    return (
        f"ranks 0 and {other} exchange different things in `{name}`: {difference}"
        "All ranks must trace the same step with the same shapes; look for a branch on the rank, "
        "unequal batches, or an exchange's arguments, such as `every`, that differ."
        f"{'' if layouts[0] == layouts[1] else f' They divide their exchanges{divided}'}"
    )


def branch_call_mismatch(name: str, calls: Sequence[str]) -> str:
    """Returns the `ExchangeError` text for ranks that make equal exchanges in different calls.

    Args:
        name: The step or its job.
        calls: The call that each rank is in, such as `call 3`.
    """
    where = ", ".join(f"rank {rank} in {call}" for rank, call in enumerate(calls))
    return (
        f"`{name}` takes a branch with exchanges at different calls: {where}. Its predicate must "
        "be the same on every rank: look at counters in the states that ranks started from, and at "
        "arguments such as `every`."
    )


def step_mismatch(name: str, steps: Sequence[str]) -> str:
    """Returns the `ExchangeError` text for ranks that call different steps at the same time.

    Args:
        name: Who is calling the steps: a job or the script.
        steps: The step each rank is calling, in rank order.
    """
    where = ", ".join(f"rank {rank} {step}" for rank, step in enumerate(steps))
    return (
        f"the ranks of {name} call different steps: {where}. Exchanges match by their order alone, "
        "so the steps would mix their values. All ranks must call the same steps in the same "
        "order: choose the next one by something that is equal on all ranks, such as the number "
        "of steps, rather than by a clock or one rank's data."
    )


def order_mismatch(name: str, ranks: tuple[int, int], exchanges: Sequence[str]) -> str:
    """Returns the `ExchangeError` text for ranks that make similar exchanges in different orders.

    Args:
        name: The step.
        ranks: Two ranks that differ.
        exchanges: A description of each rank's exchanges where these two ranks differ, in rank
            order.
    """
    lines = "".join(f"\n    rank {rank}:\n        {exchanges[rank]}" for rank in ranks)
    return (
        f"ranks {ranks[0]} and {ranks[1]} make the exchanges of `{name}` in different orders, "
        f"which would mix their values:{lines}\nAll ranks must trace the exchanges in the same "
        "order. If a loop over names makes them, sort the names: a set of strings has a different "
        "order in each process, and a dict has the order in which it was filled. If each rank "
        "exchanges a different part of an array, select the part by an index that is an array."
    )


def without_calls(name: str, ranks: list[int]) -> str:
    """Returns the error text for ranks that, unlike others, make no mpi4jax calls in a step."""
    return (
        f"`{name}` calls mpi4jax on some ranks, but not on rank{'s' * (len(ranks) > 1)} "
        f"{', '.join(map(str, ranks))}: {BARRIER_REMEDY}."
    )
