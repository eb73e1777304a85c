"""Entrants of a race on a stage where nothing runs, and the race between them."""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import race
from race_bounds import Cost
from race_measure import Entrants


def cost(c: float, m: float, tax: float = 0.0) -> Cost:
    return Cost(compute_s=c, exchange_s=m, tax_s=tax)


def entrants(crossed_bytes: int) -> tuple[Entrants, list]:
    """A case on a stage where nothing runs, and where every command moves `crossed_bytes`."""
    commands: list = []
    counter = iter(range(0, 1 << 60, crossed_bytes)) if crossed_bytes else iter(lambda: 0, 1)

    def ask(teams, do, **facts):
        commands.append((do, teams))
        answer = {
            "cpu_s": 1.0,
            "peak_rss_bytes": 100,
            "seconds": 1.0,
            "raw": [float(len(commands)), float(len(commands))],
        }
        return [answer] * (2 * len(teams if do == "run" else [teams]))

    stage = SimpleNamespace(ask=ask, lab=SimpleNamespace(bytes_crossed=lambda: next(counter)))
    stage.end = lambda kind: None
    made = Entrants(stage, "two", True, [])  # type: ignore[arg-type]
    made.teams = {"fused": ["a", "b"], "crossed": ["both"]}  # type: ignore[dict-item]
    return made, commands


def raced(made, rates, result, monkeypatch, *, repeats=2):
    """Runs a case's race. The lab is a stub, so the race only shows which entrants took part."""
    made.case, made.stage.lab.rate = "two", "500mbit"
    made.stage.lab.set_rate, made.stage.lab.measure_rate = (
        (lambda rate: None),
        (lambda seconds: (1.0, 1.0)),
    )
    made.measure = lambda times, tax=True: {}
    made.calibrated = lambda times: None
    monkeypatch.setattr(race, "find_rate", lambda *_: [])
    monkeypatch.setattr(race, "start", lambda entrants, kind: race.missing(kind))
    args = SimpleNamespace(
        apart=made.apart, times=2, steps=4, repeats=repeats, smoke=True, json=None
    )
    race.race(made.stage, made, rates, args, result)
