"""The `sweep` function: checks, runs and resumes a whole sweep.

A sweep normally consists of a single run with one job per trial. When a trial ends, rank 0 submits
the next trial to the same run. If a run's last trials fail, however, the run may be over before the
next trials have joined it, in which case they get another run. After a restart, the first run
begins with all unfinished trials.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Unpack

from jaxcross._endings import JobStatus
from jaxcross._files import with_time
from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import ExchangeError, InternalError, JobError
from jaxcross.jobs import (
    MAX_ERRORS_SHOWN,
    Runner,
    SharedOptions,
    arguments,
    check_options,
    check_values,
)
from jaxcross.report import Report, SweepResult, SweepTrial
from jaxcross.sweeps import sweep_settings as checks
from jaxcross.sweeps.coordinator import Coordinator
from jaxcross.sweeps.log import TrialLog, TrialRecord
from jaxcross.sweeps.schedule import Parameters, Search, Started
from jaxcross.sweeps.search import (
    AnySearch,
    Choices,
    Draws,
    Grid,
    Listed,
    Optuna,
    known_trials,
    name_of,
    pruner_of,
)
from jaxcross.sweeps.study import StudySearch, earlier_trials
from jaxcross.sweeps.sweep_settings import SweepSettings, on_every_rank
from jaxcross.sweeps.trial import Finished, Trials
from jaxcross.world import World, current_world, gather

_log = logging.getLogger("jaxcross")
_FAILED = (JobStatus.FAILED, JobStatus.EJECTED)
_TRIAL = "trial"  # the name under which rank 0 submits trials


def sweep(
    train: Callable[..., Any],
    search: Grid | Choices | Draws | Optuna,
    *,
    metric: str,
    mode: Literal["max", "min"] | None = None,
    trials: int | None = None,
    concurrent: int = 2,
    folder: str | os.PathLike[str] | None = None,
    keep: int | None = 1,
    **options: Unpack[SharedOptions],
) -> SweepResult:
    """Trains with many different parameters, a few trials at a time, and returns the best trial.

    Each trial is a job that calls `train(job, **parameters)`, with `concurrent` of them running at
    the same time. When a trial ends, fails or is pruned (ended early for doing worse than others),
    the next trial takes its place while the others carry on.

    If you pass a folder, an interrupted sweep can be continued simply by making the same call
    again. Waits for all ranks.

    **Sweeps are repeatable.** The arguments fully determine the trials and their parameters, the
    steps at which trials are pruned, and the trials' states, down to the last bit. You get the same
    results in every run of the sweep, no matter how often it's killed and restarted. This requires
    that your `train` function is itself repeatable and, if you use an Optuna study, that its
    sampler has a seed. If a trial logs a different value after a restart than it did before, you'll
    get a warning that mentions the trial's name.

    **The cost is waiting.** If Optuna received results as soon as they're available, its answers
    would depend on which trial happens to be faster. Instead, we pass on results in the order of
    steps, as if every step of every trial took the same time. As a consequence, if the search has a
    pruner, a trial that logs the metric has to wait until the other trials have made as many steps,
    which means that a trial with a long compile time holds up the others. With an Optuna study,
    whenever a trial ends, the next trial can't begin until the others have made as many steps.
    Without a pruner, `Grid`, `Choices` and `Draws` never wait.

    Args:
        train: The training function, which is called as `train(job, **parameters)`, as in
            `Runner.add`. It must log the metric with `job.log`, in the same way on every rank. What
            counts for comparing trials is the last value logged on rank 0; a pruner gets the first
            value of each step. If you pass a folder, the function should call `job.restore` at the
            beginning and `job.save` every now and then, because a restart repeats all steps since
            the last checkpoint.
        search: Proposes the trials' parameters: `jaxcross.Grid(values)`, `jaxcross.Choices(dicts)`,
            `jaxcross.Draws(space)` or `jaxcross.Optuna(study, space)`. If it has a `pruner`, trials
            may be ended early.
        metric: The name under which trials log the metric, e.g. `eval/accuracy` if it's in a dict.
            To catch typos in the name early, the sweep ends with an error if a trial ends without
            having logged the metric, or if the `job.every` evaluation that should provide it
            returns something else the first time. Neither happens if some trial has already logged
            the metric.
        mode: Whether larger (`max`) or smaller (`min`) values of the metric are better. Required
            unless `search` is an `Optuna`, whose study has a direction.
        trials: The number of trials. Required for `Draws` and `Optuna`, where you can increase it
            when restarting a sweep. For the other searches, the number of trials is fixed.
        concurrent: How many trials run at the same time. Their states must fit into memory
            together.
        folder: Where to keep the sweep: the file `sweep.json`, metrics and checkpoints. If None,
            nothing is kept, and the sweep is lost if it's killed.
        keep: How many of the best finished trials keep their checkpoints. All other checkpoints are
            deleted as soon as the trial has ended, unless it failed. If None, all checkpoints are
            kept.
        **options: Options of the runs, as for `Runner`: `world`, `policy`, `instruments`, `memory`,
            `events` and `progress`. The policy can't be `Weighted`, because that has a fixed share
            for each job, whereas trials come and go all the time. It can't be `Sequential` either
            if there's a pruner, unless `concurrent` is 1.

    Returns:
        The trials with their values, identical on all ranks. It prints as a table.

    Raises:
        TypeError: Before the first step, on every rank: an argument has the wrong type, or `train`
            doesn't accept the parameters.
        ValueError: Before the first step, on every rank: an argument is out of range, or the folder
            contains something other than a sweep.
        JobError: All trials have failed, no trial has logged `metric`, or the arguments don't match
            the sweep that you're restarting. If only some of the trials fail, their errors are in
            the result.
        KeyboardInterrupt: A rank was interrupted. Make the same call again to resume the sweep.

    Example:
        >>> search = jaxcross.Grid({"lr": [0.1, 0.4]})
        >>> result = jaxcross.sweep(train, search, metric="accuracy", mode="max")  # doctest: +SKIP
        >>> print(result.best.params)  # doctest: +SKIP
        {'lr': 0.4}
    """
    arguments.check_world(options.get("world"))
    given = options.get("world")
    world = given if given is not None else current_world()
    options["world"] = world

    def check() -> tuple[SweepSettings, list[Parameters]]:
        check_options("sweep", options, SharedOptions)
        # `Runner` would check these values too, but on each rank separately. If a value was wrong
        # on just one rank, only that rank would raise, leaving the others to wait for it forever.
        # Here, all ranks raise together.
        check_values(options)
        arguments.check_folder("`folder`", folder)
        checks.check_numbers(concurrent=concurrent, trials=trials, keep=keep)
        checks.check_metric(metric, mode)
        known = known_trials(search, trials)
        for number, parameters in enumerate(known):
            arguments.check_job(name_of(number, parameters), train, parameters)
        pruner = pruner_of(search)
        settings = SweepSettings(
            metric=metric,
            mode=_mode(search, metric, mode),
            concurrent=concurrent,
            trials=trials or len(known),
            seed=search.seed if isinstance(search, Draws) else 0,
            kind="study" if isinstance(search, Optuna) else "list",
            pruner="" if pruner is None else type(pruner).__name__,
            keep=keep,
            # `jaxcross estimate` runs only one step, and mustn't write anything.
            folder=None
            if folder is None or world.estimate_request
            else with_time(folder).absolute(),
        )
        arguments.check_trial_policy(
            options.get("policy"), concurrent, prunes=settings.pruner not in ("", "NopPruner")
        )
        return settings, known

    settings, known = on_every_rank(world, "checks of the sweep", check)
    checks.check_same(world, {**settings.facts(), "search": known})
    log = TrialLog(settings.folder if world.rank == 0 else None)
    try:
        opened = on_every_rank(
            world, "opening the sweep", lambda: _open(log, settings, known, search, train, world)
        )
        result = _run(
            Trials(train, settings, world=world, coordinator=opened),
            settings,
            world,
            opened,
            options,
        )
        if opened is not None and isinstance(search, Optuna):
            assert isinstance(opened.search, StudySearch)
            opened.search.add_to(search.study)
        return result
    finally:
        log.close()


def _mode(
    search: AnySearch, metric: str, mode: Literal["max", "min"] | None
) -> Literal["max", "min"]:
    if isinstance(search, Optuna):
        if mode not in (None, search.mode):
            raise ValueError(
                f"`mode` is `{mode}`, but the study's direction says `{search.mode}`. Leave `mode` "
                "out, or make a study with the other direction."
            )
        return search.mode
    if mode is None:
        raise ValueError(
            f'`mode` must say which `{metric}` is better: `mode="max"` for the largest, '
            '`mode="min"` for the smallest. Only a search by `Optuna` brings its own direction.'
        )
    return mode


def _open(
    log: TrialLog,
    settings: SweepSettings,
    known: list[Parameters],
    search: AnySearch,
    train: Any,
    world: World,
) -> Coordinator | None:
    """Opens the folder and replays its log. Returns None on ranks other than 0."""
    if world.rank != 0:
        return None
    mine = {**settings.facts(), "sweep": secrets.token_hex(8)}
    if isinstance(search, Optuna):
        mine["earlier_trials"] = len(search.study.trials)
    earlier = log.open(mine)
    asks = isinstance(search, Optuna) or search.pruner is not None
    settings.check_restart(earlier, ordered=asks)
    if isinstance(search, Optuna):
        before = len(earlier_trials(search.study, earlier["sweep"]))
        if before != earlier["earlier_trials"]:
            raise ValueError(
                f"The study had {earlier['earlier_trials']} trials when the sweep in "
                f"`{settings.folder}` began, and has {before} now. Pass the study with its "
                "original trials, or name another folder."
            )
    for trial in log.trials.values():
        if known and trial.parameters != known[trial.number]:
            raise ValueError(
                f"Trial {trial.number} of the sweep in `{settings.folder}` has the parameters "
                f"{dict(trial.parameters)}, but `search` now gives it {dict(known[trial.number])}. "
                "Start the sweep with the same `search` as before, or name another folder."
            )

    def make(fixed: Mapping[int, Parameters]) -> Search:
        if not asks:
            return Listed(known)
        return StudySearch(
            search,
            known,
            mode=settings.mode,
            trials=settings.trials,
            sweep=earlier["sweep"],
            fixed=fixed,
            check=lambda name, parameters: arguments.check_job(name, train, parameters),
        )

    name = "sweep" if settings.folder is None else re.sub(r"[^\w.-]", "_", settings.folder.name)
    coordinator = Coordinator(
        make, log, concurrent=settings.concurrent, group=f"{name}-{earlier['sweep'][:8]}"
    )
    log.keep({**earlier, **settings.facts()})
    return coordinator


def _run(
    trials: Trials,
    settings: SweepSettings,
    world: World,
    coordinator: Coordinator | None,
    options: SharedOptions,
) -> SweepResult:
    """Runs all trials.

    This usually takes a single run, plus another if a run's last trials failed.
    """
    reports: list[Report] = []
    wrong: Exception | None = None
    before: list[dict[str, Any]] = []
    while agenda := _agenda(trials, world, coordinator):
        if agenda == before:
            raise InternalError(
                f"a run of the sweep has ended none of its trials "
                f"{[each['name'] for each in agenda]}. This is a bug in jaxcross, please report it."
            )
        before = agenda
        checkpoints = settings.checkpoint_folder and Checkpoints(settings.checkpoint_folder, keep=1)
        metrics = settings.folder and settings.folder / "metrics"
        with Runner(checkpoints=checkpoints, metrics=metrics, **options) as runner:
            runner.register(_TRIAL, trials.run)
            if coordinator is not None:
                coordinator.submit = partial(_submit, runner)
            for each in agenda:
                runner.add(
                    each["name"],
                    trials.run,
                    {"number": each["number"], "params": each["params"], "after": each["after"]},
                )
            try:
                runner.run()
            except (JobError, ExchangeError) as error:
                if runner.report is None or not any(job.status in _FAILED for job in runner.jobs):
                    raise
                if coordinator is not None and coordinator.error is None:
                    _log.warning("A trial failed, but the others continue: %s", error)
            # A job that has ended normally may also have an error, e.g. if its replicas differ at
            # the end.
            wrong = wrong or next(
                (job.error for job in runner.jobs if job.error and job.status not in _FAILED), None
            )
        if runner.report is not None:
            reports.append(runner.report)
    if wrong is not None:
        raise wrong
    trials.clean()
    return _result(trials, settings, world, coordinator, reports)


def _submit(runner: Runner, started: Started, name: str) -> None:
    arguments = {
        "number": started.number,
        "params": dict(started.parameters),
        "after": started.after,
    }
    runner.submit(_TRIAL, job=name, kwargs=arguments)


def _agenda(trials: Trials, world: World, coordinator: Coordinator | None) -> list[dict[str, Any]]:
    """Returns the trials that the next run begins with, identical on all ranks.

    Waits for all ranks.
    """
    mine = None
    if coordinator is not None:
        finished = {
            each.number: [each.name, each.value, each.digest]
            for each in coordinator.trials
            if each.status == "finished"
        }
        pruned = {each.number: each.name for each in coordinator.trials if each.status == "pruned"}
        unfinished = [
            {
                "number": each.number,
                "name": each.name,
                "params": dict(each.parameters),
                "after": each.after,
            }
            for each in coordinator.running
        ]
        mine = {
            "finished": [*finished.items()],
            "pruned": [*pruned.items()],
            "trials": unfinished,
            "prunes": coordinator.search.prunes,
        }
    with world.monitor(job="", step=0, segment=-1, what="next trials"):
        first = gather(world.control, mine)[0]
    finished = {
        number: Finished(name=name, value=value, digest=digest)
        for number, (name, value, digest) in first["finished"]
    }
    trials.take_over(
        finished,
        dict(first["pruned"]),
        [each["number"] for each in first["trials"]],
        first["prunes"],
    )
    return first["trials"]


def _result(
    trials: Trials,
    settings: SweepSettings,
    world: World,
    coordinator: Coordinator | None,
    reports: Sequence[Report],
) -> SweepResult:
    """Returns the result of the sweep, identical on all ranks. Waits for all ranks.

    Raises:
        Exception: On every rank: the error raised by the search.
        JobError: On every rank: all trials failed.
    """

    def facts() -> list[dict[str, Any]]:
        if coordinator is None:
            return []
        if coordinator.error is not None:
            raise coordinator.error
        return [_facts(each) for each in coordinator.trials]

    mine = on_every_rank(world, "end of the sweep", facts)
    with world.monitor(job="", step=0, segment=-1, what="result of the sweep"):
        rows = gather(world.control, mine)[0]
    found = tuple(SweepTrial(**{**row, "values": tuple(map(tuple, row["values"]))}) for row in rows)
    failed = [each for each in found if each.status == "failed"]
    if len(failed) == len(found):
        error = JobError(
            f"All {len(found)} trials of the sweep failed. The first error: {failed[0].error}"
        )
        for other in failed[1:MAX_ERRORS_SHOWN]:
            error.add_note(f"Trial `{other.name}`: {other.error}")
        if settings.folder is not None:
            error.add_note(f"To begin again, remove `{settings.folder}` or name another folder.")
        raise error
    best = trials.best()
    result = SweepResult(
        metric=settings.metric,
        mode=settings.mode,
        trials=found,
        best=None if best is None else found[best],
        state=None if best is None else trials.state_of(best),
        reports=tuple(reports),
    )
    if world.rank == 0 and settings.folder is not None and find_spec("matplotlib") is not None:
        result.to_plot(settings.folder / "sweep.png")
    return result


def _facts(trial: TrialRecord) -> dict[str, Any]:
    return {
        "number": trial.number,
        "name": trial.name,
        "params": dict(trial.parameters),
        "status": trial.status,
        "step": trial.step,
        "value": trial.value,
        "digest": trial.digest,
        "error": trial.error,
        "values": [
            (step, each) for step, logged in sorted(trial.values.items()) for each in logged
        ],
    }
