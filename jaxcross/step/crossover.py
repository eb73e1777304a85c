"""`crossover`: an ordinary train step -> one that is traced, cut, compiled, and run segment by segment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import jax
import jax.numpy as jnp

from jaxcross._arguments import as_numbers, by_position, positions
from jaxcross._jax_compat import jit_disabled, trace_context, x64_is_local
from jaxcross._pytree import PyTree
from jaxcross.errors import CutError, ExchangeError
from jaxcross.jobs.context import current_job
from jaxcross.plan.profile import Profile
from jaxcross.program import stages
from jaxcross.program.aliasing import copy_shared
from jaxcross.program.compile import SingleFlightCache
from jaxcross.program.cut import BUCKET_BYTES, Cut, checked_bytes, checked_cut
from jaxcross.program.ir import Program
from jaxcross.program.step_checks import check_step
from jaxcross.program.trace import Traced, check_arrays, step_name, trace
from jaxcross.runtime.standalone import Standalone
from jaxcross.step import nnx
from jaxcross.step.agreement import agree_standalone, comparison_of_calls, is_current
from jaxcross.step.prepare import prepare
from jaxcross.step.profiled import Profiles, as_profiles, cut_of
from jaxcross.step.script_estimate import estimate_in_script
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
from jaxcross.step.skip_nonfinite import commit_flag, with_commit_flag
from jaxcross.step.step_record import StepRecord
from jaxcross.step.variant import Variant
from jaxcross.wire.rank_grid import axis_sizes
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
    cut: Cut | Profiles = ...,
    bucket_bytes: int = ...,
    donate_argnums: int | Sequence[int] = ...,
    static_argnums: int | Sequence[int] = ...,
) -> Step[P, R]: ...


@overload
def crossover(
    step: None = None,
    *,
    axes: Axes,
    cut: Cut | Profiles = ...,
    bucket_bytes: int = ...,
    donate_argnums: int | Sequence[int] = ...,
    static_argnums: int | Sequence[int] = ...,
) -> Callable[[Callable[P, R]], Step[P, R]]: ...


def crossover(
    step: Callable[P, R] | None = None,
    *,
    axes: Axes,
    cut: Cut | Profiles = "whole",
    bucket_bytes: int = BUCKET_BYTES,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> Step[P, R] | Callable[[Callable[P, R]], Step[P, R]]:
    """Makes a train step run over MPI, its exchanges apart from its computation.

    Called alone, the result behaves like `jax.jit(step)` on every rank: it waits for the step's exchanges, which a
    second thread makes while this one computes what it can, and returns arrays that may still be computed. Called by a
    job of a `Runner`, its segments take turns with other jobs'.
    Every rank must call it the same number of times with equal shapes; results that the step makes by exchanges are
    the same on every rank.

    Args:
        step: An ordinary JAX function that uses named-axis collectives, written as for `pmap` or for
            `shard_map(check_vma=False)` (`psum` transposes to `psum`), or a `jax.shard_map` itself over a mesh of the
            same axes; its arguments are the rank's own shards. Decorates if left out.
        axes: A name (one axis over all ranks), or name -> size, row-major over ranks; one size may be -1.
        cut: `"whole"`: compute, exchange, compute. A number: also where gradients become ready, in about so many
            exchange segments, so that a step which runs alone computes on while its first gradients travel. `"auto"`:
            the number that takes least time, tried on copies at the first call and logged; next to other jobs, which
            hide the exchange anyway, one segment per 25 MB, 8 at most. A job keeps what it began with. The cut
            decides the last bits of results: to repeat a run, write the number that was found. What is kept over runs
            (`jax_compilation_cache_dir`) is timed again, and dropped if it is slower. A `plan.Profile` of this step,
            or several of it in several cuts: the number in which it is fastest alone by them, without a trial. If there
            is one alone, of the uncut step, times in more pieces are estimated from it.
        bucket_bytes: Exchanges smaller than this share buffers up to this size; at 0 none do.
        donate_argnums: Positional arguments whose arrays the step may overwrite; they cannot be used again. Negative
            numbers count from the last positional argument of a call, here as below; arguments with numbers from 0
            on may also be given by name.
        static_argnums: Positional arguments that are not arrays but hashable; the step is compiled for each value.

    Raises:
        TypeError: `step`, `axes` or the numbers of arguments are of another type; `step` is a `jax.pmap`.
        ValueError: A size, `cut` or `bucket_bytes` is out of range.
        CutError: (when called) the step cannot be traced or cut, or a profile is of another step or number of ranks.
        ExchangeError: (when called) ranks disagree about the step's exchanges, or an earlier step failed halfway.
        JobError: (when called) two threads call steps at once, outside a runner.

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
            static_argnums=static_argnums,
        )
    if isinstance(step, Step):
        raise TypeError(f"`{step.__name__}` is a crossover step already: give its function, `{step.__name__}.step`.")
    check_step(step, step_name(step))
    profiles = as_profiles(cut)
    return Step(
        step,
        axis_sizes(axes),
        checked_cut(cut_of(profiles) if profiles else cut),
        checked_bytes(bucket_bytes),
        as_numbers(donate_argnums, "donate_argnums"),
        as_numbers(static_argnums, "static_argnums"),
        profiles,
    )


# (structure of the arguments, static values, JAX's configuration, the world's id, whether there is a commit flag)
_CacheKey = tuple[jax.tree_util.PyTreeDef, Sequence[StaticValue], object, int, bool]
_Call = tuple[_CacheKey, list[ArgType], Variant]


class Step(Generic[P, R]):
    """A step under `crossover`. See there."""

    cut: Cut

    def __init__(
        self,
        step: Callable[P, R],
        axes: Axes,
        cut: Cut,
        bucket_bytes: int,
        donate: tuple[int, ...],
        static: tuple[int, ...],
        profiles: tuple[Profile, ...] = (),
    ) -> None:
        update_wrapper(self, step, updated=())
        self.__name__ = step_name(step)
        self.step, self.axes, self.cut, self.bucket_bytes = step, axes, cut, bucket_bytes
        self.donate, self.static = donate, static
        self._roots = SingleFlightCache()  # (structure, types) of the arguments -> Variant
        self._last: _Call | None = None
        self._noticed = False  # that it was compiled again
        self.may_change = False  # whether other arguments are expected, and need no notice
        self._standalone: Standalone | None = None  # the host outside a runner, once it was needed
        self._host_lock = threading.Lock()
        self._agreed: Variant | None = None  # what all ranks ran last, outside a runner
        self._signature: int | None = None  # of its exchanges
        self._record = StepRecord(cut=cut, bucket_bytes=bucket_bytes, profiles=profiles)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step. See `crossover`."""
        world = current_world()
        given, named = by_position(self.step, args, kwargs, (*self.static, *self.donate))
        function, arrays = bind_static(cast("Callable[..., R]", self.step), self.__name__, self.static, given)
        job = current_job()
        skips = job is not None and job.nonfinite == "skip"
        if skips:
            function, arrays = self._with_commit_flag(function, len(given)), (*arrays, commit_flag())
        leaves, tree = jax.tree.flatten((arrays, named))
        cache_key = (tree, getattr(function, "static", ()), trace_context(), id(world), skips)
        last = self._last
        if last is not None and last[0] == cache_key and are_ready(leaves, last[1]):
            variant = last[2].choose(leaves)
        else:
            if jit_disabled():
                raise CutError(
                    f"`{self.__name__}` was called under `jax.disable_jit()`: a crossover step exists as executables"
                    " only, cut from its trace. Call it outside, and look at values inside by `jax.debug.print`;"
                    " without exchanges the function itself can run under `disable_jit`."
                )
            # Looking for objects costs more than flattening; a structure that was run before held none.
            if (last is None or last[0][0] != tree) and nnx.holds_objects(given, named):
                if skips:
                    raise CutError(
                        f'`{self.__name__}` changes NNX objects in place, and a job with `nonfinite="skip"` must be'
                        " able to give back the state before the step. Let it take and return what `nnx.split` gives."
                    )
                return nnx.call(self, given, named)
            check_leaves(self.__name__, leaves, arrays, named)
            with nullcontext() if job is None else job.host.preparing():
                variant = self._variant(world, function, arrays, named, leaves, cache_key)
        if world.estimate_request:
            estimate_in_script(variant, leaves, job)
        copy_shared(leaves, variant.traced.donated, new_types=self._last is not last)
        if job is not None:
            return job.host.run(prepare(variant, job.host), leaves, self._record)
        world.exchange_owner.check_not_stray(self.__name__)
        return self._run_standalone(variant, world, leaves)

    def _run_standalone(self, variant: Variant, world: World, leaves: Sequence[object]) -> PyTree:
        """Runs one step without a runner, in the turn of this thread."""
        assert variant.program is not None
        if world.size == 1 or (variant is not self._agreed and not variant.program.exchanges):
            host = self._counting_host(world)
            return host.run(prepare(variant, host), leaves, self._record)
        owner = world.exchange_owner
        with owner.step(self.__name__):
            host = self._counting_host(world)  # a call that is refused here isn't counted: other ranks may not make it
            compare = None if self._agree(variant, host) else comparison_of_calls(variant, host)
            try:
                compiled = prepare(variant, host)
            except BaseException:
                if variant.tunes_cut:  # other ranks may be in the rest of the search
                    owner.broken_step = self.__name__
                owner.must_agree = True
                raise
            return host.run(compiled, leaves, self._record, compare=compare)

    def _counting_host(self, world: World) -> Standalone:
        """Returns the host outside a runner, which counts this call too."""
        # Under a lock, because a call that exchanges nothing has no turn to wait for. If two threads each made a host,
        # and the one whose host the ranks have numbered stored it first, this rank would call the step by another
        # number than the other ranks from then on.
        with self._host_lock:
            host = self._standalone
            if host is None or host.world is not world:
                host = self._standalone = Standalone(world, self.__name__)
            host.calls += 1
            return host

    def pure_step(self) -> Step[..., PyTree]:
        """Returns the step over NNX graphs and states; made once, so that it is compiled once."""
        return self.derived("_pure", lambda: nnx.pure_function(self), profiles=self._record.profiles)

    def derived(
        self, name: str, make_function: Callable[[], Callable[..., PyTree]], *, profiles: tuple[Profile, ...] = ()
    ) -> Step[..., PyTree]:
        """Returns the step of another function with the settings of this one; made once for each name."""
        known = self.__dict__.get(name)
        if known is None:
            settings = (self.axes, self.cut, self.bucket_bytes, self.donate, self.static, profiles)
            made = Step(make_function(), *settings)
            # Jobs share steps. `setdefault` is one operation of the interpreter: the first thread's step stays.
            known = self.__dict__.setdefault(name, made)
        return known

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self: Step[Concatenate[Owner, Q], R], instance: Owner, owner: type | None = None) -> Callable[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> object:
        """Binds the step to an instance, as its first argument, when it is looked up as a method."""
        return self if instance is None else partial(cast("Callable[..., R]", self), instance)

    @property
    def latest_program(self) -> Program | None:
        """The program of the latest call, with the cut that was chosen; None before, and where a `cond` decides."""
        return None if self._last is None else self._last[2].program

    def trace(self, *args: Any, **kwargs: Any) -> stages.Traced:
        """Returns the step traced for these arguments. Does not compile, wait or communicate."""
        return self.bind(*args, **kwargs)[0]

    def bind(self, *args: Any, **kwargs: Any) -> tuple[stages.Traced, list[Any]]:
        """Returns the step traced for these arguments, and them flat. Does not compile, wait or communicate."""
        world = current_world()
        if nnx.holds_objects(args, kwargs):
            return nnx.bind(self, args, kwargs)
        args, kwargs = by_position(self.step, args, kwargs, (*self.static, *self.donate))
        function, args = bind_static(cast("Callable[..., R]", self.step), self.__name__, self.static, args)
        traced = stages.as_stage(self._trace(world, function, args, kwargs))
        return traced, jax.tree.leaves((args, kwargs))

    def _agree(self, variant: Variant, host: Standalone) -> bool:
        """Makes sure that the ranks have agreed on the exchanges. Returns whether they did so in this call."""
        # The branch that the host takes may differ between ranks where the step was given different values: ask each
        # time. But shapes may change on one rank alone: where its exchanges stay what they are, the other ranks go on
        # and would not come to an agreement.
        signature = None if variant.traced.choices else variant.signature
        owner = host.world.exchange_owner
        always = signature is None or owner.must_agree
        if variant is self._agreed and not always:
            return False
        due = always or signature != self._signature or not is_current(variant)
        if due:
            owner.must_agree = True  # should this be interrupted
            try:
                agree_standalone(variant, host)
            except ExchangeError:  # on every rank
                # This rank's next step may be one that other ranks have agreed on before, so all of them agree on it
                # again. Steps that call mpi4jax are left out, as they may concern only some of the ranks.
                owner.must_agree = not variant.is_unit
                raise
            owner.must_agree = False
        self._agreed, self._signature = variant, signature
        return due

    def _trace(
        self, world: World, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Traced:
        mesh = world.rank_grid(self.axes)
        static = [n for n, _, _ in getattr(function, "static", ())]
        flagged = getattr(function, "has_commit_flag", False)  # as its last argument
        count = len(args) + len(static) - flagged
        donated = positions(self.donate, count)
        if bad := [m for m, n in zip(self.donate, donated, strict=True) if not 0 <= n < count or n in static]:
            raise ValueError(
                f"donate_argnums of `{self.__name__}` names argument {bad[0]}, but it was called with"
                f" {count} positional arguments, and static ones cannot be donated."
            )
        donate = [n - sum(s < n for s in static) for n in donated]
        return trace(
            function,
            args,
            kwargs,
            axes=mesh.sizes,
            wire=world.wire(),
            donate_argnums=donate,
            commit_flag_argnums=(len(args) - 1,) if flagged else (),
        )

    def _with_commit_flag(self, function: Callable[..., Any], count: int) -> Callable[..., Any]:
        """Returns the step for a job that skips, called with `count` positional arguments, static ones among them."""
        static = positions(self.static, count)
        state = [n - sum(s < n for s in static) for n in positions(self.donate, count) or (0,) if n not in static]
        return with_commit_flag(function, self.__name__, state, donated=bool(self.donate))

    def _variant(
        self,
        world: World,
        function: Callable[..., R],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: list[Any],
        cache_key: _CacheKey,
    ) -> Variant:
        """Returns the variant that these arguments run, traced if it is new.

        Makes arrays of the leaves where the thread that dispatches would make arrays of another type.
        """
        try:
            arg_types = arg_types_of(leaves)
        except TypeError:
            check_arrays(self.step, args, kwargs)  # says which leaf
            raise
        if x64_is_local():
            leaves[:] = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
        last = self._last
        if last is not None and last[0] == cache_key and last[1] == arg_types:
            return last[2].choose(leaves)
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
        self._last = (cache_key, arg_types, variant)
        return variant.choose(leaves)

    def _notice_change(
        self, last: _Call, cache_key: _CacheKey, arg_types: list[ArgType], args: PyTree, kwargs: PyTree
    ) -> None:
        """Logs the first time why the step is traced again."""
        if self._noticed or self.may_change:
            return
        self._noticed = True
        old_key, old_types, _ = last
        if old_key[0] != cache_key[0]:
            # Often only what is static in an argument is new; then the executables are found by what they compute.
            change = describe_structures(old_key[0], cache_key[0])
            text = "`%s` is traced again, and compiled where its program is new: %s. This notice comes once."
        else:
            change = "a static argument changed" if old_key[1] != cache_key[1] else "JAX's configuration changed"
            change = describe_change(old_types, arg_types, args, kwargs) or change
            text = "`%s` is compiled again: %s. This notice comes once."
        _log.warning(text, self.__name__, change)
