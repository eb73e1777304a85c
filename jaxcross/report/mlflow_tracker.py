"""`MLflow`: sends the metrics of jobs to an MLflow tracking server or database."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from jaxcross.errors import require_extra
from jaxcross.report.metric_files import flatten_metrics
from jaxcross.report.tracker import Row, TrackedJob, TrackedRun, Tracker, check_name

_MOST_METRICS = 1000  # in one request
_MOST_PARAMS = 100
_LONGEST_PARAM = 6000
_LONGEST_KEY = 250
_STATUS = {
    "ended": "FINISHED",
    "stopped early": "FINISHED",
    "pruned": "FINISHED",
    "stopped": "KILLED",
}
_GROUP = "jaxcross.sweep"  # the tag of a sweep's run
_KEY = "jaxcross.run"  # the tag of a job's run


@final
class MLflow(Tracker):
    """Sends the numbers that jobs log to MLflow, with one run per job.

    Pass it to `instruments` on every rank; only rank 0 uses it. If the run has checkpoints, also
    pass `metrics`. A job that's resumed then continues its MLflow run, in which each step occurs
    exactly once, no matter how the earlier run ended. A job that had no checkpoint yet starts from
    scratch with a new MLflow run, and the old one is marked as killed.

    The MLflow run has the job's name, and its parameters are the arguments of the job's function,
    as far as they're numbers, strings, or lists and dicts of these. The trials of a sweep are
    children of a run that stands for the sweep. When the job ends, its status is in the tag
    `"jaxcross.status"`.

    Metrics are sent by a separate thread, so the job never waits for MLflow, and doesn't fail if
    MLflow can't be reached. The end of the run waits for at most three minutes.

    Everything else is configured by MLflow's own environment variables, such as
    `MLFLOW_TRACKING_URI`, or by `mlflow.set_tracking_uri`.

    Args:
        experiment: The name of the MLflow experiment, which is created if it doesn't exist.

    Raises:
        MissingExtraError: MLflow is not installed. The extra `mlflow` installs it.
        ValueError: `experiment` is empty.

    Example:
        >>> tracker = MLflow("my-experiment")  # doctest: +SKIP
        >>> jaxcross.run(jobs, metrics="metrics", instruments=[tracker])  # doctest: +SKIP
    """

    service = "MLflow"
    suffix = "mlflow"
    reopens = True

    def __init__(self, experiment: str) -> None:
        require_extra("mlflow", "`MLflow`", "mlflow")
        check_name(experiment, "experiment", "an MLflow experiment")
        super().__init__()
        self._experiment = experiment
        self._parents: dict[str, _Parent] = {}  # by the name of the sweep

    def open_run(self, job: TrackedJob) -> TrackedRun:
        """See `Tracker`."""
        import mlflow

        client = mlflow.MlflowClient()
        place = {
            "tracking_uri": client.tracking_uri,
            "experiment": _experiment_id(client, self._experiment),
        }
        parent = None
        if job.group:
            parent = self._parents.setdefault(
                job.group, _Parent(client, place["experiment"], job.group)
            )
        if {key: job.saved.get(key) for key in place} != place:
            if job.earlier.get("tracking_uri") == client.tracking_uri:
                _end_earlier(client, job.earlier)
            job.save(**place, key=secrets.token_hex(16))
        tags = {} if parent is None else {"mlflow.parentRunId": parent.id}
        run_id = _find_or_create(
            client, place["experiment"], {_KEY: job.saved["key"]}, job.name, tags
        )
        known = client.get_run(run_id).data
        for part in _parts(list(_params(job.params, known.params)), _MOST_PARAMS):
            client.log_batch(run_id, params=part)
        if parent is not None:
            parent.opened(run_id)
        last_steps = {metric.key: metric.step for metric in known.to_proto().metrics}
        return _MLflowRun(client, run_id, last_steps, parent)


@final
class _MLflowRun:
    """One job's run. `last_steps` has the last step of each metric that MLflow already has."""

    def __init__(
        self, client: Any, run_id: str, last_steps: Mapping[str, int], parent: _Parent | None
    ) -> None:
        self._client = client
        self._id = run_id
        self._last_steps = last_steps
        self._parent = parent

    def write(self, rows: Sequence[Row]) -> None:
        for part in _parts(list(self._metrics(rows)), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def finish(self, status: str) -> None:
        self._client.set_tag(self._id, "jaxcross.status", status)
        self._client.set_terminated(self._id, status=_STATUS.get(status, "FAILED"))
        if self._parent is not None:
            self._parent.closed(self._id)

    def _metrics(self, rows: Sequence[Row]) -> Iterator[Any]:
        from mlflow.entities import Metric

        for row in rows:
            for name, value in row.values.items():
                key = _key(name)
                is_number = isinstance(value, bool | int | float)
                if is_number and row.step > self._last_steps.get(key, -1):
                    yield Metric(key, float(value), round(row.time_s * 1000), row.step)


@final
class _Parent:
    """The run that stands for a sweep. It's marked as finished when no trial is running."""

    def __init__(self, client: Any, experiment: str, group: str) -> None:
        self._client = client
        self._running: set[str] = set()
        self.id = _find_or_create(client, experiment, {_GROUP: group}, group)

    def opened(self, trial: str) -> None:
        if not self._running:
            self._client.update_run(self.id, status="RUNNING")
        self._running.add(trial)

    def closed(self, trial: str) -> None:
        self._running.discard(trial)
        if not self._running:
            self._client.set_terminated(self.id)


def _experiment_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:  # another process may have created it in the meantime
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


def _find(client: Any, experiment: str, tag: Mapping[str, str]) -> list[Any]:
    ((key, value),) = tag.items()
    return client.search_runs([experiment], f"tags.`{key}` = '{value}'", max_results=1)


def _find_or_create(
    client: Any, experiment: str, tag: Mapping[str, str], name: str, more: Mapping[str, str] = {}
) -> str:
    """Returns the id of the run with this tag, which is running from now on.

    MLflow chooses the ids of runs. If we stored that id, a kill just before we do so would leave
    the job with two runs. So runs are found by a tag that we choose ourselves.
    """
    for found in _find(client, experiment, tag):
        client.update_run(found.info.run_id, status="RUNNING")
        return found.info.run_id
    return client.create_run(experiment, run_name=name, tags={**tag, **more}).info.run_id


def _end_earlier(client: Any, saved: Mapping[str, Any]) -> None:
    """Marks the run of a killed job, which starts from scratch this time, as killed."""
    for found in _find(client, saved["experiment"], {_KEY: saved["key"]}):
        if found.info.status == "RUNNING":
            client.set_terminated(found.info.run_id, status="KILLED")


def _params(params: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[Any]:
    """Yields the parameters that the run doesn't have yet; MLflow refuses to change one."""
    from mlflow.entities import Param

    values = {_key(name): str(value)[:_LONGEST_PARAM] for name, value in flatten_metrics(params)}
    for key, value in values.items():
        if key not in known:
            yield Param(key, value)


def _key(name: str) -> str:
    """Converts the name of a metric or a parameter to one that MLflow accepts.

    MLflow only allows certain characters, and a name must be a normalised relative path. If a
    single name is invalid, MLflow rejects the whole request.
    """
    parts = re.sub(r"[^\w\-. /:]", "_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:_LONGEST_KEY].rstrip("/")


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), most):
        yield items[begin : begin + most]
