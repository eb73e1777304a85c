"""Gets a variant's executables for the host that runs it.

First the ranks agree on the exchanges, then the step is cut, and finally it's compiled.
"""

from __future__ import annotations

from jaxcross.program import Compiled, Program, stages
from jaxcross.runtime import StepHost
from jaxcross.step.cut_tuner import CutHint, CutSearch, cut_key, gather_hint
from jaxcross.step.exchange_agreement import agree_once
from jaxcross.step.variant import ChosenCut, Variant


def prepare(variant: Variant, host: StepHost) -> Compiled:
    """Returns a variant's executables for a host, compiling them on the first call.

    Before anything is compiled, all ranks have to agree on the step's exchanges. Outside a runner,
    that has already happened by the time this is called. In a job, it happens here, the first time
    the job calls the step with these argument types.

    When several jobs run the same step, each of them makes its own agreement, which also creates
    the job's communicators. A job can't rely on another job's agreement, because which job gets
    here first may differ between ranks, leaving some ranks waiting in one job's agreement and the
    rest in the other's.
    """
    if variant.tunes_cut or (variant.is_unit and host.in_run):
        compiled = variant.of_host.get(host)
        if compiled is None:
            # Only once per host: a job has to keep its cut and its communicators until it ends.
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
    """Compiles a program that calls mpi4jax to use the job's own communicators."""
    program = variant.record.units.agree_in_run(
        host, variant.world, variant.default, variant.cache_key
    )
    with host.compiling(program.name):
        return stages.compile(program, variant.arg_types, cache=variant.world.executables)


def _choose_cut(variant: Variant, host: StepHost) -> Compiled:
    """Chooses the cut that `host` will use from now on, and returns the executables.

    The cut is identical on all ranks. Waits for them, unless they remember an earlier choice.
    """
    record = variant.record
    world = variant.world
    agree_once(variant, host, variant.default)
    # Get the arguments for timing now, before the ranks synchronize in `gather_hint`. Once they
    # have, another job with the same step may join the run. Its thread runs this function too, and
    # may reset `variant.trial_args` before we've read it.
    trial_args = variant.trial_args
    chosen = record.chosen_cuts.get(variant.signature)
    # Outside a run, all ranks have made the same calls and therefore remember the same choice.
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
    is_only_job = host.is_only_job  # identical on all ranks, which have just synchronized
    # A restarted job keeps its cut, i.e. the segments its step was divided into: another cut might
    # round differently, and the results have to be bitwise identical to those of an uninterrupted
    # run. A new job that runs alongside other jobs gets the default cut, because their computation
    # hides its exchanges anyway.
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
    # Later jobs with the same step can reuse the cut we've found here. But job threads may get here
    # in a different order on each rank, so if every job stored its cut, the ranks could end up
    # remembering different cuts. At most one job per run can be both its first and its only job, so
    # we keep that job's cut.
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
    """Returns the number of segments chosen earlier, and the program in that cut.

    Returns None if nothing has been chosen yet, or if the choice was made for different shapes of
    the arguments, where the same number of segments gives different exchanges.
    """
    if chosen is None:
        return None
    program = variant.program_in(chosen.n_segments)
    return (chosen.n_segments, program) if program.exchange_hash() == chosen.signature else None


def _search(
    variant: Variant, host: StepHost, trial_args: tuple[object, ...], hint: CutHint
) -> tuple[int, Compiled]:
    """Times several cuts. Returns the number of segments and the executables of the fastest.

    Only called if no other job is running when the search starts, because that would distort the
    measurement.
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
    # Jobs can share a step, so use the lock to compile each cut only once.
    with host.compiling(program.name), variant.lock:
        compiled = variant.compiled.get(n_segments)
        if compiled is None:
            compiled = stages.compile(program, variant.arg_types, cache=variant.world.executables)
            variant.compiled[n_segments] = compiled
    return compiled
