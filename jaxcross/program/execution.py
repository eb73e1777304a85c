"""Holds one step in flight: compiled segments, live values, and the means to run a segment.

This module doesn't depend on MPI and starts no threads. The class `Execution` can dispatch a
segment, wait for it, and replace its inputs by zeros. It leaves all decisions, such as which
segment to run next, to the code that uses it, the *driver*.
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
        call: The executable. For a compute segment, it returns one result more than the segment: a
            scalar that's never donated. So the driver can wait for the end of the segment even if
            all other results have been donated. For a collective segment, it may return additional
            results for `check_finite` and `branch_mismatch`.
        releases: Inputs that the step doesn't return. Each is dropped after its last reader has
            run.
        memory: Returns XLA's memory figures for the executable, or None if there aren't any. The
            first call asks XLA, which takes tens of milliseconds for a segment of ResNet-50.
        device: The device of a collective segment; None for a compute segment.
        is_single_rank: Whether its exchanges involve no other rank, so that it can run like a
            compute segment.
        through: The pinned memory through which each operand is copied to `device`, or None for an
            operand that's copied directly. None altogether if the operands are there already.
        shardings: The shardings in which later segments expect the outputs. None leaves the outputs
            as they are.
        lent: Outputs that may be in the wire's memory.
        lent_nbytes: Bytes of all results that may be there, including those beyond the segment's
            outputs.
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

    For the arguments, see `Compiled`.
    """
    alive = {v: program.values[v].nbytes for v in program.inputs}
    # The wire, which makes the exchanges, keeps its receive buffers between steps, even while
    # nothing refers to them. It needs two sets of buffers, because a step may receive data while
    # something still refers to the results of the previous step. So we count these bytes twice.
    kept = 2 * sum(runnable.lent_nbytes for runnable in runnables)
    peak = boundary = sum(alive.values())
    for runnable in runnables:
        segment = runnable.segment
        stats = runnable.memory()
        outputs = {v: program.values[v].nbytes for v in segment.outputs}
        made = sum(outputs.values()) + segment.extra_nbytes - runnable.lent_nbytes
        # A segment's inputs are still alive while it runs. A result that reuses a donated input
        # needs no additional memory.
        extra = (
            made if stats is None else made - stats.alias_size_in_bytes + stats.temp_size_in_bytes
        )
        peak = max(peak, sum(alive.values()) + extra)
        for v in segment.last_uses:
            if v not in program.inputs or v in program.donated:
                alive.pop(v, None)
        alive.update({v: nbytes for v, nbytes in outputs.items() if v not in runnable.lent})
        boundary = max(boundary, sum(alive.values()))
    # The step copies results that no segment has computed.
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
            it may be moved instead of copied.
        shared: The number of readers of each value that more than one segment reads.
        awaited: For each segment, the collective segments to wait for before it runs: those that it
            depends on or that the commit puts before it, except those for which an earlier compute
            segment has already waited.
        carried: The collective segments that may begin before any computation; see `Order.carried`.
        overlaps: Whether a segment can compute while another one exchanges with other ranks.
        live_bytes: Returns `peak_live_bytes` and `boundary_live_bytes`. Computed only once, because
            every run of a job needs them.
        constants: The arrays that the step closed over, placed where compute segments read them.
        on_host: Copies of the constants that collective segments read, by value.
        out_tree: The tree of the step's results.
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

    def __repr__(self) -> str:
        return f"<Compiled step `{self.program.name}` of {len(self.runnables)} executables>"

    def execution(self, inputs: Sequence[Any]) -> Execution:
        """Starts a step. `inputs` are the flat arguments of the step, without its constants."""
        return Execution(self, inputs)

    def memory_bytes(self) -> dict[str, int]:
        """Returns XLA's memory figures in bytes.

        The result has three entries:

        - `temporaries`: bytes of temporary buffers, the maximum over all segments,
        - `outputs`: bytes of results, the sum over all segments, without results that reuse an
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

        The count includes the step's inputs, the values between segments, and XLA's temporaries. To
        find the maximum, we go through the segments in order and keep track of which values are
        alive. Within each executable, we use XLA's buffer assignment. A donated buffer is counted
        only once, because the output reuses the input's memory.
        """
        return self.live_bytes()[0]

    def boundary_live_bytes(self) -> int:
        """Returns the most bytes alive between two segments, or before or after a step.

        This is how much memory a job keeps while another job's segment runs.
        """
        return self.live_bytes()[1]

    def lasting_inputs(self, inputs: Sequence[Any]) -> list[tuple[jax.Array, int]]:
        """Returns the arrays that a step only reads and later steps get again, with their bytes.

        For example, these are the frozen weights under an adapter. The result contains the step's
        constants, and the arguments that aren't donated. An argument is left out if the step
        returns a result of the same shape and type that doesn't overwrite a donated argument,
        because the caller may pass that result in place of the argument on the next step.

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
        """Returns the most bytes of XLA's temporaries in one collective segment."""
        collectives = (r.memory() for r in self.runnables if r.segment.kind == "collective")
        return max(
            (stats.temp_size_in_bytes for stats in collectives if stats is not None), default=0
        )


@final
class Execution:
    """A step in flight: the values that are alive, and the means to run the next segment.

    The code that uses this class, the driver, may run the segments from different threads and in
    any order, provided that each segment runs after the segments that it depends on.
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
        # If several segments read a value, we can't tell in advance which of them runs last and has
        # to drop the value. So we keep a list with one item per reader. Each reader pops one item,
        # and whoever pops the last one drops the value. Two threads may do so at the same time, and
        # `list.pop` is atomic, whereas decrementing a counter isn't.
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
            # The host has copies of the constants that exchanges read.
            if runnable.device is not None and zeros is None and compiled.on_host:
                args = [
                    compiled.on_host.get(v, x) for v, x in zip(segment.inputs, args, strict=True)
                ]
            if runnable.through is not None:
                args = to_host(args, runnable.device, runnable.through)
            try:
                outs = runnable.call(*args)
            except compat.InternalFloatingPointError as error:
                # This class is internal to JAX, and its error says nothing about the step.
                raise FloatingPointError(_invalid_value(compiled.program, segment, error)) from None
            except jax.errors.JaxRuntimeError as error:
                if "donate" in str(error):
                    text = self._shared_text(segment)
                    if text:
                        raise ValueError(text) from None
                raise
        if runnable.device is None:
            # This scalar is never donated, whereas the other results may be given to the next
            # segment before this one ends.
            self._fences[index] = outs[-1]
        elif self._finite is not None:
            self._finite.keep(index, outs)
        # A segment may return additional results after its own ones, which are only for checks. The
        # last of these count how many ranks took each branch.
        if segment.decisions:
            self._counts[index] = outs[-len(segment.decisions) :]
        outs = outs[: len(segment.outputs)]
        # Copy the results back to the accelerator. The copy is asynchronous, so we don't wait for
        # it here.
        if runnable.device is not None and runnable.shardings is not None:
            outs = from_host(outs, runnable.shardings)
        left = self._left
        for v in runnable.releases:
            # If there's no such list, this segment is the only one that reads the value.
            tokens = left.get(v)
            if tokens is None:
                env.pop(v, None)  # it's missing if the segment that makes it has failed
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
        """Blocks until the values that a segment reads are computed. Raises the device's error."""
        env = self._env
        jax.block_until_ready([env[v] for v in self._compiled.program.segments[index].inputs])

    def wait_outputs(self, index: int) -> None:
        """Blocks until a dispatched segment has ended. Raises the device's error."""
        jax.block_until_ready(self._fences.pop(index))

    def forget(self, index: int) -> None:
        """Drops the arrays that `wait_outputs` would wait for, because nothing will call it."""
        self._fences.pop(index, None)

    def zero_inputs(self, index: int) -> None:
        """Makes a collective segment read zeros, because this rank has failed (the commit rule).

        The zeros aren't written into the step's values, but kept separately. Otherwise, another
        thread that's still writing the results of failed segments might overwrite them.

        Raises:
            ExchangeError: The number of the segment's exchanges may depend on the values that it
                reads.
        """
        program = self._compiled.program
        device = self._compiled.runnables[index].device
        segment = program.segments[index]
        present = () if program.is_unit else program.traced.present
        what = _decided_by_data(segment.jaxpr, program.traced, present)
        if what is not None and not self._compiled.runnables[index].is_single_rank:
            raise ExchangeError(
                f"segment {index} of `{program.name}` exchanges inside a `{what}`, and this rank "
                "has failed before it: it cannot know how often the others will exchange."
            )
        # If a program calls mpi4jax, the segment with these calls also contains the computation
        # between them, maybe in loops that would never end on zeros. So a failed rank makes only
        # the calls, and leaves out the computation.
        if program.is_unit:
            with jax.default_device(device), jax.enable_x64(True):
                self._zero_calls[index] = zero_calls(segment, program.traced)
            return
        # We make the zeros with JAX, because NumPy can't make random keys. The step may use 64-bit
        # types that are enabled only by a context manager in another thread. That has no effect in
        # this thread, so we enable them in any case.
        with jax.default_device(device), jax.enable_x64(True):
            zeros = [
                jax.lax.full(var.aval.shape, 0, var.aval.dtype)
                for var in segment.jaxpr.jaxpr.invars
            ]
        self._zeros[index] = jax.device_put(zeros, device)

    def watch(self, policy: NonFinite) -> Execution:
        """Applies a policy to exchanged values that aren't finite; returns itself.

        Call this before any segment runs.
        """
        if policy != "ignore":
            self._finite = FiniteCheck(self._compiled.program, policy)
        return self

    def check_finite(self, index: int) -> NonFiniteOutcome | None:
        """Returns what follows from a segment's non-finite results; None if there are none.

        If the policy ignores non-finite values, this returns None right away. Otherwise, it waits
        for the segment's results, so the segment must already have been run. Call this at most once
        per segment, and before you run another segment that may overwrite the results.
        """
        return None if self._finite is None else self._finite.outcome(index)

    def branch_mismatch(self, index: int) -> str | None:
        """Describes what ranks decided differently in a collective segment; None if nothing.

        For example, some ranks may have taken another branch of a conditional that contains
        exchanges. All ranks that exchanged in the segment get the same answer. Waits for the
        segment's results, so the segment must already have been run.
        """
        counts = self._counts.pop(index, None)
        if counts is None:
            return None
        decisions = self._compiled.program.segments[index].decisions
        found = (d.mismatch(np.asarray(c).tolist()) for d, c in zip(decisions, counts, strict=True))
        return next((what for what in found if what is not None), None)

    @property
    def skippable(self) -> bool:
        """Whether `skip` has an effect: the program can return the state that it was given."""
        return bool(self._compiled.program.commit_flag_inputs)

    def skip(self) -> None:
        """Makes the step return the state that it was given.

        Call this before running any segment that comes after the commit.
        """
        # The step selects its old state if the flag is false; see `step.commit_flag`.
        for v in self._compiled.program.commit_flag_inputs:
            self._env[v] = np.zeros((), bool)

    def outputs(self) -> PyTree:
        """Returns the step's results as a tree, once every segment has run. Doesn't wait for them.

        As with `jax.jit`, no result shares memory with an argument, unless that argument was
        donated. To ensure this, we copy a result if it would share memory, e.g. because the step
        returns an argument unchanged.
        """
        compiled = self._compiled
        results = [self._env[v] for v in compiled.program.outputs]
        for place, moved in compiled.passthroughs:
            if not (moved and isinstance(results[place], jax.Array)):
                results[place] = jnp.array(results[place])
        return compiled.out_tree.unflatten(results)


def _invalid_value(program: Program, segment: Segment, error: Exception) -> str:
    """Returns the error text for a value found by `jax_debug_nans` or `jax_debug_infs`.

    JAX's own error has no text.
    """
    kind = error.args[-1] if error.args else "nan"
    what = "+".join(dict.fromkeys(x.op for x in segment.exchanges)) or "computation"
    return (
        f"segment {segment.index} of `{program.name}` ({what}) made an invalid value ({kind}) on "
        "this rank. To find the operation, call the undecorated step under `jax.vmap(..., "
        "axis_name=...)` with the same setting."
    )


def _decided_by_data(jaxpr: compat.Jaxpr, traced: Traced, present: Collection[Any]) -> str | None:
    """Returns the primitive, if any, in which data decides how often something is exchanged.

    A loop doesn't count if it ends by itself on a rank that takes no part in the step.
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
