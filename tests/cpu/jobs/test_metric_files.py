"""`Runner(metrics=...)` logs each step once despite kills; all ranks raise before losing data."""

import json
import shutil

import numpy as np
import pytest

import jaxcross
from jaxcross.interleave.instrument import Instrument
from jaxcross.jobs.runner import Runner
from jaxcross.report import TensorBoard, Tracker
from tests.support.checkpoint_jobs import STEPS, init, loop, make_step, train
from tests.support.fakes import run_ranks


def steps_and_losses(folder, job):
    lines = [json.loads(line) for line in (folder / f"{job}.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_has_each_step_once(ranks, tmp_path):
    whole = train(ranks, tmp_path / "whole", metrics=tmp_path / "m0")
    train(ranks, tmp_path / "c", metrics=tmp_path / "m", after=8)
    for job in "ab":  # as if it had been killed before the checkpoint of step 8 was complete
        shutil.rmtree(next((tmp_path / "c" / job).glob("*08*")))
    again = train(ranks, tmp_path / "c", metrics=tmp_path / "m")
    for job in "ab":
        assert [step for step, _ in steps_and_losses(tmp_path / "m", job)] == list(
            range(1, STEPS + 1)
        )
        assert steps_and_losses(tmp_path / "m", job) == steps_and_losses(tmp_path / "m0", job)
        assert [rank[job][2] for rank in again] == [rank[job][2] for rank in whole]
        assert list(again[0][job][2]) == list(range(1, STEPS + 1))


def test_what_a_checkpoint_covers_is_on_disk_before_it(tmp_path):
    """A kill right after a checkpoint loses no line, however long ago the job logged it."""
    found = []

    def log_rarely(job, world, data):
        step, state = make_step(world, job.name), job.restore(init(world, own=False))
        for batch in job.batches(data, 6):
            state = step(state, batch)
            if job.step == 2:
                job.log({"loss": 0.5})
            if job.step >= 2:
                job.save(state)
                found.append(steps_and_losses(tmp_path / "m", "a"))

    train(1, tmp_path / "c", metrics=tmp_path / "m", names="a", fn=log_rarely)
    assert found == [[(2, 0.5)]] * 5


def test_a_run_without_checkpoints_never_overwrites(tmp_path):
    train(2, None, metrics=tmp_path)
    before = steps_and_losses(tmp_path, "a")
    with pytest.raises(ValueError, match="`metrics`: .* has the metrics of another run"):
        train(2, None, metrics=tmp_path)
    assert steps_and_losses(tmp_path, "a") == before


def test_every_rank_hears_of_a_folder_in_use(tmp_path):
    (tmp_path / "mine").touch()

    def work(world):
        runner = Runner(world, metrics=tmp_path)
        runner.add("a", loop, {"world": world, "data": iter(())})
        with pytest.raises(ValueError, match="holds other files") as error:
            runner.run()
        return str(error.value)

    one, other = run_ranks(2, work)
    assert one == other


def test_metrics_on_some_ranks_only_is_an_error():
    def work(world):
        runner = Runner(world, metrics=None if world.rank else "somewhere")
        runner.add("a", loop, {"world": world, "data": iter(())})
        runner.run()

    with pytest.raises(
        jaxcross.JobError, match="checkpoints, `metrics` and emulated link, on every rank"
    ):
        run_ranks(2, work)


def test_instrument_receives_metrics():
    """The instrument gets them on each rank, in order, with their values on the host."""

    class Sink(Instrument):
        def __init__(self):
            self.found = []

        def metrics(self, *, job, step, values):
            self.found.append((job, step, values["loss"], values["w"].tolist()))

    def log(job):
        for _ in job.batches([0.0, 1.0], 2):
            pass
        job.log({"loss": 0.5, "w": np.arange(2)})

    def work(world):
        sink = Sink()
        runner = Runner(world, instruments=[sink])
        runner.add("a", log)
        runner.run()
        return sink.found

    assert run_ranks(2, work) == [[("a", 0, 0.5, [0, 1])]] * 2


def test_metrics_must_be_a_path():
    with pytest.raises(TypeError, match="`metrics` must be the path of a folder"):
        Runner(jaxcross.initialize(), metrics=3)  # type: ignore[arg-type]


def test_two_sinks_on_one_folder_are_an_error(tmp_path):
    sinks = [TensorBoard(tmp_path / "a"), TensorBoard(tmp_path / "a")]
    with pytest.raises(ValueError, match="`TensorBoard` and `TensorBoard`, would write to"):
        Runner(jaxcross.initialize(), instruments=sinks)
    with pytest.raises(ValueError, match="`TensorBoard` and `MetricFiles`, would write to"):
        Runner(jaxcross.initialize(), instruments=sinks[:1], metrics=tmp_path / "a")


def test_a_tracker_of_a_run_with_checkpoints_needs_the_metrics_files(tmp_path):
    class Tracked(Tracker):
        service = suffix = "tracked"

    with pytest.raises(ValueError, match="`Tracked` needs the metrics files of a run that has"):
        Runner(
            jaxcross.initialize(),
            checkpoints=jaxcross.Checkpoints(tmp_path),
            instruments=[Tracked()],
        )
    with pytest.raises(ValueError, match="`Tracked` and `Tracked`, would write to `tracked`"):
        Runner(jaxcross.initialize(), instruments=[Tracked(), Tracked()])
