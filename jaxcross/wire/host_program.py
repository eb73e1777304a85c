"""Runs a collective segment on the exchange lane, as a list of executables and host exchanges.

**Problem.** With mpi4py, an exchange is a Python call. Doing that from within an XLA executable
would mean calling back into Python, which ties up one of XLA's threads for the whole exchange.

**Idea.** We split the segment at its messages instead. Casts, concatenations and small arithmetic
are compiled into executables. In between, the host sends each message with a single mpi4py call on
NumPy views of the arrays. If a loop or conditional contains an exchange, the host runs it, and its
body is again a list of executables and messages, at a cost of a few dispatches per iteration.

**As few executables as possible.** If a message needs values that haven't been computed yet,
they're computed by an executable right in front of it, along with everything else that later
messages need (as long as it doesn't depend on a message itself). Whatever no message needs is left
for a final executable after all messages.

**Small results.** A large result is turned into a JAX array without copying, which takes 15 us
regardless of its size. Passing a NumPy array to an executable takes just 5 us, so small results
stay NumPy arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Sharding

from jaxcross import _jax_compat as compat
from jaxcross.program import Aval, compile_with_arguments, holds, struct_of
from jaxcross.wire import host_calls
from jaxcross.wire.arena import SMALLEST_BYTES
from jaxcross.wire.bytes import call_of
from jaxcross.wire.host_calls import Receive

Values = dict[Any, Any]
"""Maps each variable to its value, an array."""


@dataclass(frozen=True, slots=True)
class HostLowered:
    """A closed jaxpr with `host_calls` messages; implements `jaxcross.program.lowered.Lowered`.

    Attributes:
        jaxpr: The jaxpr.
        receive: Allocates memory for a result.
        abort: Terminates all ranks with the given error message. Called if MPI fails, because the
            other ranks in the exchange would otherwise wait forever.
    """

    jaxpr: Any
    receive: Receive
    abort: Callable[[str], None]

    @property
    def lent(self) -> Sequence[int]:
        """Indices of the results that may live in a receive buffer.

        That is, all large results of messages and all results of loops.
        """
        inner, _ = compat.open_jaxpr(self.jaxpr)
        own, _ = _own_results(inner)
        messages = _vars(var for eqn in inner.eqns if _by_host(eqn) for var in eqn.outvars)
        return [n for n, var in enumerate(own) if var in messages]

    def compile(
        self, _structs: Sequence[Any], /, *, name: str, host: Any, place: Sharding | None
    ) -> HostProgram:
        """Compiles the executables between the messages. Waits for XLA."""
        site = _Site(name, host, place, self.receive, self.abort)
        with site.default():
            return HostProgram(self.jaxpr, site)


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a program runs. See `HostLowered` and `Lowered.compile` for the fields."""

    name: str
    host: Any
    place: Sharding | None
    receive: Receive
    abort: Callable[[str], None]

    def default(self) -> AbstractContextManager[Any]:
        return jax.default_device(self.host)

    def put(self, x: np.ndarray) -> jax.Array:
        """Turns a NumPy array into a JAX array on the host.

        It's committed to the host only if the program's arguments are committed.
        """
        return compat.put_on_host(x, self.host, committed=self.place is not None)

    def compile(
        self,
        function: Callable[..., Sequence[Any]],
        avals: Sequence[Any],
        donate: Sequence[int] = (),
    ) -> Any:
        structs = [struct_of(aval, self.place) for aval in avals]
        return compile_with_arguments(
            function, structs, name=self.name, host=self.host, place=self.place, donate=donate
        )


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory usage of a run, with the same fields as an executable's `memory_analysis`.

    Limited to the fields we use.
    """

    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Stage:
    """An executable, a message, or a loop.

    Attributes:
        inputs: The atoms read by the stage, including literals.
        outputs: The variables it writes.
        run: Computes the results.
        temp_nbytes: Returns how much temporary memory the stage needs while it runs, in bytes.
        kind: Conditionals count as loops. Both messages and loops communicate.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    run: Callable[..., Sequence[Any]]
    temp_nbytes: Callable[[], int]
    kind: Literal["executable", "message", "loop"] = "executable"


@final
class HostProgram:
    """A compiled closed jaxpr whose messages are sent by the host.

    Args:
        jaxpr: A jaxpr with `host_calls` messages, at the top level or in loops and conditionals.
        site: Where the program runs.
        donate: Indices of the arguments that may be overwritten.
    """

    def __init__(self, jaxpr: Any, site: _Site, donate: Sequence[int] = ()) -> None:
        inner, consts = compat.open_jaxpr(jaxpr)
        self._site = site
        self._invars = inner.invars
        placed = jax.device_put(list(consts), None if site.place is None else site.host)
        self._consts: Values = dict(zip(inner.constvars, placed, strict=True))
        self._outvars, copies = _own_results(inner)
        donated = _vars(inner.invars[n] for n in donate)
        self._stages = tuple(_stages(inner, site, _vars(self._outvars), copies, donated))
        self._done = _last_uses(self._stages, _vars(self._outvars))

    def __call__(self, *args: Any) -> list[Any]:
        # Turn off JAX's checks for NaN and infinity: if these raised on this rank between two
        # messages, the other ranks would wait for the second message forever. `_check` makes up for
        # it at the end.
        #
        # Turn on `enable_x64`, because this thread doesn't inherit the settings of the thread
        # calling the step, and JAX would convert 64-bit NumPy arrays to 32 bits.
        #
        # Allow transfers from the host: if the user has disallowed implicit transfers, that's meant
        # for their own code, not ours.
        with (
            self._site.default(),
            jax.enable_x64(True),
            jax.debug_nans(False),
            jax.debug_infs(False),
            jax.transfer_guard_host_to_device("allow"),
        ):
            results = self.run(*args)
        _check(results)
        return results

    def run(self, *args: Any) -> list[Any]:
        """Like `__call__`, but assumes that an outer program has set up these contexts."""
        values: Values = {**self._consts}
        # Arguments can be Python numbers too, so convert these to the type we've compiled for.
        for var, arg in zip(self._invars, args, strict=True):
            values[var] = arg if isinstance(arg, jax.Array) else np.asarray(arg, var.aval.dtype)
        for n, (stage, done) in enumerate(zip(self._stages, self._done, strict=True)):
            try:
                results = stage.run(*[_value(atom, values) for atom in stage.inputs])
            except Exception as error:
                self._give_up(n, error)
                raise
            values.update(zip(stage.outputs, results, strict=True))
            for var in done:
                del values[var]
        return [values[var] for var in self._outvars]

    def _give_up(self, n: int, error: Exception) -> None:
        """Terminates all ranks if stage `n` failed between two messages.

        If this rank fails between two messages, it never sends the second, and the other ranks
        would wait for it forever. If the failure comes before the first message or after the last,
        only the step fails. For a failing loop, we can't tell how many messages it has already
        sent, so we always terminate.

        Since computations are dispatched asynchronously, an error may not surface until a message
        waits for the result. In that case, `n` is the number of that message.
        """
        kinds = [stage.kind for stage in self._stages]
        sends = [kind != "executable" for kind in kinds]
        if kinds[n] == "loop" or (any(sends[:n]) and any(sends[n:])):
            what = f"{type(error).__name__}: {error}"
            self._site.abort(f"`{self._site.name}` failed between two of its exchanges: {what}")

    def memory_analysis(self) -> _Memory:
        """Returns how much memory a run takes, excluding its arguments.

        The program is made up of stages that run one after another. So its temporary memory
        consists of all values passed between stages, plus the temporary memory of the most
        demanding stage.
        """
        between = _vars(var for stage in self._stages for var in stage.outputs) - _vars(
            self._outvars
        )
        own = max((stage.temp_nbytes() for stage in self._stages), default=0)
        return _Memory(_nbytes(between) + own, _nbytes(self._outvars))


def _check(results: Sequence[Any]) -> None:
    """Raises JAX's error for NaN or infinite results if the user has enabled that check.

    Only waits for the results if a check is enabled.
    """
    for name in compat.invalid_values_to_find():
        found = {"nan": np.isnan, "inf": np.isinf}[name]
        if any(
            jnp.issubdtype(x.dtype, jnp.inexact) and found(np.asarray(x)).any() for x in results
        ):
            raise compat.InternalFloatingPointError("exchange", name)


def holds_message(jaxpr: Any) -> bool:
    """Whether a jaxpr contains a message sent by the host, at any depth."""
    return holds(jaxpr, host_calls.is_message)


def _by_host(eqn: Any) -> bool:
    return host_calls.is_message(eqn) or any(map(holds_message, compat.sub_jaxprs(eqn)))


def _stages(
    inner: Any, site: _Site, results: set[Any], copies: Mapping[Any, Any], donated: set[Any]
) -> Iterator[_Stage]:
    """Yields the stages of an open jaxpr.

    Args:
        inner: The jaxpr.
        site: Where the stages run.
        results: The variables returned by the program.
        copies: Maps results that the last executable has to copy to their originals.
        donated: Arguments that may be overwritten.
    """
    groups = _groups(inner.eqns)
    reads = [_vars(atom for eqn in group for atom in eqn.invars) for group in groups]
    reads[-1] |= _vars(copies.values())
    for n, group in enumerate(groups):
        later = results.union(*reads[n + 1 :])
        if group and _by_host(group[0]):
            yield _carried_out(group[0], site)
        elif group or (copies and group is groups[-1]):
            yield _executable(
                inner, group, later, copies if group is groups[-1] else {}, donated - later, site
            )


def _groups(eqns: Sequence[Any]) -> list[list[Any]]:
    """Divides the equations into stages: single messages, loops or conditionals, and executables.

    Messages stay in order. Each executable goes right before the first message that needs one of
    its results. The last list (possibly empty) has the equations that are left after the last
    message.
    """
    needs = _dependences(eqns)
    by_host = [_by_host(eqn) for eqn in eqns]
    # Start by collecting the equations that contribute to a message, directly or indirectly. An
    # equation's dependencies always come before it, so if we go backwards, we already know whether
    # an equation is needed by the time we get to it.
    sent: set[int] = set()
    for i in reversed(range(len(eqns))):
        if by_host[i] or i in sent:
            sent |= needs[i]
    groups: list[list[Any]] = []
    placed: set[int] = set()
    for i, eqn in enumerate(eqns):
        if not by_host[i]:
            continue
        # If the message needs values that haven't been computed yet, put an executable in front of
        # it. That also computes what later messages need, except for anything that depends on a
        # message we haven't sent yet.
        if not needs[i] <= placed:
            ready: list[int] = []
            for j in sorted(sent - placed):
                if not by_host[j] and needs[j] <= placed.union(ready):
                    ready.append(j)
            groups.append([eqns[j] for j in ready])
            placed.update(ready)
        groups.append([eqn])
        placed.add(i)
    return [*groups, [eqn for i, eqn in enumerate(eqns) if i not in placed]]


def _dependences(eqns: Sequence[Any]) -> list[set[int]]:
    """Returns the indices of the equations that have to run before each equation.

    An equation depends on the equations whose results it reads. On top of that, each message
    depends on the previous message, because all ranks must send their messages in the same order.
    Equations with effects, such as callbacks, are kept in order in the same way.
    """
    maker: dict[Any, int] = {}
    found: list[set[int]] = []
    previous: set[int] = set()
    for i, eqn in enumerate(eqns):
        needs = {maker[var] for var in _vars(eqn.invars) if var in maker}
        if eqn.effects or _by_host(eqn):
            needs |= previous
            previous = {i}
        found.append(needs)
        maker.update(dict.fromkeys(eqn.outvars, i))
    return found


def _executable(
    inner: Any,
    eqns: Sequence[Any],
    later: set[Any],
    copies: Mapping[Any, Any],
    donated: set[Any],
    site: _Site,
) -> _Stage:
    """Compiles equations into a stage. `later` contains the values still needed afterwards."""
    made = [var for eqn in eqns for var in eqn.outvars]
    inputs = sorted(
        _vars([*(a for eqn in eqns for a in eqn.invars), *copies.values()]) - {*made},
        key=_order(inner),
    )
    outputs = [var for var in made if var in later]
    jaxpr = compat.make_jaxpr_of(inputs, [*outputs, *copies.values()], eqns, inner)
    # XLA can only reuse a donated input for an output with the same shape and type, so don't donate
    # more inputs than there are such outputs.
    free = Counter((var.aval.shape, var.aval.dtype) for var in outputs)
    overwritten = []
    for n, var in enumerate(inputs):
        kind = var.aval.shape, var.aval.dtype
        if var in donated and free[kind]:
            free[kind] -= 1
            overwritten.append(n)
    call = site.compile(jaxpr_as_fun(jaxpr), [var.aval for var in inputs], overwritten)
    return _Stage(inputs, [*outputs, *copies], call, lambda: _temp_nbytes(call))


def _carried_out(eqn: Any, site: _Site) -> _Stage:
    """Returns the stage for a message, loop or conditional."""
    if host_calls.is_message(eqn):
        return _Stage(eqn.invars, eqn.outvars, _message(eqn, site), lambda: 0, "message")
    run, programs = {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name](eqn, site)

    def owned(*operands: Any) -> list[Any]:
        # With zero iterations, a loop returns the arrays it was given, which may belong to the
        # user. A later segment of the step may overwrite the loop's results in place, so copy
        # these.
        taken = set(map(id, operands))
        return [jnp.array(x) if id(x) in taken else x for x in run(*operands)]

    def temp_nbytes() -> int:
        return max((p.memory_analysis().temp_size_in_bytes for p in programs), default=0)

    return _Stage(eqn.invars, eqn.outvars, owned, temp_nbytes, "loop")


def _message(eqn: Any, site: _Site) -> Callable[[Any], Sequence[Any]]:
    from mpi4py import MPI

    send = host_calls.maker(eqn, site.receive)
    is_small = _is_small(eqn)

    def run(operand: Any) -> Sequence[Any]:
        x = np.asarray(operand, order="C")  # waits until it's been computed; doesn't copy
        try:
            result = send(x)
        except MPI.Exception as error:
            site.abort(f"MPI failed in `{call_of(eqn)}`, at {compat.source_of(eqn)}: {error}")
            raise
        return [result if is_small else site.put(result)]

    return run


def _scan(eqn: Any, site: _Site) -> tuple[Callable[..., Sequence[Any]], Sequence[HostProgram]]:
    """Returns a function that runs a `scan` on the host, and the program for its body.

    The host runs the iterations one by one. Slicing the loop's inputs and stacking its outputs in
    Python on every iteration would be slow, so we leave that to the compiled body: given the
    iteration number and the whole arrays, it takes its own slices and writes its outputs into the
    stacked results in place.
    """
    n_consts, n_carry = compat.scan_counts(eqn)
    length = eqn.params["length"]
    iteration = jaxpr_as_fun(eqn.params["jaxpr"])
    avals = [atom.aval for atom in eqn.invars]
    n_xs = len(avals) - n_consts - n_carry
    stacked = [var.aval for var in eqn.outvars[n_carry:]]

    def body(i: Any, *values: Any) -> list[Any]:
        consts = values[:n_consts]
        xs = values[n_consts:][:n_xs]
        carry = values[n_consts + n_xs :][:n_carry]
        results = iteration(
            *consts, *carry, *(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in xs)
        )
        ys = values[n_consts + n_xs + n_carry :]
        added = (
            lax.dynamic_update_index_in_dim(y, new, i, 0)
            for y, new in zip(ys, results[n_carry:], strict=True)
        )
        return [*results[:n_carry], *added]

    types = [*avals[:n_consts], *avals[n_consts + n_carry :], *avals[n_consts:][:n_carry], *stacked]
    empty = site.compile(lambda: [lax.full(aval.shape, 0, aval.dtype) for aval in stacked], [])
    if length == 0:  # can't trace `body`, because the stacked operands have no slices
        return lambda *operands: [*operands[n_consts:][:n_carry], *empty()], []
    traced = jax.make_jaxpr(body)(jax.ShapeDtypeStruct((), np.int32), *map(struct_of, types))
    program = HostProgram(traced, site, donate=range(1 + len(avals), 1 + len(types)))

    def run(*operands: Any) -> Sequence[Any]:
        fixed = (*operands[:n_consts], *operands[n_consts + n_carry :])
        results = [*operands[n_consts:][:n_carry], *empty()]
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            results = program.run(np.int32(i), *fixed, *results)
        return results

    return run, [program]


def _while(eqn: Any, site: _Site) -> tuple[Callable[..., Sequence[Any]], Sequence[HostProgram]]:
    """Returns a function that runs a `while` on the host, and the programs for condition and body.

    The host evaluates the condition before each iteration. Under `vmap`, the elements of the batch
    may need different numbers of iterations. In that case, the host keeps going until the condition
    is false for all of them; elements that finish early keep their values for the remaining
    iterations.
    """
    n_condition = eqn.params["cond_nconsts"]
    n_body = eqn.params["body_nconsts"]
    condition = HostProgram(eqn.params["cond_jaxpr"], site)
    iteration = eqn.params["body_jaxpr"]
    (predicate,) = eqn.params["cond_jaxpr"].out_avals
    is_batched = predicate.ndim > 0

    def selected(active: Any, *operands: Any) -> list[Any]:
        results = jaxpr_as_fun(iteration)(*operands)
        return [
            lax.select(lax.broadcast_in_dim(active, new.shape, range(active.ndim)), new, old)
            for new, old in zip(results, operands[n_body:], strict=True)
        ]

    if is_batched:
        body = HostProgram(
            jax.make_jaxpr(selected)(*map(struct_of, [predicate, *iteration.in_avals])), site
        )
    else:
        body = HostProgram(iteration, site)

    def run(*operands: Any) -> Sequence[Any]:
        consts = operands[n_condition:][:n_body]
        carry: Sequence[Any] = operands[n_condition + n_body :]
        while np.asarray(active := condition.run(*operands[:n_condition], *carry)[0]).any():
            carry = body.run(*([active] if is_batched else []), *consts, *carry)
        return carry

    return run, [condition, body]


def _cond(eqn: Any, site: _Site) -> tuple[Callable[..., Sequence[Any]], Sequence[HostProgram]]:
    """Returns a function that reads a `cond`'s index on the host and runs the branch's program."""
    branches = [HostProgram(branch, site) for branch in eqn.params["branches"]]

    def run(index: Any, *operands: Any) -> Sequence[Any]:
        n = int(np.asarray(index))
        # Like XLA, run the last branch if the index is out of range.
        return branches[n if 0 <= n < len(branches) else -1].run(*operands)

    return run, branches


def _own_results(inner: Any) -> tuple[list[Any], dict[Any, Any]]:
    """Returns a variable for each result, and a mapping from copies we have to make to originals.

    A later segment of the step may overwrite a result in place, so each result needs its own
    memory. We copy any result that's the same array as an argument or another result, as well as
    small results of messages, which are still NumPy arrays.
    """
    small = (
        var
        for eqn in inner.eqns
        if host_calls.is_message(eqn) and _is_small(eqn)
        for var in eqn.outvars
    )
    taken = _vars([*inner.invars, *inner.constvars, *small])
    copies: dict[Any, Any] = {}
    own = []
    for atom in inner.outvars:
        var = atom
        if isinstance(atom, compat.Literal) or atom in taken:
            var = compat.new_var(atom.aval)
            copies[var] = atom
        taken.add(var)
        own.append(var)
    return own, copies


def _is_small(message: Any) -> bool:
    return _nbytes(message.outvars) < SMALLEST_BYTES


def _last_uses(stages: Sequence[_Stage], results: set[Any]) -> list[set[Any]]:
    needed = set(results)
    done = []
    for stage in reversed(stages):
        used = _vars([*stage.inputs, *stage.outputs])
        done.append(used - needed)
        needed |= used
    return done[::-1]


def _vars(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, compat.Literal)}


def _value(atom: Any, values: Values) -> Any:
    if isinstance(atom, compat.Literal):
        return np.asarray(atom.val, compat.array_type(atom).dtype)
    return values[atom]


def _order(inner: Any) -> Callable[[Any], int]:
    """Returns a sort key: a variable's position in a jaxpr.

    We sort the arguments of executables by position, which is identical across ranks.
    """
    every = [*inner.constvars, *inner.invars, *(var for eqn in inner.eqns for var in eqn.outvars)]
    return {var: n for n, var in enumerate(every)}.__getitem__


def _nbytes(variables: Iterable[Any]) -> int:
    return sum(Aval(shape=var.aval.shape, dtype=str(var.aval.dtype)).nbytes for var in variables)


def _temp_nbytes(call: Any) -> int:
    stats = call.memory_analysis()
    return 0 if stats is None else stats.temp_size_in_bytes
