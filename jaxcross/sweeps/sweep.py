"""`sweep`: checks, runs and resumes a whole sweep."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import ExchangeError, InternalError, JobError
from jaxcross.jobs import arguments
from jaxcross.jobs.outcome import MAX_ERRORS_SHOWN
from jaxcross.jobs.runner import Runner
from jaxcross.report import Report
from jaxcross.report.sweep import SweepResult
from jaxcross.report.sweep_trial import SweepTrial
from jaxcross.sweeps import settings as checks
from jaxcross.sweeps.coordinator import Coordinator
from jaxcross.sweeps.log import TrialLog, TrialRecord
from jaxcross.sweeps.schedule import Parameters, Search, Started
from jaxcross.sweeps.search import Listed, is_study, listed, name_of
from jaxcross.sweeps.settings import SweepSettings, on_every_rank
from jaxcross.sweeps.study import StudySearch, check_pruner, check_space, earlier_trials, mode_of
from jaxcross.sweeps.trial import Finished, Trials
from jaxcross.world import World, current_world
from jaxcross.world.control_plane import gather

_log = logging.getLogger("jaxcross")
_OPTIONS = ("instruments", "depth", "link", "chaos", "events", "check_replicas", "progress")
_TRIAL = "trial"  # the name by which rank 0 submits trials


def sweep(
    train: Callable[..., Any],
    search: Any,
    *,
    metric: str,
    mode: Literal["max", "min"] | None = None,
    concurrent: int = 2,
    trials: int | None = None,
    space: Any = None,
    prune: Any = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    keep: int | None = 1,
    world: World | None = None,
    **options: Any,
) -> SweepResult:
    """Trains with many choices of parameters, a few trials at a time, and says which was best.
    Waits for all ranks.

    Each trial is a job of a `Runner`: `train(job, **parameters)`. When one ends, fails or is
    pruned, the next one takes its place while the others go on. With a folder, the sweep goes on
    where it stood when it is started again.

    What repeats: the trials, which of them are pruned and where, and the bits of their states
    depend on arguments alone. They are those of any other run of this sweep, also of one that was
    killed and started again any number of times. With an Optuna study that needs a sampler with a
    seed. It needs a `train` that repeats: a trial that logs another value after a restart than
    before is named in a warning.

    What that costs: Optuna gets to know results in the order of steps and not of the clock, as if
    the steps of all trials took equally long. A trial that could be pruned waits, when it logs the
    metric, until the others have made as many steps; one that compiles for long holds up the others
    there. With a study the place of a trial that is over stays empty until the others have come as
    far. Grids, lists and random draws without `prune` wait for nothing.

    Args:
        train: `train(job, **parameters)`, as for `Runner.add`. It logs the metric by `job.log`, on
            every rank alike; the last value counts, and rank 0's. With a folder it calls
            `job.restore`, and `job.save` now and then: a restart repeats the steps since then.
        search: A grid as `{"lr": [0.1, 0.2], "width": [32, 64]}`; a list of dicts; a function of a
            NumPy generator that returns a dict; or an Optuna study, which rank 0 alone asks, and
            which gets the trials at the end.
        metric: The name under which trials log what counts; `eval/accuracy` for one in a dict. A
            sweep ends with an error when an evaluation by `job.every` that could return it first
            returns something else, or when a trial comes to its end without it, unless another
            trial has logged it.
        mode: Whether a large (`max`) or a small (`min`) value of the metric is better. Needed
            unless `search` is a study, whose direction says it.
        concurrent: Number of trials at a time. Their states must fit into memory together.
        trials: How many. Needed with a function or a study; of a grid, so many drawn at random.
        space: With a study: a dict of distributions and lists, or a function of an Optuna trial
            that suggests parameters and returns them as a dict.
        prune: A pruner of Optuna's, with a study instead of the study's. None prunes nothing
            without a study.
        seed: Of random draws.
        folder: Where the sweep is kept: `sweep.json`, metrics, checkpoints. If None, nothing is,
            and a killed sweep is lost.
        keep: Checkpoints stay for so many of the best finished trials; those of others are deleted
            when they are over, except for failed ones. None keeps all.
        world: From `jaxcross.initialize()`.
        options: For `Runner`: `instruments`, `depth`, `link`, `chaos`, `events`, `check_replicas`,
            `progress`.

    Returns:
        The trials with their values, the same on every rank. Printing it shows a table.

    Raises:
        TypeError: Before the first step, on every rank: an argument is of another type, or `train`
            does not take the parameters.
        ValueError: Likewise: an argument is out of range, or the folder holds something else.
        MissingExtraError: Likewise: `prune` needs Optuna, which the extra `sweep` brings.
        JobError: All trials failed, or none logs `metric`; or a restart does not fit. A trial that
            fails alone is in the result.
        KeyboardInterrupt: Somebody interrupted a rank; the same call goes on from there.

    Example:
        >>> result = jaxcross.sweep(train, {"lr": [0.1, 0.4]}, metric="accuracy", mode="max")  # doctest: +SKIP
        >>> print(result.best.params)  # doctest: +SKIP
        {'lr': 0.4}
    """
    arguments.check_world(world)
    world = world if world is not None else current_world()
    asked = _Asked(search=search, space=space, prune=prune)
    numbers = {"concurrent": concurrent, "trials": trials, "seed": seed, "keep": keep}

    def check() -> tuple[SweepSettings, list[Parameters]]:
        arguments.check_folder("`folder`", folder)
        checks.check_numbers(**numbers)
        checks.check_metric(metric, mode)
        _check_options(options)
        kept = (
            None if world.estimate_request else folder
        )  # an estimate ends at the first step, and writes nothing
        return _checked(train, asked, metric=metric, mode=mode, folder=kept, **numbers)

    settings, known = on_every_rank(world, "checks of the sweep", check)
    checks.check_same(world, {**settings.facts(), "search": known})
    log = TrialLog(settings.folder if world.rank == 0 else None)
    try:
        opened = on_every_rank(
            world, "opening the sweep", lambda: _open(log, settings, known, asked, train, world)
        )
        result = _run(
            Trials(train, settings, world=world, coordinator=opened),
            settings,
            world,
            opened,
            options,
        )
        if opened is not None and isinstance(opened.search, StudySearch) and is_study(search):
            opened.search.add_to(search)
        return result
    finally:
        log.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Where trials are to come from, as the caller says."""

    search: Any
    space: Any
    prune: Any

    @property
    def study(self) -> Any:
        return self.search if is_study(self.search) else None


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(
                f"`sweep` has no argument `{name}`; for `Runner` it takes {', '.join(_OPTIONS)}."
            )


def _checked(
    train: Any,
    asked: _Asked,
    *,
    metric: str,
    mode: Any,
    trials: int | None,
    folder: Any,
    **numbers: Any,
) -> tuple[SweepSettings, list[Parameters]]:
    """Returns the settings, and the parameters of all trials that are known before the first one
    runs.
    """
    check_pruner(asked.prune)
    known: list[Parameters] = []
    if asked.study is None:
        if mode is None:
            raise ValueError(
                f'`mode` must say which `{metric}` is better: `mode="max"` for the largest, '
                '`mode="min"` for the smallest. Only an Optuna study says it itself.'
            )
        if asked.space is not None:
            raise ValueError("`space` goes with an Optuna study: `search` has the values already.")
        known = listed(asked.search, trials, numbers["seed"])
        for number, parameters in enumerate(known):
            arguments.check_job(name_of(number, parameters), train, parameters)
    else:
        if trials is None:
            raise ValueError(
                "An Optuna study can be asked without end: `trials` must say how often, as "
                "`trials=64`."
            )
        check_space(asked.space)
        if mode not in (None, mode_of(asked.study)):
            raise ValueError(
                f"`mode` is `{mode}`, and the study's direction says `{mode_of(asked.study)}`."
            )
        mode = mode_of(asked.study)
    pruner = asked.prune if asked.study is None or asked.prune is not None else asked.study.pruner
    settings = SweepSettings(
        metric=metric,
        mode=mode,
        trials=trials or len(known),
        kind="list" if asked.study is None else "study",
        pruner="" if pruner is None else type(pruner).__name__,
        folder=None if folder is None else Path(folder).absolute(),
        **numbers,
    )
    return settings, known


def _open(
    log: TrialLog,
    settings: SweepSettings,
    known: list[Parameters],
    asked: _Asked,
    train: Any,
    world: World,
) -> Coordinator | None:
    """Opens the folder, and goes through what an earlier start left there. On rank 0; None on the
    others.
    """
    if world.rank != 0:
        return None
    mine = {**settings.facts(), "sweep": secrets.token_hex(8)}
    if asked.study is not None:
        mine["earlier_trials"] = len(asked.study.trials)
    earlier = log.open(mine)
    settings.check_restart(earlier, ordered=bool(settings.pruner) or asked.study is not None)
    if asked.study is not None:
        before = len(earlier_trials(asked.study, earlier["sweep"]))
        if before != earlier["earlier_trials"]:
            raise ValueError(
                f"The study had {earlier['earlier_trials']} trials when the sweep in "
                f"`{settings.folder}` began, and has {before}. Pass it as it was, or name another "
                "folder."
            )
    for trial in log.trials.values():
        if known and trial.parameters != known[trial.number]:
            raise ValueError(
                f"Trial {trial.number} of the sweep in `{settings.folder}` has "
                f"{dict(trial.parameters)}, and now {dict(known[trial.number])}. Start it with the "
                "same `search` and `seed`, or name another folder."
            )

    def make(fixed: Mapping[int, Parameters]) -> Search:
        if asked.study is None and asked.prune is None:
            return Listed(known)
        return StudySearch(
            study=asked.study,
            listed=known,
            pruner=asked.prune,
            mode=settings.mode,
            space=asked.space,
            trials=settings.trials,
            sweep=earlier["sweep"],
            fixed=fixed,
            check=lambda name, parameters: arguments.check_job(name, train, parameters),
        )

    coordinator = Coordinator(make, log, concurrent=settings.concurrent)
    log.keep({**earlier, **settings.facts()})
    return coordinator


def _run(
    trials: Trials,
    settings: SweepSettings,
    world: World,
    coordinator: Coordinator | None,
    options: Mapping[str, Any],
) -> SweepResult:
    """Runs until no trial is left: mostly one run, and another one where the last trials of a run
    failed.
    """
    reports: list[Report] = []
    wrong: Exception | None = None
    before: list[dict[str, Any]] = []
    while agenda := _agenda(trials, world, coordinator):
        if agenda == before:
            raise InternalError(
                f"the trials {[each['name'] for each in agenda]} do not come to an end"
            )
        before = agenda
        checkpoints = settings.checkpoint_folder and Checkpoints(settings.checkpoint_folder, keep=1)
        metrics = settings.folder and settings.folder / "metrics"
        with Runner(world, checkpoints=checkpoints, metrics=metrics, **options) as runner:
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
                if runner.report is None or not any(
                    job.status in ("failed", "ejected") for job in runner.jobs
                ):
                    raise
                if coordinator is not None and coordinator.error is None:
                    _log.warning("A trial failed, the others go on: %s", error)
            # What fails after a trial has come to its end, as a comparison of replicas.
            wrong = wrong or next(
                (j.error for j in runner.jobs if j.error and j.status not in ("failed", "ejected")),
                None,
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
    """Returns the trials with which the next run begins, the same on every rank. Waits for all."""
    mine = None
    if coordinator is not None:
        finished = {
            each.number: [each.name, each.value, each.digest]
            for each in coordinator.trials
            if each.status == "finished"
        }
        pruned = {each.number: each.name for each in coordinator.trials if each.status == "pruned"}
        going = [
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
            "trials": going,
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
    """Returns the outcome, the same on every rank. Waits for all.

    Raises:
        Exception: On every rank: what the search raised.
        JobError: On every rank: all trials failed.
    """

    def text() -> str:
        if coordinator is None:
            return ""
        if coordinator.error is not None:
            raise coordinator.error
        return json.dumps([_facts(each) for each in coordinator.trials])

    mine = on_every_rank(world, "end of the sweep", text)
    with world.monitor(job="", step=0, segment=-1, what="result of the sweep"):
        rows = json.loads(world.control.allgather_text(mine)[0] if world.size > 1 else mine)
    found = tuple(SweepTrial(**{**row, "values": tuple(map(tuple, row["values"]))}) for row in rows)
    failed = [each for each in found if each.status == "failed"]
    if len(failed) == len(found):
        error = JobError(
            f"All {len(found)} trials of the sweep failed. The first: {failed[0].error}"
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
        "values": sorted(trial.values.items()),
    }
