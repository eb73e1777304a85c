"""Trackers send each row once, in the background, and outlast a service that fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxcross.report import mlflow_tracker, tracker
from jaxcross.report.tracker import Row, TrackedJob, TrackedRun, Tracker, plain_values


class Service(Tracker):
    """Keeps what it's sent. Raises in as many calls of `open_run` or `write` as it's told to."""

    service = "the service"
    suffix = "service"
    reopens = True

    def __init__(self, *, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.opened: list[TrackedJob] = []
        self.got: list[tuple[str, int, dict[str, Any]]] = []
        self.ended: dict[str, str] = {}

    def open_run(self, job: TrackedJob) -> TrackedRun:
        self.opened.append(job)
        job.save(id=job.saved.get("id", "new"))
        return Run(self, job.name)


class Run:
    def __init__(self, service: Service, job: str) -> None:
        self.service, self.job = service, job

    def write(self, rows: Sequence[Row]) -> None:
        if self.service.failures > 0:
            self.service.failures -= 1
            raise ConnectionError("no route to the service.")
        self.service.got += [(self.job, row.step, dict(row.values)) for row in rows]

    def finish(self, status: str) -> None:
        self.service.ended[self.job] = status


def attached(service: Service, folder: Path | None = None) -> Service:
    service.attach(rank=0, folder=folder, resumable=folder is not None, stall_timeout_s=300.0)
    return service


def log(service: Service, *steps: int) -> None:
    for step in steps:
        service.metrics(job="a", step=step, values={"loss": float(step), "eval": {"n": step}})


def test_a_job_without_checkpoints_begins_with_its_first_metrics() -> None:
    service = attached(Service())
    service.describe("a", {"lr": 0.1, "data": object()})
    service.describe("silent", {})
    log(service, 1, 2)
    service.end("a", "ended")
    service.end("silent", "ended")
    service.close()
    assert service.got == [("a", n, {"loss": float(n), "eval/n": n}) for n in (1, 2)]
    assert service.ended == {"a": "ended"}
    assert [job.params for job in service.opened] == [{"lr": 0.1}]


def test_a_restart_sends_the_lines_of_the_metrics_file_first(tmp_path: Path) -> None:
    first = attached(Service(), tmp_path)
    log(first, 0)  # before it restores
    first.begin("a", 0)
    log(first, 1)
    first.close()
    assert [step for _, step, _ in first.got] == [0, 1] and not first.ended
    again = attached(Service(), tmp_path)
    again.begin("a", 1, [{"step": n, "time": 5.0, "loss": "nan"} for n in (0, 1)])
    log(again, 2)
    again.end("a", "failed")
    again.close()
    assert [step for _, step, _ in again.got] == [0, 1, 2] and again.ended == {"a": "failed"}
    assert again.got[0][2]["loss"] != again.got[0][2]["loss"]
    assert again.opened[0].saved == {"id": "new"}
    scratch = attached(Service(), tmp_path)
    scratch.begin("a", 0)
    scratch.close()
    assert scratch.opened[0].earlier == {"id": "new"}
    assert json.loads((tmp_path / "a.service.json").read_text()) == {"id": "new"}


def test_what_a_resumed_job_logs_again_at_its_step_is_left_out(tmp_path: Path) -> None:
    """If a job is killed before it has saved that an evaluation is over, it evaluates again."""
    service = attached(Service(), tmp_path)
    service.begin("a", 4, [{"step": n, "time": 5.0, "eval/n": n} for n in (2, 4)])
    service.metrics(job="a", step=4, values={"eval": {"n": 4}})
    service.metrics(job="a", step=4, values={"eval": {"n": 4}, "late": 1})
    service.metrics(job="a", step=6, values={"eval": {"n": 6}})
    service.close()
    assert [(step, values) for _, step, values in service.got] == [
        (2, {"eval/n": 2}),
        (4, {"eval/n": 4}),
        (4, {"late": 1}),
        (6, {"eval/n": 6}),
    ]


def test_a_failure_is_logged_once_and_everything_sent_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = attached(Service(failures=1))
    log(service, 1, 2, 3)
    service.end("a", "ended")
    service.close()
    assert [step for _, step, _ in service.got] == [1, 2, 3] and service.ended == {"a": "ended"}
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "Metrics of job `a` do not reach the service: ConnectionError: no route to the service. "
        "The job continues. We keep its metrics and try again, once a minute and at the end."
    )


@pytest.mark.parametrize("other_ranks_wait_s", [300.0, 0.02])
def test_a_service_that_never_answers_holds_up_the_end_for_a_limited_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, other_ranks_wait_s: float
) -> None:
    released = threading.Event()

    class Stuck(Service):
        def open_run(self, job: TrackedJob) -> TrackedRun:
            released.wait()
            return super().open_run(job)

    if other_ranks_wait_s > 1:
        monkeypatch.setattr(tracker, "_PATIENCE_S", 0.01)
    service = Stuck()
    service.attach(rank=0, folder=None, resumable=False, stall_timeout_s=other_ranks_wait_s)
    thread = service._thread
    log(service, 1, 2)
    service.end("a", "ended")
    service.close()
    assert (
        "may lack the last metrics of this run: 2 of them had not been sent within 0.01 s of its "
        "end" in caplog.text
    )
    released.set()
    assert thread is not None
    thread.join()


def test_a_service_that_cannot_be_reopened_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Once(Service):
        reopens = False

    service = attached(Once(failures=1))
    log(service, 1)
    service.end("a", "ended")
    service.close()
    assert "are not sent, but a restart from its checkpoints sends them" in caplog.text
    assert not service.got


def test_other_ranks_send_nothing() -> None:
    service = Service()
    service.attach(rank=1, folder=None, resumable=False, stall_timeout_s=300.0)
    service.describe("a", {})
    service.begin("a", 0)
    log(service, 1)
    service.end("a", "ended")
    service.close()
    assert not service.opened


def test_a_value_that_cannot_be_read_is_no_hyperparameter() -> None:
    class Key:
        """Raises like `jax.random.key(0)` does."""

        shape = ()

        def item(self) -> None:
            raise NotImplementedError

    assert plain_values({"lr": 0.1, "key": Key()}) == {"lr": 0.1}


def test_a_service_that_exits_ends_neither_the_thread_nor_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Exits(Service):
        def open_run(self, job: TrackedJob) -> TrackedRun:
            if not self.opened:
                self.opened.append(job)
                raise SystemExit("no account")
            return super().open_run(job)

    service = attached(Exits())
    log(service, 1)
    service.end("a", "ended")
    service.close()
    assert "do not reach the service: SystemExit: no account." in caplog.text
    assert service.ended == {"a": "ended"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("eval/top-5 acc.", "eval/top-5 acc."),
        ("loss (train)", "loss _train_"),
        ("/loss", "_/loss"),
        ("a//b/", "a/_/b/_"),
        ("./../x", "_/_/x"),
        ("k" * 249 + "/n", "k" * 249),
    ],
)
def test_mlflow_gets_names_that_it_allows(name: str, key: str) -> None:
    assert mlflow_tracker._key(name) == key


def test_only_plain_values_are_hyperparameters() -> None:
    given = {"lr": 0.1, "on": True, "none": None, "net": {"sizes": (1, 2), "act": abs}, "f": [abs]}
    assert plain_values({**given, "data": [0] * 101}) == {
        "lr": 0.1,
        "on": True,
        "none": None,
        "net": {"sizes": [1, 2]},
    }
