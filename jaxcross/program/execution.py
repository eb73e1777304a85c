"""Keeps track of a step in flight: its compiled segments, its live values, and what has run.

This module doesn't depend on MPI and doesn't start any threads. An `Execution` can dispatch a
segment, wait for it, and replace its inputs with zeros, but leaves all decisions, such as which
segment to run next, to its caller, the *driver*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross._pytree import PyTree
from jaxcross.errors import ExchangeError
from jaxcross.program.hand_over import from_host, to_host
from jaxcross.program.ir import Program, Segment
from jaxcross.program.jaxpr_utils import ends_on_zeros, holds_exchange
from jaxcross.program.mpi4jax_unit import zero_calls
from jaxcross.program.nonfinite import FiniteCheck, NonFinite, NonFiniteOutcome
from jaxcross.program.step_checks import find_shared
from jaxcross.program.trace import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """A compiled segment.

    Attributes:
        segment: The segment that was compiled.
        call: The executable. For a compute segment, it returns an extra scalar that's never
            donated, so that the driver can wait for the segment to finish even if all other results
            have been donated. For a collective segment, there may be extra results for
            `check_finite` and `branch_mismatch`.
        releases: Inputs that the step doesn't return, which are dropped once their last reader has
            run.
        memory: Returns XLA's memory figures for the executable, or None if there aren't any. The
            first call asks XLA, which takes tens of milliseconds for a segment of ResNet-50.
        device: The device of a collective segment; None for a compute segment.
        is_single_rank: Whether its exchanges involve no other rank, so that it can run like a
            compute segment.
        through: The pinned memory through which each operand is copied to `device`, or None if it's
            copied directly. None altogether if the operands are already there.
        shardings: The shardings that later segments expect the outputs in, or None to leave the
            outputs as they are.
        lent: Outputs that may be in the wire's memory.
        lent_nbytes: Bytes of all results that may be in the wire's memory, including results beyond
            the segment's outputs.
    """

    segment: Segment
    call: Any
    releases: tuple[int, ...]
    memory: Callable[[], Any]
    device: Any = None
    is_single_rank: bool = False
    through: tuple[Any, ...] | None = None
    shardings: tuple[Any, ...] | None = None
    lent: tuple[int, ...] = ()
    lent_nbytes: int = 0


def live_bytes(
    program: Program, runnables: Sequence[Runnable], passthroughs: Sequence[tuple[int, bool]]
) -> tuple[int, int]:
    """Returns the most bytes alive at once during a step, and between its segments.

    See `Compiled` for the arguments.
    """
    alive = {v: program.values[v].nbytes for v in program.inputs}
    # The wire, which performs the exchanges, holds on to its receive buffers between steps, even if
    # nothing refers to them. It needs two sets of buffers, because a step may be receiving data
    # while the results of the previous step are still in use. So we count these bytes twice.
    kept = 2 * sum(runnable.lent_nbytes for runnable in runnables)
    peak = boundary = sum(alive.values())
    for runnable in runnables:
        segment = runnable.segment
        stats = runnable.memory()
        outputs = {v: program.values[v].nbytes for v in segment.outputs}
        made = sum(outputs.values()) + segment.extra_nbytes - runnable.lent_nbytes
        # A segment's inputs stay alive while it runs. Results that reuse a donated input don't need
        # any additional memory.
        extra = (
            made if stats is None else made - stats.alias_size_in_bytes + stats.temp_size_in_bytes
        )
        peak = max(peak, sum(alive.values()) + extra)
        for v in segment.last_uses:
            if v not in program.inputs or v in program.donated:
                alive.pop(v, None)
        alive.update({v: nbytes for v, nbytes in outputs.items() if v not in runnable.lent})
        boundary = max(boundary, sum(alive.values()))
    # Results that aren't computed by any segment are copied.
    copies = (
        program.values[program.outputs[place]].nbytes for place, moved in passthroughs if not moved
    )
    after = sum(alive.values()) + sum(copies)
    return kept + max(peak, after), kept + max(boundary, after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A program with compiled segments. Immutable, and shared by all steps of all equal jobs.

    Attributes:
        program: The program.
        runnables: Its compiled segments.
        passthroughs: Positions of the results that aren't a segment's own output, each with whether
            it may be moved rather than copied.
        shared: The number of readers of each value that's read by more than one segment.
        awaited: For each segment, the collective segments to wait for before it runs. These are the
            segments that it depends on or that the commit puts before it, minus any that an earlier
            compute segment has already waited for.
        carried: The collective segments that may start before any computation; see `Order.carried`.
        overlaps: Whether any segment can compute while another exchanges with other ranks.
        live_bytes: Returns `peak_live_bytes` and `boundary_live_bytes`. Computed only once, because
            every run of a job needs them.
        constants: The arrays that the step closed over, placed where compute segments read them.
        on_host: Copies of the constants that collective segments read, by value.
        out_tree: The tree of the step's results.
        static_results: The results that no segment computes because they're static, each with its
            position among the leaves of `out_tree`, in ascending order.
    """

    program: Program
    runnables: tuple[Runnable, ...]
    passthroughs: tuple[tuple[int, bool], ...]
    shared: Mapping[int, int]
    awaited: tuple[tuple[int, ...], ...]
    carried: frozenset[int]
    overlaps: bool
    live_bytes: Callable[[], tuple[int, int]]
    constants: tuple[Any, ...]
    on_host: Mapping[int, Any]
    out_tree: Any
    static_results: Sequence[tuple[int, Any]] = ()

    def __repr__(self) -> str:
        return f"<Compiled step `{self.program.name}` of {len(self.runnables)} executables>"

    def execution(self, inputs: Sequence[Any]) -> Execution:
        """Starts a step. `inputs` are the flat arguments of the step, without its constants."""
        return Execution(self, inputs)

    def memory_bytes(self) -> dict[str, int]:
        """Returns XLA's memory figures in bytes.

        The result has three entries:

        - `temporaries`: bytes of temporary buffers, as the maximum over all segments,
        - `outputs`: bytes of results, summed over all segments, not counting results that reuse an
          input's memory,
        - `arguments`: bytes of the step's inputs.
        """
        stats = [a for r in self.runnables if (a := r.memory()) is not None]
        return {
            "temporaries": max((s.temp_size_in_bytes for s in stats), default=0),
            "outputs": sum(s.output_size_in_bytes - s.alias_size_in_bytes for s in stats),
            "arguments": sum(self.program.values[v].nbytes for v in self.program.inputs),
        }

    def peak_live_bytes(self) -> int:
        """Returns the most bytes alive at once in one step.

        This includes the step's inputs, the values passed between segments, and XLA's temporaries.
        To find the maximum, we go through the segments in order, keeping track of which values are
        alive, and rely on XLA's buffer assignment within each executable. Donated buffers are only
        counted once, because the output reuses the input's memory.
        """
        return self.live_bytes()[0]

    def boundary_live_bytes(self) -> int:
        """Returns the most bytes alive between two segments, or before or after a step.

        This is how much memory a job holds on to while another job's segment runs.
        """
        return self.live_bytes()[1]

    def lasting_inputs(self, inputs: Sequence[Any]) -> list[tuple[jax.Array, int]]:
        """Returns the arrays that a step only reads and later steps get again, with their bytes.

        A typical example is the frozen weights underneath an adapter. The result includes the
        step's constants and all arguments that aren't donated. An argument is left out if the step
        returns a result of the same shape and type that doesn't overwrite a donated argument, since
        the caller may pass that result in its place on the next step.

        Args:
            inputs: As for `execution`.
        """
        program = self.program
        values = self.program.values
        form = {v: (values[v].shape, values[v].dtype) for v in (*program.inputs, *program.outputs)}
        results = Counter(form[v] for v in program.outputs)
        replaced = results - Counter(form[v] for v in program.donated)
        arguments = program.inputs[program.constants :]
        read = [v for v in arguments if v not in program.donated and form[v] not in replaced]
        given = dict(zip(program.inputs, (*self.constants, *inputs), strict=True))
        lasting = (*program.inputs[: program.constants], *read)
        return [(given[v], values[v].nbytes) for v in lasting if isinstance(given[v], jax.Array)]

    def exchange_temporary_bytes(self) -> int:
        """Returns the most bytes that XLA's temporaries take up in any collective segment."""
        collectives = (r.memory() for r in self.runnables if r.segment.kind == "collective")
        return max(
            (stats.temp_size_in_bytes for stats in collectives if stats is not None), default=0
        )


@final
class Execution:
    """A step in flight: its live values, and the means to run its segments.

    The driver, which uses this class, is free to run segments from different threads and in any
    order, as long as each segment runs after the segments it depends on.
    """

    __slots__ = (
        "_compiled",
        "_counts",
        "_env",
        "_fences",
        "_finite",
        "_left",
        "_zero_calls",
        "_zeros",
    )

    def __init__(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        self._compiled = compiled
        self._env: dict[int, Any] = dict(
            zip(compiled.program.inputs, (*compiled.constants, *inputs), strict=True)
        )
        self._fences: dict[int, Any] = {}  # segment -> arrays that are ready once it has ended
        # When several segments read a value, there's no telling in advance which of them will run
        # last and have to drop the value. So we keep a list with one item per reader. Each reader
        # pops an item, and whoever pops the last item drops the value. Two threads may race to do
        # this; `list.pop` is atomic, whereas decrementing a counter isn't.
        self._left = {v: [None] * n for v, n in compiled.shared.items()}
        self._finite: FiniteCheck | None = None
        self._counts: dict[int, Any] = {}  # how many ranks took each branch, for `branch_mismatch`
        self._zeros: dict[int, list[Any]] = {}  # operands of a failed rank's collective segment
        self._zero_calls: dict[int, Any] = {}  # replaces a failed rank's unit of mpi4jax calls

    def run(self, index: int) -> None:
        """Dispatches a segment from this thread. Only a collective segment may block."""
        compiled = self._compiled
        env = self._env
        runnable = compiled.runnables[index]
        segment = runnable.segment
        zeros = self._zeros.pop(index, None)
        calls_on_zeros = self._zero_calls.pop(index, None)
        if calls_on_zeros is not None:
            outs = calls_on_zeros()
        else:
            args = [env[v] for v in segment.inputs] if zeros is None else zeros
            # The host has its own copies of the constants that exchanges read.
            if runnable.device is not None and zeros is None and compiled.on_host:
                args = [
                    compiled.on_host.get(v, x) for v, x in zip(segment.inputs, args, strict=True)
                ]
            if runnable.through is not None:
                args = to_host(args, runnable.device, runnable.through)
            try:
                outs = runnable.call(*args)
            except compat.InternalFloatingPointError as error:
                # The class is private to JAX, and its error says nothing about the step.
                raise FloatingPointError(_invalid_value(compiled.program, segment, error)) from None
            except jax.errors.JaxRuntimeError as error:
                if "donate" in str(error):
                    text = self._shared_text(segment)
                    if text:
                        raise ValueError(text) from None
                raise
        if runnable.device is None:
            # This scalar is never donated, whereas the other results may already have been donated
            # to the next segment by the time this segment finishes.
            self._fences[index] = outs[-1]
        elif self._finite is not None:
            self._finite.keep(index, outs)
        # A segment's own results may be followed by extra results for checks. The last of these
        # count how many ranks took each branch.
        if segment.decisions:
            self._counts[index] = outs[-len(segment.decisions) :]
        outs = outs[: len(segment.outputs)]
        # Copy the results back to the accelerator. This is asynchronous, so it doesn't block.
        if runnable.device is not None and runnable.shardings is not None:
            outs = from_host(outs, runnable.shardings)
        left = self._left
        for v in runnable.releases:
            # If there's no such list, this segment is the only reader of the value.
            tokens = left.get(v)
            if tokens is None:
                env.pop(v, None)  # missing if the segment that computes it failed
            elif tokens:
                tokens.pop()
                if not tokens:
                    env.pop(v, None)
        env.update(zip(segment.outputs, outs, strict=True))
        if runnable.device is not None:
            self._fences[index] = outs

    def _shared_text(self, segment: Segment) -> str | None:
        program = self._compiled.program
        given = dict(zip(program.inputs[program.constants :], program.traced.paths[0], strict=True))
        shared = find_shared({given[v]: self._env[v] for v in segment.inputs if v in given})
        return shared and (
            f"`{shared[0]}` and `{shared[1]}` of `{program.name}` share one buffer, which the step "
            "would overwrite twice, because both are donated. Copy one of them before the call, "
            "with `jnp.copy`."
        )

    def wait_inputs(self, index: int) -> None:
        """Blocks until a segment's inputs have been computed. Raises any error from the device."""
        env = self._env
        jax.block_until_ready([env[v] for v in self._compiled.program.segments[index].inputs])

    def wait_outputs(self, index: int) -> None:
        """Blocks until a dispatched segment has finished. Raises any error from the device."""
        jax.block_until_ready(self._fences.pop(index))

    def forget(self, index: int) -> None:
        """Drops the arrays that `wait_outputs` would wait for, if nobody is going to call it."""
        self._fences.pop(index, None)

    def zero_inputs(self, index: int) -> None:
        """Makes a collective segment read zeros because this rank has failed (the commit rule).

        We keep the zeros separate from the step's values. Otherwise, another thread that's still
        writing the results of failed segments might overwrite them.

        Raises:
            ExchangeError: How often the segment exchanges may depend on the values that it reads.
        """
        program = self._compiled.program
        device = self._compiled.runnables[index].device
        segment = program.segments[index]
        present = () if program.is_unit else program.traced.present
        what = _decided_by_data(segment.jaxpr, program.traced, present)
        if what is not None and not self._compiled.runnables[index].is_single_rank:
            raise ExchangeError(
                f"segment {index} of `{program.name}` exchanges inside a `{what}`, and this rank "
                "has failed before it, so it cannot know how often the others will exchange. Look "
                "for the rank's earlier error."
            )
        # The unit of mpi4jax calls also contains the computation between them, possibly in loops
        # that would never end on zeros. So a failed rank makes the calls but skips the computation.
        if program.is_unit:
            with jax.default_device(device), jax.enable_x64(True):
                self._zero_calls[index] = zero_calls(segment, program.traced)
            return
        # Create the zeros with JAX, because NumPy can't create random keys. If the step uses 64-bit
        # types, these may only be enabled by a context manager in another thread, which has no
        # effect here. So we always enable them.
        with jax.default_device(device), jax.enable_x64(True):
            zeros = [
                jax.lax.full(var.aval.shape, 0, var.aval.dtype)
                for var in segment.jaxpr.jaxpr.invars
            ]
        self._zeros[index] = jax.device_put(zeros, device)

    def watch(self, policy: NonFinite) -> Execution:
        """Sets the policy for exchanged values that aren't finite, and returns itself.

        Call this before any segment runs.
        """
        if policy != "ignore":
            self._finite = FiniteCheck(self._compiled.program, policy)
        return self

    def check_finite(self, index: int) -> NonFiniteOutcome | None:
        """Returns what happens due to a segment's non-finite results; None if there aren't any.

        This returns None right away if the policy is to ignore non-finite values. Otherwise, it
        waits for the segment's results, so the segment must have been run. Call it at most once per
        segment, before running any other segment that might overwrite the results.
        """
        return None if self._finite is None else self._finite.outcome(index)

    def branch_mismatch(self, index: int) -> str | None:
        """Describes what the ranks disagreed about in a collective segment; None if nothing.

        For example, they may have taken different branches of a conditional that contains
        exchanges. All ranks that exchanged in the segment get the same answer. Waits for the
        segment's results, so the segment must have been run.
        """
        counts = self._counts.pop(index, None)
        if counts is None:
            return None
        decisions = self._compiled.program.segments[index].decisions
        found = (d.mismatch(np.asarray(c).tolist()) for d, c in zip(decisions, counts, strict=True))
        return next((what for what in found if what is not None), None)

    @property
    def skippable(self) -> bool:
        """Whether `skip` has any effect, because the program can return the state it was given."""
        return bool(self._compiled.program.commit_flag_inputs)

    def skip(self) -> None:
        """Makes the step return the state that it was given.

        Call this before running any segment after the commit.
        """
        # The step keeps its old state if the flag is false; see `step.commit_flag`.
        for v in self._compiled.program.commit_flag_inputs:
            self._env[v] = np.zeros((), bool)

    def outputs(self) -> PyTree:
        """Returns the step's results as a tree, once every segment has run. Doesn't wait for them.

        As with `jax.jit`, results never share memory with an argument unless that argument was
        donated. To ensure this, we make a copy where necessary, e.g. if the step returns an
        argument unchanged.
        """
        compiled = self._compiled
        results = [self._env[v] for v in compiled.program.outputs]
        for place, moved in compiled.passthroughs:
            if not (moved and isinstance(results[place], jax.Array)):
                results[place] = jnp.array(results[place])
        for place, value in compiled.static_results:
            results.insert(place, value)
        return compiled.out_tree.unflatten(results)


def _invalid_value(program: Program, segment: Segment, error: Exception) -> str:
    """Returns the error text for a value found by `jax_debug_nans` or `jax_debug_infs`.

    JAX's own error has no text.
    """
    kind = error.args[-1] if error.args else "nan"
    what = "+".join(dict.fromkeys(x.op for x in segment.exchanges)) or "computation"
    return (
        f"segment {segment.index} of `{program.name}` ({what}) computed an invalid value ({kind}) "
        "on this rank. To find the operation, call the undecorated step under `jax.vmap(..., "
        "axis_name=...)` with the same setting."
    )


def _decided_by_data(jaxpr: compat.Jaxpr, traced: Traced, present: Collection[Any]) -> str | None:
    """Returns the primitive, if any, in which data decides how often something is exchanged.

    Loops don't count if they end by themselves on a rank that sits out the step.
    """

    def conditional(eqn: compat.Equation) -> str | None:
        inside = [j for j in compat.sub_jaxprs(eqn) if holds_exchange(j, traced.axes, traced.wire)]
        if not inside or eqn.primitive.name == "while":
            return None
        if eqn.primitive.name != "scan" and eqn.primitive.name not in INLINED:
            return eqn.primitive.name
        found = (conditional(e) for j in inside for e in compat.open_jaxpr(j)[0].eqns)
        return next((name for name in found if name is not None), None)

    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if any(holds_exchange(j, traced.axes, traced.wire) for j in compat.sub_jaxprs(eqn)):
            name = conditional(eqn)
            if name is not None:
                return name
            if not ends_on_zeros(eqn, present):
                return "while"
    return None
