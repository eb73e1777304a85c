"""Makes a variant's executables for the host that runs it: agreed by all ranks, cut, compiled."""

from __future__ import annotations

from jaxcross.program import Compiled, Program, stages
from jaxcross.runtime import StepHost
from jaxcross.step.cut_tuner import CutHint, CutSearch, cut_key, gather_hint
from jaxcross.step.exchange_agreement import agree_once
from jaxcross.step.variant import ChosenCut, Variant


def prepare(variant: Variant, host: StepHost) -> Compiled:
    """Returns the executables for a host. A job's ranks agree on the exchanges at its first use.

    The ranks always agree before anything is compiled: for a standalone step before this call, for
    a job in it. Each job makes an agreement of its own, and its communicators are created then. It
    can't rely on another job with the same step, because which of two equal jobs compiles first may
    differ between ranks.
    """
    if variant.tunes_cut or (variant.is_unit and host.in_run):
        compiled = variant.of_host.get(host)
        if compiled is None:
            # Once per host, because a job keeps its cut and its communicators until it ends.
            compiled = (
                _choose_cut(variant, host)
                if variant.tunes_cut
                else _with_own_communicators(variant, host)
            )
            variant.of_host[host] = compiled
    else:
        agree_once(variant, host, variant.default)
        compiled = variant.compiled.get(0) or _compile(variant, host, 0, variant.default)
    variant.program = compiled.program
    return compiled


def _with_own_communicators(variant: Variant, host: StepHost) -> Compiled:
    """Compiles a program that calls mpi4jax, over the job's own communicators."""
    program = variant.record.units.agree_in_run(
        host, variant.world, variant.default, variant.cache_key
    )
    with host.compiling(program.name):
        return stages.compile(program, variant.arg_types, cache=variant.world.executables)


def _choose_cut(variant: Variant, host: StepHost) -> Compiled:
    """Returns the executables that `host` runs until it ends, in the same cut on every rank.

    Waits for all ranks, unless they remember the cut.
    """
    record, world = variant.record, variant.world
    agree_once(variant, host, variant.default)
    # Read before the ranks synchronize again. A job that joins there may be in this function, and
    # drop the arguments, before this thread continues.
    trial_args = variant.trial_args
    chosen = record.chosen_cuts.get(variant.signature)
    # Outside a run, every rank has made the same calls, so all ranks remember the same.
    if not host.in_run:
        known = _known_program(variant, chosen)
        if known is None and trial_args is None:
            known = 0, variant.default
        if known is not None:
            variant.trial_args = None
            return _compile(variant, host, *known)
        chosen = None
    key = cut_key(variant.default, world)
    hint = gather_hint(
        key,
        rank=world.rank,
        run_on_all_ranks=host.run_on_all_ranks,
        resumed=host.cut_before_restart(key),
        in_process=None if chosen is None else chosen.n_segments,
        steps=host.steps_left,
    )
    is_only_job = host.is_only_job  # as of that moment, so it's the same on all ranks
    # The cut from before a restart takes precedence, because it keeps the results bitwise
    # identical. Alongside other jobs, exchanges are hidden anyway, so the default cut will do.
    n_segments = hint.resumed
    if n_segments is None:
        n_segments = hint.in_process if is_only_job else 0
    if n_segments is None and hint.is_first:
        n_segments, compiled = _search(variant, host, trial_args or (), hint)
    else:
        n_segments = n_segments or 0
        program = variant.program_in(n_segments)
        agree_once(variant, host, program)
        compiled = _compile(variant, host, n_segments, program)
    # At most one job of a run is both the only one and the first one. So what is remembered here is
    # the same on all ranks, even if jobs come in different orders on them.
    if is_only_job and hint.is_first:
        record.chosen_cuts[variant.signature] = ChosenCut(
            n_segments, compiled.program.exchange_hash()
        )
    else:
        record.chosen_cuts.setdefault(variant.signature, ChosenCut(0, variant.signature))
    host.remember_cut(key, n_segments)
    variant.trial_args = None
    return compiled


def _known_program(variant: Variant, chosen: ChosenCut | None) -> tuple[int, Program] | None:
    """Returns the cut that was chosen before, unless the exchanges in that cut have changed.

    It may have been chosen for other shapes.
    """
    if chosen is None:
        return None
    program = variant.program_in(chosen.n_segments)
    return (chosen.n_segments, program) if program.exchange_hash() == chosen.signature else None


def _search(
    variant: Variant, host: StepHost, trial_args: tuple[object, ...], hint: CutHint
) -> tuple[int, Compiled]:
    """Measures which cut is the fastest.

    When the search begins, nothing else runs alongside this step.
    """

    def build(program: Program) -> Compiled:
        agree_once(variant, host, program, candidate=True)
        with host.compiling(program.name):
            return stages.compile(program, variant.arg_types, cache=variant.world.executables)

    n_segments, compiled = CutSearch(
        variant.traced,
        trial_args,
        world=variant.world,
        cut=variant.program_in,
        build=build,
        run_on_all_ranks=host.run_on_all_ranks,
        hint=hint,
    ).run()
    return n_segments, variant.compiled.setdefault(n_segments, compiled)


def _compile(variant: Variant, host: StepHost, n_segments: int, program: Program) -> Compiled:
    # The lock makes jobs that share the step compile each cut only once.
    with host.compiling(program.name), variant.lock:
        compiled = variant.compiled.get(n_segments)
        if compiled is None:
            compiled = stages.compile(program, variant.arg_types, cache=variant.world.executables)
            variant.compiled[n_segments] = compiled
    return compiled
