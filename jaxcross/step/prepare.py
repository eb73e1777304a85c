"""Gets a variant's executables for the host that runs it.

The ranks agree on the exchanges, the step is cut, and then compiled, in this order.
"""

from __future__ import annotations

from jaxcross.program import Compiled, Program, stages
from jaxcross.runtime import StepHost
from jaxcross.step.cut_tuner import CutHint, CutSearch, cut_key, gather_hint
from jaxcross.step.exchange_agreement import agree_once
from jaxcross.step.variant import ChosenCut, Variant


def prepare(variant: Variant, host: StepHost) -> Compiled:
    """Returns a variant's executables for a host, compiled at the first call.

    All ranks must agree on the step's exchanges before anything is compiled. Outside a runner,
    they've done so before this function is called. In a job, they do it here, when the job calls
    the step with these argument types for the first time.

    If several jobs run the same step, each of them makes an agreement of its own, which also
    creates the job's communicators. A job can't rely on another job's agreement. Which of the two
    jobs gets here first may differ between ranks, so some ranks would wait in the agreement of one
    job, and other ranks in that of the other.
    """
    if variant.tunes_cut or (variant.is_unit and host.in_run):
        compiled = variant.of_host.get(host)
        if compiled is None:
            # We do this only once per host, because a job must keep its cut and its communicators
            # until it ends.
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
    """Compiles a program that calls mpi4jax so that it uses the job's own communicators."""
    program = variant.record.units.agree_in_run(
        host, variant.world, variant.default, variant.cache_key
    )
    with host.compiling(program.name):
        return stages.compile(program, variant.arg_types, cache=variant.world.executables)


def _choose_cut(variant: Variant, host: StepHost) -> Compiled:
    """Chooses the cut that `host` uses until it ends, and returns the executables for it.

    The cut is the same on every rank. Waits for all ranks, unless they remember an earlier choice.
    """
    record = variant.record
    world = variant.world
    agree_once(variant, host, variant.default)
    # Get the arguments on which cuts are timed now, before the ranks synchronize in `gather_hint`.
    # As soon as they have, another job with the same step may join the run. Its thread executes
    # this function as well, and may reset `variant.trial_args` before our thread has read it.
    trial_args = variant.trial_args
    chosen = record.chosen_cuts.get(variant.signature)
    # Outside a run, all ranks have made the same calls, so they remember the same choice.
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
    is_only_job = host.is_only_job  # read right after all ranks synchronized, so they're all equal
    # A job that was restarted keeps its cut, i.e. the segments into which its step was divided. A
    # different cut may round differently, whereas a restarted job's results are supposed to be
    # bitwise identical. A new job gets the default cut if it runs alongside other jobs, because
    # their computation hides its exchanges anyway.
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
    # Later jobs with the same step may reuse a cut that was found here. If several jobs could set
    # it, the ranks might remember the cuts of different jobs, because their job threads may get
    # here in different orders. Only one job of a run can be both its only job and its first one, so
    # we take that job's cut.
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
    """Returns the number of segments that was chosen before, and the program in that cut.

    Returns None if no cut was chosen before. Also returns None if the cut was chosen for other
    shapes of the arguments, for which the same number of segments gives different exchanges.
    """
    if chosen is None:
        return None
    program = variant.program_in(chosen.n_segments)
    return (chosen.n_segments, program) if program.exchange_hash() == chosen.signature else None


def _search(
    variant: Variant, host: StepHost, trial_args: tuple[object, ...], hint: CutHint
) -> tuple[int, Compiled]:
    """Times several cuts, and returns the fastest one's number of segments and executables.

    Called only when no other job is running as the search begins, because another job would distort
    the measurement.
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
    # Jobs may share the step. The lock makes sure that each cut is compiled only once.
    with host.compiling(program.name), variant.lock:
        compiled = variant.compiled.get(n_segments)
        if compiled is None:
            compiled = stages.compile(program, variant.arg_types, cache=variant.world.executables)
            variant.compiled[n_segments] = compiled
    return compiled
