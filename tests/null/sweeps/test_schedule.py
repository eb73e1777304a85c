"""Tests that a search makes the same decisions in whatever order threads arrive, and whatever is
killed.
"""

import os
import random

import pytest

from jaxcross.sweeps.coordinator import Coordinator
from jaxcross.sweeps.log import TrialLog
from jaxcross.sweeps.schedule import Pruned, Schedule, Started

EVERY = 5  # steps between reports


class Adaptive:
    """A search whose answers depend on everything that it received before, and on the order."""

    ordered = True

    def __init__(self, trials, prunes=True):
        self.trials, self.prunes, self.heard = trials, prunes, []

    def ask(self, number):
        if number >= self.trials:
            return None
        drawn = random.Random(repr((number, self.heard)))
        self.heard.append(("ask", number))
        return {
            "steps": drawn.choice([5, 10, 15, 30]),
            "gain": drawn.randrange(10),
            "fails": drawn.random() < 0.1,
        }

    def report(self, number, step, value):
        self.heard.append(("report", number, step, value))
        return self.prunes and random.Random(repr(self.heard)).random() < 0.15

    def tell(self, number, status, value):
        self.heard.append(("tell", number, status, value))


class Machine:
    """Runs trials, whose steps come in random order, and may be killed. Jobs resume from their
    latest checkpoint.

    Every other time, the machine is stopped instead of killed. Each job then saves its current
    step.
    """

    values_per_step = 1

    def __init__(self, rng, folder, make, concurrent):
        self.rng, self.folder, self.make, self.concurrent = rng, folder, make, concurrent
        self.saved = {}  # checkpoints, which survive a kill
        self.start()

    def start(self):
        self.log = TrialLog(self.folder)
        self.log.open({})
        self.coordinator = Coordinator(self.make, self.log, concurrent=self.concurrent)
        self.coordinator.submit = lambda started, _: self.jobs.__setitem__(
            started.number, self.job(started.number)
        )
        self.jobs = {trial.number: self.job(trial.number) for trial in self.coordinator.running}

    def kill(self, stops):
        if stops:
            self.saved |= {number: job["step"] for number, job in self.jobs.items() if job["begun"]}
        self.log.close()
        self.start()

    def job(self, number):
        return {
            "begun": False,
            "step": self.saved.get(number, 0),
            "waits": False,
            "returned": False,
        }

    def run(self, kills=0):
        left = kills
        moves = 0
        while self.jobs:
            moves += 1
            assert moves < 100_000, "trials wait for each other for ever"
            number = self.rng.choice(list(self.jobs))
            if left and self.rng.random() < 0.02:
                left -= 1
                self.kill(stops=left % 2 == 0)
                continue
            self.move(number, self.jobs[number])
        self.log.close()
        return self.coordinator

    def move(self, number, job):
        coordinator, step = self.coordinator, job["step"]
        facts = self.log.trials[number].parameters
        if not job["begun"]:
            job["begun"] = coordinator.is_due(number)
            if job["begun"] and not coordinator.may_begin(number, lambda: True):
                del self.jobs[number]
        elif job["waits"]:
            if coordinator._schedule.waits(number):
                return
            job["waits"] = False
            if coordinator._schedule.decided(number, step):
                del self.jobs[number]
            elif self.rng.random() < 0.5:
                self.saved[number] = step
        elif job["returned"]:
            self.saved[number] = step
            coordinator.over(number, step, "finished", digest=f"{step}")
            del self.jobs[number]
        elif step == facts["steps"]:
            job["returned"] = True
            coordinator.trial_ended(number, step, coordinator.last_value(number))
        elif facts["fails"] and step == 7:
            coordinator.over(number, step, "failed", error="the trial failed")
            del self.jobs[number]
        else:
            job["step"] = step = step + 1
            coordinator.advanced(number, step)
            if step % EVERY == 0:
                for nth in range(self.values_per_step):
                    coordinator.value(number, step, nth, float(step * facts["gain"] + nth))
                job["waits"] = coordinator.search.prunes
                if job["waits"]:
                    coordinator.prunes(number, step, lambda: True)  # does not wait


def outcome(coordinator):
    rows = [
        (t.number, t.parameters, t.status, t.step, t.value, t.digest, t.values)
        for t in coordinator.trials
    ]
    return rows, coordinator.search.heard


@pytest.mark.mostly_integration("True-1", "True-2", "False-1", "False-2", "False-4")
@pytest.mark.parametrize("concurrent", [1, 2, 4])
@pytest.mark.parametrize("prunes", [True, False])
def test_order_of_threads_and_kills_change_nothing(tmp_path, concurrent, prunes, caplog):
    found = []
    for seed in range(5):
        machine = Machine(
            random.Random(seed), tmp_path / f"{seed}", lambda _: Adaptive(12, prunes), concurrent
        )
        machine.values_per_step = 2
        found.append(outcome(machine.run(kills=3 * seed)))
    assert all(each == found[0] for each in found)
    statuses = [row[2] for row in found[0][0]]
    assert len(statuses) == 12
    assert "finished" in statuses
    assert ("pruned" in statuses) == prunes
    assert "before a restart" not in caplog.text


def test_more_trials_continue_as_if_from_the_start(tmp_path):
    few = Machine(random.Random(1), tmp_path / "a", lambda _: Adaptive(6), 3)
    few.run()
    more = Machine(random.Random(2), tmp_path / "a", lambda _: Adaptive(12), 3).run()
    whole = Machine(random.Random(3), tmp_path / "b", lambda _: Adaptive(12), 3).run()
    assert outcome(more) == outcome(whole)


def test_search_that_does_not_repeat_continues_with_a_warning(tmp_path, caplog):
    class Moody(Adaptive):
        def __init__(self, fixed):
            super().__init__(6, prunes=False)
            self.fixed = fixed

        def ask(self, number):
            self.heard.append(moods.random())
            return self.fixed.get(number) or super().ask(number)

    moods = random.Random(0)
    machine = Machine(random.Random(1), tmp_path, Moody, 2)
    found = machine.run(kills=2)
    assert len(found.trials) == 6
    assert "not as it would have without the restart: trial 0 had the parameters" in caplog.text
    assert "Give the sampler a seed" in caplog.text


def test_slot_is_filled_when_the_others_have_come_as_far():
    search = Adaptive(3)
    search.ask = lambda number: {} if number < 3 else None
    search.report = lambda *_: False
    schedule = Schedule(search, concurrent=2)
    assert [each.number for each in schedule.begin()] == [0, 1]
    assert schedule.end(0, 4, "finished", 1.0) == []  # trial 1 may still end before step 4
    assert schedule.advance(1, 3) == []
    (started,) = schedule.advance(1, 4)
    assert started == Started(number=2, parameters={}, after=0, time=4)


def test_trial_is_pruned_where_it_reports():
    search = Adaptive(2)
    search.ask = lambda number: {} if number < 2 else None
    search.report = lambda number, *_: number == 1
    schedule = Schedule(search, concurrent=2)
    schedule.begin()
    assert schedule.report(1, 5, 2.0) == []
    assert schedule.waits(1)
    assert schedule.advance(0, 5) == []  # trial 0 has the lower number, and may report at 5
    assert schedule.advance(0, 6) == [Pruned(number=1, step=5, value=2.0, time=5)]
    assert schedule.decided(1, 5)
    assert schedule.running == [0]


def test_list_waits_for_nothing():
    search = Adaptive(3)
    search.ordered = False
    schedule = Schedule(search, concurrent=2)
    schedule.begin()
    (started,) = schedule.end(1, 100, "finished", 0.0)
    assert (started.number, started.after) == (2, 1)


def test_failing_search_ends_the_sweep_not_the_trial():
    search = Adaptive(3, prunes=False)
    coordinator = Coordinator(lambda _: search, TrialLog(None), concurrent=1)
    search.ask = lambda _: 1 / 0
    coordinator.value(0, 5, 0, 1.0)
    coordinator.trial_ended(0, 5, 1.0)
    assert isinstance(coordinator.error, ZeroDivisionError)
    coordinator.over(0, 5, "finished")
    assert coordinator.running == []


def test_a_folder_in_use_names_who_has_it(tmp_path):
    first, second = TrialLog(tmp_path), TrialLog(tmp_path)
    first.open({})
    holder = rf"process {os.getpid()} on host `{os.uname().nodename}` \(started 2[\d: -]+\)"
    with pytest.raises(
        ValueError,
        match=rf"^`{tmp_path}` is in use: {holder} is running a sweep there\. Wait until",
    ):
        second.open({})
    first.close()
    second.open({})
    second.close()
