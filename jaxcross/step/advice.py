"""Warnings about steps that are legal but probably not what the user meant."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator

from jaxcross import _jax_compat as compat
from jaxcross._pytree import TreeDef
from jaxcross.errors import quoted
from jaxcross.program import (
    Exchange,
    Program,
    Traced,
    human_bytes,
    means_of_means,
    own_derivatives,
    repeated_exchanges,
    repeated_sums,
)

_log = logging.getLogger("jaxcross")


def advise(traced: Traced, program: Program, warned: set[str]) -> None:
    """Warns if a step does something that's legal but probably a mistake.

    We warn about each of these problems:

    - The step doesn't exchange anything, so every rank trains its own model.
    - It exchanges inside a loop, where exchanges can't overlap with computation.
    - It exchanges once per mini- or micro-batch when a single exchange would do.
    - It averages over the ranks what each rank has already averaged over its own batch.
    - Its optimizer differentiates the loss itself, so the gradient never gets exchanged.
    - The state comes back with different element types, which makes the next step recompile.

    Args:
        traced: The step.
        program: The program that the step was cut into.
        warned: The warnings logged so far, updated in place. Each is only logged once, even if the
            step is compiled several times.
    """
    if not program.exchanges and not program.local_step:
        axes = quoted(n for n, _ in program.axes)
        warnings.warn(
            f"`{program.name}` has no exchange over {axes}: every rank computes alone. If it is a "
            'train step, it lacks something like `grads = jax.lax.pmean(grads, "batch")`; if it is '
            "not, plain `jax.jit` will do.",
            stacklevel=2,
        )
    if not program.is_unit:
        _advise_on_loops(program, warned)
    for text in _advice(traced):
        if text not in warned:
            warned.add(text)
            _log.warning("%s", text)


def _advise_on_loops(program: Program, warned: set[str]) -> None:
    loops: dict[str, list[Exchange]] = {}
    for x in program.exchanges:
        found = dict(x.params).get("loop")
        if found is not None:
            loops.setdefault(found, []).append(x)
    for loop, exchanges in loops.items():
        if loop in warned:
            continue
        warned.add(loop)
        votes = program.traced.present and any(
            (x.op, x.dtype, x.shape) == ("pmax", "int32", ()) for x in exchanges
        )
        rounds = (
            " Ranks may need different numbers of iterations, so they vote before each iteration, "
            "with 4 bytes, on whether to continue."
        )
        _log.warning(
            "`%s` exchanges inside a %s at %s, so the whole loop runs on the exchange lane and "
            "none of it overlaps with computation. Unroll the loop or move the exchange out of "
            "it.%s",
            program.name,
            loop.split()[0],
            exchanges[0].source,
            rounds if votes else "",
        )


def _advice(traced: Traced) -> Iterator[str]:
    name = traced.name
    for source in repeated_exchanges(traced.unflattened, traced.axes, traced.wire):
        yield (
            f"`{name}` exchanges in every mini-step of `optax.MultiSteps`, at {source}, because "
            "`MultiSteps` runs its optimizer each time and keeps only the last result. Use "
            "`jaxcross.exchange.accumulate(optimizer, every=k)` instead, which exchanges once for "
            "k gradients and gives the same updates up to rounding."
        )
    for line in repeated_sums(traced):
        less = human_bytes((line.times - 1) * line.nbytes)
        yield (
            f"`{name}` exchanges {human_bytes(line.nbytes)} of gradients {line.times} times per "
            f"step, at {line.source}, and adds up the results. Add up the gradients of the "
            "micro-batches first, and exchange the sum after the loop. That gives the same mean "
            f"up to rounding, and sends {less} less."
        )
    for source in means_of_means(traced):
        yield (
            f"`{name}` divides a loss by a count of this rank's batch, at {source}, and averages "
            "the result or its gradient over ranks. That is the mean of the ranks' means, in which "
            "a rank with few examples weighs as much as one with many. If the counts can differ "
            "between ranks, use them as weights: pass `weight=count` to the `update` of "
            "`jaxcross.exchange.mean(axes)`, or return `jax.lax.psum(count * grads, axes) / "
            "jax.lax.psum(count, axes)`."
        )
    for optimizer, source in own_derivatives(traced.unflattened, traced.axes, traced.wire):
        yield (
            f"`{optimizer}` in `{name}` differentiates the loss itself, at {source}, and exchanges "
            "no gradient. A function that is not a `shard_map` follows pmap's rules, by which that "
            "derivative is local to this rank even if the loss is averaged, so replicas drift "
            "apart. Make the whole step a `jax.shard_map(step, in_specs=..., out_specs=...)`, "
            "where JAX inserts these exchanges."
        )
    changed = _changed_type(traced)
    if changed is not None:
        path, before, after = changed
        yield (
            f"`{name}` takes `{path}` as {before.dtype} and returns it as {after.dtype}, so the "
            "next step is compiled again. Begin with the type that the step returns, e.g. "
            f"`jnp.asarray(value, jnp.{after.dtype})`, or convert the result with `astype`."
        )


def _changed_type(traced: Traced) -> tuple[str, compat.ShapedArray, compat.ShapedArray] | None:
    """Finds the first leaf of the state whose element type changes over the step.

    We have no way of knowing which argument is the state, so we guess: it's a donated argument with
    the same structure and shapes as one of the results. We ignore arguments that aren't donated,
    because these could be a model's parameters, in which case the lookalike result might be their
    gradients instead of new parameters.

    Returns:
        The leaf's path and its types before and after the step, or None if there's no such leaf.
    """
    positional, named = traced.in_tree.children()
    args = [*positional.children(), *named.children()]
    starts = list(itertools.accumulate((a.num_leaves for a in args), initial=0))
    outs = [compat.array_type(v) for v in compat.open_jaxpr(traced.jaxpr)[0].outvars]
    for start, tree in zip(starts, args, strict=False):
        if not tree.num_leaves or start not in traced.donated:
            continue
        given = traced.in_avals[start : start + tree.num_leaves]
        for at, result in _results(traced.out_tree):
            pairs = list(zip(given, outs[at : at + tree.num_leaves], strict=False))
            if result == tree and all(a.shape == b.shape for a, b in pairs):
                changed = (k for k, (a, b) in enumerate(pairs) if a.dtype != b.dtype)
                first = next(changed, None)
                if first is not None:
                    paths = traced.paths[0]
                    before, after = pairs[first]
                    return str(paths[start + first]), before, after
                break
    return None


def _results(tree: TreeDef) -> Iterator[tuple[int, TreeDef]]:
    """Yields the structure of a step's results and, if they're a tuple, of each element.

    Each structure comes with the index of its first leaf.
    """
    yield 0, tree
    node = tree.node_data()
    if node is not None and node[0] is tuple:
        starts = itertools.accumulate((c.num_leaves for c in tree.children()), initial=0)
        yield from zip(starts, tree.children(), strict=False)
