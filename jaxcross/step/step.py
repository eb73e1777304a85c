"""`crossover`: cuts an ordinary train step into segments and runs it segment by segment.

`crossover` itself just checks its arguments and returns a `Step`; the actual work happens when the
step is called. The first call with new argument types traces the function and produces a `Variant`,
which is the step for these types. Later calls with the same types reuse it.

When a step is called from one of a runner's jobs, the job runs the variant, interleaving it with
other jobs. Otherwise the step runs it by itself ("standalone").
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast, overload

import jax
import jax.numpy as jnp

from jaxcross._arguments import Selection, both_donated_and_static, check_disjoint, select
from jaxcross._jax_compat import jit_disabled, trace_context, x64_is_local
from jaxcross._pytree import (
    PyTree,
    StaticSplit,
    TreeDef,
    hold_static,
    not_arrays,
    static_places,
    why_not_static,
)
from jaxcross.errors import CutError, ExchangeError
from jaxcross.jobs import current_engine
from jaxcross.program import (
    BUCKET_BYTES,
    Cut,
    Program,
    SingleFlightCache,
    Traced,
    check_arrays,
    check_step,
    checked_bytes,
    checked_cut,
    copy_shared,
    stages,
    step_name,
)
from jaxcross.runtime import Standalone
from jaxcross.step import nnx
from jaxcross.step.commit_flag import commit_flag, with_commit_flag
from jaxcross.step.exchange_agreement import agree_standalone, comparison_of_calls, is_current
from jaxcross.step.prepare import prepare
from jaxcross.step.profile import Profile, ProfiledCut
from jaxcross.step.signature import (
    ArgType,
    StaticValue,
    are_ready,
    arg_types_of,
    bind_static,
    check_hashable,
    check_leaves,
    describe_change,
    describe_structures,
)
from jaxcross.step.variant import StepRecord, Variant
from jaxcross.wire import axis_sizes
from jaxcross.world import World, current_world

_log = logging.getLogger("jaxcross")
Axes = str | Mapping[str, int]
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
Owner = TypeVar("Owner")


@overload
def crossover(
    step: Callable[P, R],
    *,
    axes: Axes,
    cut: Cut | ProfiledCut = ...,
    bucket_bytes: int = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
) -> Step[P, R]: ...


@overload
def crossover(
    step: None = None,
    *,
    axes: Axes,
    cut: Cut | ProfiledCut = ...,
    bucket_bytes: int = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
) -> Callable[[Callable[P, R]], Step[P, R]]: ...


def crossover(
    step: Callable[P, R] | None = None,
    *,
    axes: Axes,
    cut: Cut | ProfiledCut = "whole",
    bucket_bytes: int = BUCKET_BYTES,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Step[P, R] | Callable[[Callable[P, R]], Step[P, R]]:
    """Wraps a train step to run over MPI, with its exchanges separated from its computation.

    Called outside a job, the result behaves like `jax.jit(step)` on every rank. A second thread
    performs the step's exchanges while the calling thread computes whatever doesn't depend on them.
    The call returns once all exchanges are done. As with any JAX function, the results may still be
    being computed at that point. Called from a job of a `Runner`, the step's segments are
    interleaved with those of other jobs.

    Every rank must call the step the same number of times and with the same shapes. Results
    obtained through exchanges are identical on all ranks.

    Args:
        step: An ordinary JAX function with named-axis collectives, written as for `pmap` or for
            `shard_map(check_vma=False)` (`psum` transposes to `psum`), or else a `jax.shard_map`
            over a mesh with the same axes. Its arguments are the rank's own shards. Arguments and
            results may be Flax NNX objects, Equinox modules, and other pytrees. Leaves that JAX
            can't trace, such as functions and strings, are static, as in `eqx.filter_jit`. If
            `step` is omitted, a decorator is returned.
        axes: The name of a single axis spanning all ranks, or a mapping from axis names to sizes.
            With several axes, ranks are numbered in row-major order. One of the sizes may be -1.
        cut: Where to cut the step. `"whole"` computes everything that precedes the exchanges, then
            performs all exchanges, then computes the rest. A number also cuts the computation at
            points where gradients become ready, into about that many collective segments. That way,
            a step that runs alone can exchange its first gradients while it's still computing the
            others. `"auto"` finds the fastest number on the first call, by timing several on copies
            of the arguments, and logs it. Alongside other jobs, which hide the exchanges anyway, it
            uses one segment per 25 MB instead, at most 8. A job keeps its cut until it ends. The
            cut affects the last bits of the results, so to reproduce a run, pass the number that
            was found. A number saved by an earlier run (in `jax_compilation_cache_dir`) is timed
            again, and dropped if it's slower than the uncut step. `plan.cut(profiles)` uses the
            number that's fastest for a step that runs alone according to its profiles, without any
            timing.
        bucket_bytes: Exchanges smaller than this are packed into buffers of up to this size. 0
            turns packing off.
        donate_argnums: Numbers of positional arguments whose arrays the step may overwrite, after
            which you can't use them any more. Negative numbers count from the last positional
            argument of a call.
        donate_argnames: Names of arguments whose arrays the step may overwrite. As with `jax.jit`,
            if you only give numbers or only names, the rest is inferred from the step's signature.
            If you give both, numbers apply to arguments passed by position and names to those
            passed by keyword.
        static_argnums: Numbers of positional arguments that are hashable values rather than arrays.
            Each new value triggers a recompilation.
        static_argnames: Names of static arguments. Combined with `static_argnums` in the same way
            as the donated arguments.

    Raises:
        TypeError: `step`, `axes`, or the numbers or names of arguments have the wrong type, or
            `step` is a `jax.pmap`.
        ValueError: A size, `cut` or `bucket_bytes` is out of range, the step has no argument with
            a number or name that you gave, or an argument is both donated and static.
        CutError: (when called) The step can't be traced or cut, a leaf is neither an array nor
            something that can be hashed and compared, or a profile belongs to a different step or
            number of ranks.
        ExchangeError: (when called) The step's exchanges differ between ranks, or an earlier step
            failed after some of its exchanges.
        JobError: (when called) Two threads call steps at the same time outside a runner, or two
            running jobs pass the same NNX object to a step.

    Example:
        >>> @jaxcross.crossover(axes="batch", donate_argnums=0)
        ... def train_step(params, batch):
        ...     grads = jax.lax.pmean(jax.grad(loss)(params, batch), "batch")
        ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    """
    if step is None:
        return partial(
            crossover,
            axes=axes,
            cut=cut,
            bucket_bytes=bucket_bytes,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if isinstance(step, Step):
        raise TypeError(
            f"`{step.__name__}` is a crossover step already. Pass its function to `crossover`, "
            f"`{step.__name__}.step`."
        )
    name = step_name(step)
    check_step(step, name)
    profiles: tuple[Profile, ...] = ()
    if isinstance(cut, ProfiledCut):
        profiles = cut.profiles
        cut = cut.pieces
    given = cut if isinstance(cut, list | tuple) else (cut,)
    if any(isinstance(each, Profile) for each in given):
        raise ValueError(
            f"`cut` cannot be a profile or hold profiles, got {cut!r:.60}. To cut by profiles, "
            "pass `jaxcross.plan.cut(profiles)`"
        )
    donated = select(step, name, "donate", numbers=donate_argnums, names=donate_argnames)
    static = select(step, name, "static", numbers=static_argnums, names=static_argnames)
    check_disjoint(name, donated, static)
    return Step(
        step,
        axis_sizes(axes),
        checked_cut(cut),
        checked_bytes(bucket_bytes),
        donated,
        static,
        profiles,
    )


# (structure of the arguments including their static leaves, static values, JAX's configuration, id
# of the world, whether there's a commit flag)
_CacheKey = tuple[jax.tree_util.PyTreeDef, Sequence[StaticValue], object, int, bool]


class _Call(NamedTuple):
    """The latest call of a step; the next one usually has the same key and types."""

    key: _CacheKey
    arg_types: list[ArgType]
    variant: Variant
    split: StaticSplit


class Step(Generic[P, R]):
    """A train step that can be called on every rank, as returned by `crossover`."""

    cut: Cut

    def __init__(
        self,
        step: Callable[P, R],
        axes: Axes,
        cut: Cut,
        bucket_bytes: int,
        donate: Selection,
        static: Selection,
        profiles: tuple[Profile, ...] = (),
    ) -> None:
        update_wrapper(self, step, updated=())
        self.__name__ = step_name(step)
        self.step = step
        self.axes = axes
        self.cut = cut
        self.bucket_bytes = bucket_bytes
        self.donate = donate
        self.static = static
        self._roots = SingleFlightCache()  # maps the structure and types of arguments to a Variant
        self._last: _Call | None = None
        self._noticed = False  # a retrace has been logged
        self.may_change = False  # expect new argument types and don't log them
        self._standalone: Standalone | None = None  # the host for calls outside a runner
        self._host_lock = threading.Lock()
        self._agreed: Variant | None = None  # the last variant that all ranks ran outside a runner
        self._signature: int | None = None  # hash of that variant's exchanges
        self._record = StepRecord(cut=cut, bucket_bytes=bucket_bytes, profiles=profiles)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step. See `crossover`."""
        world = current_world()
        function, arrays, named = bind_static(
            cast("Callable[..., R]", self.step), self.__name__, self.static, args, kwargs
        )
        job = current_engine()
        skips = job is not None and job.nonfinite == "skip"
        if skips:
            function = self._with_commit_flag(function, len(args), kwargs)
            arrays = (*arrays, commit_flag())
        every, tree = jax.tree.flatten((arrays, named))
        settings = (getattr(function, "static", ()), trace_context(), id(world), skips)
        last = self._last
        # Static leaves are usually the same objects as last time, so we only compare identities
        # here. If they aren't, we compare values below, since they are part of the cache key.
        known = last is not None and last.split.matches(every, tree)
        leaves = last.split.arrays_of(every) if last is not None and known else every
        if (
            last is not None
            and known
            and last.key[1:] == settings
            and are_ready(leaves, last.arg_types)
        ):
            variant = last.variant.choose(leaves)
        else:
            if jit_disabled():
                raise CutError(
                    f"`{self.__name__}` was called under `jax.disable_jit()`, but a crossover step "
                    "only runs compiled. Call it outside `disable_jit`. To look at values inside "
                    "it, use `jax.debug.print`. If its function has no exchanges, you can also "
                    "call that function under `disable_jit`. "
                    "See docs/reference/limits-steps.md#the-step."
                )
            # Flax NNX objects need separate treatment. Searching the arguments for them takes
            # longer than flattening, so we only do it if the arguments have a new structure. If a
            # structure has made it past this point before, an object can only be one of its leaves,
            # as is a module with `pytree=False`.
            others = not_arrays(leaves)
            searched = (others, {}) if known else (args, kwargs)
            if nnx.holds_objects(*searched):
                if skips:
                    raise CutError(
                        f"`{self.__name__}` changes NNX objects in place, and a job with "
                        '`nonfinite="skip"` must be able to restore the state before the step. '
                        "Write the step so that it takes and returns what `nnx.split` returns. "
                        "See docs/howto/nonfinite.md#what-skip-needs."
                    )
                if job is not None:
                    nnx.claim(self, args, kwargs, job)
                return nnx.call(self, args, kwargs)
            if last is not None and known and not others:
                split = last.split
            else:
                split = self._split(arrays, named, every, tree)
                leaves = split.arrays_of(every)
            check_leaves(self.__name__, leaves, arrays, named)
            with nullcontext() if job is None else job.preparing():
                variant = self._variant(
                    world, function, arrays, named, leaves, (split.structure, *settings), split
                )
        if world.estimate_request:
            # The `jaxcross estimate` command runs the user's script and measures a step called
            # there. The measurement lives in `gains`, an outer layer that imports this folder, so
            # we can't import it at the top. Nothing else in this folder imports from an outer
            # layer.
            from jaxcross.gains import estimate_in_script

            estimate_in_script(variant, leaves, job)
        copy_shared(leaves, variant.traced.donated, new_types=self._last is not last)
        if job is not None:
            return job.run(prepare(variant, job), leaves, self._record)
        world.exchange_owner.check_not_stray(self.__name__)
        return self._run_standalone(variant, world, leaves)

    def _run_standalone(self, variant: Variant, world: World, leaves: Sequence[object]) -> PyTree:
        """Runs one step without a runner.

        Raises JobError if the step has exchanges and another thread is running a step at the same
        time. Without a runner to order them, the two threads' exchanges might be issued in a
        different order on each rank, mixing up the two steps' values.
        """
        assert variant.program is not None
        if world.size == 1 or (variant is not self._agreed and not variant.program.exchanges):
            host = self._counting_host(world)
            return host.run(prepare(variant, host), leaves, self._record)
        owner = world.exchange_owner
        with owner.step(self.__name__):
            # Don't count the call until now: if `owner.step` refuses it, other ranks might never
            # make it.
            host = self._counting_host(world)
            compare = None if self._agree(variant, host) else comparison_of_calls(variant, host)
            try:
                compiled = prepare(variant, host)
            except BaseException:
                if variant.tunes_cut:  # other ranks may still be searching
                    owner.broken_step = self.__name__
                owner.must_agree = True
                raise
            return host.run(compiled, leaves, self._record, compare=compare)

    def _counting_host(self, world: World) -> Standalone:
        """Returns the host for calls outside a runner, having counted this call."""
        # Calls without exchanges bypass `owner.step`, so two threads can get here at once. Without
        # the lock, each might create a host, and the second would replace the first. If the first
        # had already been given a number, this rank would know the step by a different number than
        # the other ranks from then on.
        with self._host_lock:
            host = self._standalone
            if host is None or host.world is not world:
                host = self._standalone = Standalone(world, self.__name__)
            host.calls += 1
            return host

    def pure_step(self) -> Step[..., PyTree]:
        """Returns the version of this step that takes NNX graphs and states instead of objects.

        It's always the same `Step`, which is therefore only compiled once.
        """
        return self.derived(
            "_pure", lambda: nnx.pure_function(self), profiles=self._record.profiles
        )

    def derived(
        self,
        name: str,
        make_function: Callable[[], Callable[..., PyTree]],
        *,
        profiles: tuple[Profile, ...] = (),
    ) -> Step[..., PyTree]:
        """Returns a step that runs a different function with this step's settings.

        There's only one per name, so that all jobs share its executables.
        """
        known = self.__dict__.get(name)
        if known is None:
            settings = (self.axes, self.cut, self.bucket_bytes, self.donate, self.static, profiles)
            made = Step(make_function(), *settings)
            # If several job threads race to get here, each creates a step. `setdefault` is atomic,
            # so only the first is stored and all threads get that same step.
            known = self.__dict__.setdefault(name, made)
        return known

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(
        self: Step[Concatenate[Owner, Q], R], instance: Owner, owner: type | None = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> object:
        """Binds the step to an instance, so that you can decorate methods with `crossover`."""
        return self if instance is None else partial(cast("Callable[..., R]", self), instance)

    @property
    def latest_program(self) -> Program | None:
        """The program run by the latest call, in the cut that was chosen.

        None before the first call, and for steps in which the host decides which branch of a `cond`
        to run, because these have a separate program for each branch.
        """
        return None if self._last is None else self._last.variant.program

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Returns the step traced for these arguments. Does not compile, wait or communicate."""
        return self.bind(*args, **kwargs)[0]

    def bind(self, *args: Any, **kwargs: Any) -> tuple[Traced, list[Any]]:
        """Returns the step traced for these arguments, and the flattened arguments.

        Does not compile, wait or communicate.
        """
        world = current_world()
        if nnx.holds_objects(args, kwargs):
            return nnx.bind(self, args, kwargs)
        function, arrays, named = bind_static(
            cast("Callable[..., R]", self.step), self.__name__, self.static, args, kwargs
        )
        traced = self._trace(world, function, arrays, named)
        return traced, jax.tree.leaves(hold_static((arrays, named)))

    def _split(
        self, arrays: PyTree, named: PyTree, leaves: Sequence[Any], tree: TreeDef
    ) -> StaticSplit:
        """Returns which of the leaves of `(arrays, named)` are static.

        Raises CutError if a leaf is neither an array nor can be static.
        """
        places = static_places(leaves, (arrays, named))
        if not places:
            return StaticSplit(tree, tree)
        if any(why_not_static(leaves[n]) is not None for n in places):
            check_arrays(self.step, arrays, named)  # its error contains the leaf's path
        return StaticSplit(
            tree,
            jax.tree.structure(hold_static((arrays, named))),
            tuple((n, leaves[n]) for n in places),
        )

    def _agree(self, variant: Variant, host: Standalone) -> bool:
        """Makes sure that all ranks agree on the exchanges.

        Returns whether this took a new agreement.
        """
        # If the host decides which branch of a `cond` to run, ranks with different values may take
        # different branches, so they have to agree again on every call. Otherwise they only do so
        # when the exchanges change. New shapes aren't reason enough: they may be new on this rank
        # only, and the other ranks wouldn't join in.
        signature = None if variant.traced.choices else variant.signature
        owner = host.world.exchange_owner
        always = signature is None or owner.must_agree
        if variant is self._agreed and not always:
            return False
        due = always or signature != self._signature or not is_current(variant)
        if due:
            owner.must_agree = True  # stays set if the agreement is interrupted
            try:
                agree_standalone(variant, host)
            except ExchangeError:  # raised on every rank
                # The script may catch this error and carry on. If its next step is new to some
                # ranks but not to others, only the former would start an agreement. So make all
                # ranks start a new agreement on their next step, unless the step calls mpi4jax,
                # which may involve only some of the ranks.
                owner.must_agree = not variant.is_unit
                raise
            owner.must_agree = False
        self._agreed = variant
        self._signature = signature
        return due

    def _trace(
        self,
        world: World,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Traced:
        mesh = world.rank_grid(self.axes)
        static = [place for place, _, _ in getattr(function, "static", ())]
        flagged = getattr(function, "has_commit_flag", False)  # as its last positional argument
        count = len(args) + sum(isinstance(place, int) for place in static) - flagged
        donated = self.donate.places(count, kwargs)
        for place in donated:
            if place in static:  # possible if one of them is a negative number
                raise both_donated_and_static(self.__name__, place)
        return stages.trace(
            function,
            args,
            kwargs,
            axes=mesh.sizes,
            wire=world.wire(),
            donate_argnums=_without_static(donated, static),
            donate_argnames=[place for place in donated if isinstance(place, str)],
            commit_flag_argnums=(len(args) - 1,) if flagged else (),
        )

    def _with_commit_flag(
        self, function: Callable[..., Any], count: int, named: Collection[str]
    ) -> Callable[..., Any]:
        """Adds a commit flag to the step, for a job that skips non-finite steps.

        Args:
            function: The step with its static arguments bound.
            count: Number of positional arguments in the call, including static arguments.
            named: Names of the keyword arguments in the call, including static arguments.
        """
        static = self.static.places(count, named)
        places = self.donate.places(count, named) if self.donate else (0,)
        state = [place for place in places if place not in static]
        return with_commit_flag(
            function,
            self.__name__,
            [*_without_static(state, static), *(x for x in state if isinstance(x, str))],
            donated=bool(self.donate),
        )

    def _variant(
        self,
        world: World,
        function: Callable[..., R],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: list[Any],
        cache_key: _CacheKey,
        split: StaticSplit,
    ) -> Variant:
        """Returns the variant for these arguments, tracing the step if they're new.

        JAX's x64 mode can be set for a single thread. In that case, we convert any NumPy arrays
        among the leaves to JAX arrays here, in place. Otherwise they might get converted on another
        thread (whichever dispatches the step), which doesn't have this setting and would give them
        different types.
        """
        try:
            arg_types = arg_types_of(leaves)
        except TypeError:
            check_arrays(self.step, args, kwargs)  # its error says which leaf isn't an array
            raise
        if x64_is_local():
            leaves[:] = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        last = self._last
        if last is not None and last.key == cache_key and last.arg_types == arg_types:
            self._last = last._replace(split=split)
            return last.variant.choose(leaves)
        check_hashable(self.__name__, cache_key[1])
        key = (*cache_key, tuple(arg_types))

        def make() -> Variant:
            if last is not None:
                self._notice_change(last, cache_key, arg_types, args, kwargs)
            return Variant(
                traced=self._trace(world, function, args, kwargs),
                record=self._record,
                world=world,
                cache_key=cache_key,
                trial_args=tuple(leaves),
            )

        variant = self._roots.get(key, make)
        self._last = _Call(cache_key, arg_types, variant, split)
        return variant.choose(leaves)

    def _notice_change(
        self,
        last: _Call,
        cache_key: _CacheKey,
        arg_types: list[ArgType],
        args: PyTree,
        kwargs: PyTree,
    ) -> None:
        """Logs why the step has to be retraced, but only the first time."""
        if self._noticed or self.may_change:
            return
        self._noticed = True
        old_key = last.key
        if old_key[0] != cache_key[0]:
            # Often it's only a static part of an argument that has changed, and the step still
            # computes the same thing. It's retraced in that case but not recompiled, because
            # executables are cached by what they compute.
            change = describe_structures(old_key[0], cache_key[0])
            text = (
                "`%s` is traced again, and compiled again if its program is new: %s. This notice "
                "comes once."
            )
        else:
            change = (
                "a static argument changed"
                if old_key[1] != cache_key[1]
                else "JAX's configuration changed"
            )
            change = describe_change(last.arg_types, arg_types, args, kwargs) or change
            text = "`%s` is compiled again: %s. This notice comes once."
        _log.warning(text, self.__name__, change)


def _without_static(places: Sequence[int | str], static: Sequence[int | str]) -> list[int]:
    """Returns the numbers in `places`, counted without the static arguments."""
    numbers = {place for place in static if isinstance(place, int)}
    return [n - sum(s < n for s in numbers) for n in places if isinstance(n, int)]
