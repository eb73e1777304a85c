"""How a race runs: model sizes, turns, rivals left out, and a rank's replies.

The real race is tested in tests/mpi.
"""

import importlib.util
import json
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import race
import race_bounds
from race_measure import Calibration
from rivals import cases, jax_work, serving
from rivals.teams import TeamError

from tests.support.race_entrants import entrants, raced

SPECS = [cases.RESNET, cases.LANGUAGE, cases.TOY_RESNET, cases.TOY_LANGUAGE]


@pytest.mark.mostly_integration("resnet8", "transformer1")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
def test_parameters_are_those_of_the_jax_models(spec):
    work = jax_work.workload(spec)
    shapes = jax.eval_shape(lambda: work.state(0))[0]
    assert cases.parameters(spec) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_parameters_are_those_of_the_torch_models():
    """A single test, since importing PyTorch takes 4 s.

    Skips the optimizers, which would import PyTorch's compiler.
    """
    pytest.importorskip("torch")
    from rivals import torch_models

    for spec in SPECS:
        assert cases.parameters(spec) == sum(
            p.numel() for p in torch_models.module(spec).parameters()
        ), spec


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", SPECS[2:], ids=lambda spec: spec.model)
def test_quick_states_train(spec):
    work = jax_work.workload(spec)
    state, batch = jax_work.state_of(work, 0), jax_work.batch_of(work, 0, 0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), jax.eval_shape(lambda: work.state(0))
    )
    step = jax.jit(work.make(lambda tree: tree))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]


def test_each_case_has_its_rivals():
    assert {"sequential", "crossover", "ddp-k"} <= {r.name for r in cases.rivals_of("two")}
    alone = {r.name for r in cases.rivals_of("one")}
    assert {"uncut", "wait-free", "ddp"} <= alone
    assert not {"crossover", "fused-k"} & alone
    assert [r.name for r in cases.rivals_of("two", {"fused"})] == ["fused"]


@pytest.mark.parametrize(
    ("name", "runs", "peak"), [("fused", [["a"], ["b"]], 100), ("fused-k", [["a", "b"]], 200)]
)
def test_one_after_the_other_or_at_once(name, runs, peak):
    made, commands = entrants(1 << 30)
    row = made.run(cases.RIVALS[name], 4)
    assert [teams for do, teams in commands if do == "run"] == runs
    assert row["peak_rss_bytes"] == peak
    assert row["wire_bytes"] == (1 << 30) / 8
    assert row["cpu_s"] == 4 / 8


def test_turn_is_timed_between_compute_measurements():
    made, commands = entrants(1 << 30)
    sample = made.turn(cases.RIVALS["fused"], 4)
    assert [do for do, _ in commands] == ["prepare", "prepare", "compute", "run", "run", "compute"]
    assert sample["own_c_s"] == [4.5, 4.5]  # reported third and sixth: of 3, 3, 6, 6
    assert sample["c_raw"] == [
        {"model": "resnet8", "before": [[3.0, 3.0]] * 2, "after": [[6.0, 6.0]] * 2}
    ]


def test_same_processes_continue_and_others_rest():
    """Rivals that share processes continue with them; for the others, those processes are idle."""
    made, commands = entrants(1 << 30)
    first = made.turn(cases.RIVALS["fused"], 4)
    commands.clear()
    second = made.turn(cases.RIVALS["fused-k"], 4)
    assert [do for do, _ in commands] == ["run", "compute"]
    assert second["c_raw"][0]["before"] == first["c_raw"][0]["after"]
    commands.clear()
    made.turn(cases.RIVALS["crossover"], 4)
    made.turn(cases.RIVALS["crossover-cut"], 4)
    turn = ["prepare", "compute", "run", "compute"]
    assert commands[0] == ("rest", ["a", "b"])
    assert [do for do, _ in commands] == ["rest", *turn, "rest", *turn]
    commands.clear()
    made.rest()
    made.rest()
    assert commands == [("rest", ["both"])]


def test_rival_that_does_not_use_the_link_is_detected():
    made, _ = entrants(1000)
    with pytest.raises(
        TeamError, match="rival `crossover` sent 0.0 MB over the link, its all-reduces need 5.1 MB"
    ):
        made.run(cases.RIVALS["crossover"], 4)


def test_a_table_is_shown_before_its_rows_are_written(monkeypatch):
    made, _ = entrants(1 << 30)
    made.rivals, done = [cases.RIVALS["crossover"]], []
    monkeypatch.setattr(race, "alternate", lambda *_: ({"crossover": [{}]}, []))
    monkeypatch.setattr(race, "Calibration", SimpleNamespace(of=lambda *_: SimpleNamespace(raw={})))
    monkeypatch.setattr(race, "row_of", lambda rival, *_: {"rival": rival.name})
    monkeypatch.setattr(race, "show", lambda *_: done.append("shown"))
    monkeypatch.setattr(race, "write", lambda *_: done.append("written"))
    raced(made, ["balanced"], {"left_out": {}, "rows": [], "links": [], "runs": [{}]}, monkeypatch)
    assert done == ["shown", "written"]


@pytest.mark.parametrize(
    ("ratios", "rates", "kept"),
    [
        ([2.0], ["400.0mbit"], 0),
        ([3.0, 2.01], ["400.0mbit", "800.0mbit"], 1),
        ([3.0, 2.2, 1.5], ["400.0mbit", "800.0mbit", "1000.0mbit"], 1),  # the closest, not the last
    ],
)
def test_a_rate_is_looked_for_until_it_fits(ratios, rates, kept):
    """A 100 MB exchange takes 2 s at 400 Mbit/s as predicted, or a second more at any rate."""
    made, _ = entrants(1)
    made.case, made.stage.lab.rate = "one", "800mbit"

    def set_rate(rate):
        made.stage.lab.rate = rate

    made.stage.lab.set_rate = set_rate

    def at(m):
        return Calibration(
            compute_s=[1.0],
            exchange_s={"float32": [m]},
            tax_s={},
            beside_s={},
            sent_bytes=[100e6],
            raw={},
            rate_bits_per_s=race_bounds.bits_a_second(made.stage.lab.rate),
        )

    answers = iter(ratios)
    reference = at(1.0)
    made.calibrated = lambda times: at(next(answers))  # type: ignore[method-assign]
    tries = race.find_rate(made, 2.0, reference, 3)
    assert [x["link"] for x in tries] == rates and made.stage.lab.rate == rates[kept]
    assert abs(tries[kept]["ratio"] - 2) < 0.25


@pytest.mark.integration
def test_rank_answers_until_the_connection_closes(tmp_path):
    path = str(tmp_path / "s")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    args = SimpleNamespace(socket=path, team="t")
    rank = threading.Thread(target=serving.serve, args=(args, 1, {"twice": lambda n: {"n": 2 * n}}))
    rank.start()
    connection, _ = server.accept()
    with server, connection, connection.makefile("rw") as stream:
        assert json.loads(stream.readline())["rank"] == 1

        def ask(**command):
            stream.write(json.dumps(command) + "\n")
            stream.flush()
            return json.loads(stream.readline())

        answer = ask(do="twice", n=4)
        assert answer["n"] == 8 and answer["seconds"] >= 0 and answer["peak_rss_bytes"] > 1e6
        assert ask(do="rest")["idle_rss_bytes"] > 1e6
        assert "KeyError" in ask(do="thrice")["error"]
    rank.join(10)
    assert not rank.is_alive()


def test_torch_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    made, _ = entrants(1)
    assert race.start(made, "ddp") == "PyTorch is not installed"


def test_separate_kinds_make_room_for_each_other(monkeypatch):
    """Teams that can't run at the same time are stopped to make room for each other."""
    made, _ = entrants(1 << 30)
    made.case, made.apart = "two", ("gloo", "ddp")
    made.rivals = [cases.RIVALS[name] for name in ("gloo", "gloo-k", "ddp", "crossover")]
    made.stage.lab.rate = "1gbit"
    happened: list = []
    made.stage.end = lambda kind: happened.append(f"{kind} ends")

    def starts(entrants, kind):
        happened.append(f"{kind} starts")
        entrants.teams[kind] = [kind]

    monkeypatch.setattr(race, "start", starts)
    made.measure = lambda times: {}  # type: ignore[method-assign, assignment, return-value]
    raw = {"before": [[1.0]] * 2, "after": [[1.0]] * 2}

    def turn(rival, steps):
        happened.append(rival.name)
        assert rival.team in made.teams and not {"gloo", "ddp"} <= set(made.teams)
        return {"s_per_job_step": 1.0, "c_raw": [raw]}

    made.turn = turn  # type: ignore[method-assign]
    result: dict = {"left_out": {"two/gloo": "it failed in an earlier run"}}
    race.alternate(made, "balanced", SimpleNamespace(repeats=2, steps=4, times=3), result)
    assert happened == [
        "gloo starts",
        "gloo",
        "gloo-k",
        "gloo ends",
        "ddp starts",
        "ddp",
        "crossover",
        # the order rotates by one, and then back
        "ddp ends",
        "gloo starts",
        "gloo",
        "crossover",
        "gloo ends",
        "ddp starts",
        "ddp",
        "ddp ends",
        "gloo starts",
        "gloo-k",
    ]
    assert result["left_out"] == {}


def test_who_fails_is_left_out_from_there_on():
    made, _ = entrants(1 << 30)
    made.case, made.rivals = (
        "two",
        [cases.RIVALS[name] for name in ("ddp", "ddp-k", "fused", "crossover")],
    )
    made.teams["ddp"] = ["c", "d"]  # type: ignore[list-item]
    ended: list = []
    made.stage.lab.rate, made.stage.end = "1gbit", ended.append
    run = made.run
    made.measure = lambda times: {"c": times}  # type: ignore[method-assign, assignment, return-value]

    def fails(rival, steps):
        if rival.team == "ddp":
            raise TeamError("team `ddp/0`: rank 1 ended in `run`")
        return {**run(rival, steps), "c_raw": [{"before": [[1.0]] * 2, "after": [[1.0]] * 2}]}

    made.turn = fails  # type: ignore[method-assign]
    result: dict = {"left_out": {}}
    samples, measured = race.alternate(
        made, "balanced", SimpleNamespace(repeats=2, steps=4, times=3), result
    )
    assert measured == [{"c": 3}] * 2
    assert {name: len(runs) for name, runs in samples.items()} == {"fused": 2, "crossover": 2}
    assert result["left_out"] == {"two/ddp": "team `ddp/0`: rank 1 ended in `run`"}
    assert ended == ["ddp"]


@pytest.mark.parametrize("apart", [(), ("ddp",)])
def test_baselines_race_again_only_if_a_rival_needs_it(monkeypatch, capsys, apart):
    made, _ = entrants(1 << 30)
    made.rivals, made.apart = [cases.RIVALS[name] for name in ("ddp", "ddp-k", "crossover")], apart
    made.turn = lambda rival, steps: pytest.fail("nobody is to race")  # type: ignore[method-assign]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows = [{"case": "two", "rate": "balanced", "rival": "crossover"}]
    result: dict = {"left_out": {}, "rows": list(rows), "links": [], "runs": []}
    raced(made, ["balanced"], result, monkeypatch)
    assert result["rows"] == rows and result["left_out"] == {"two/ddp": "PyTorch is not installed"}
    assert "two at balanced: no rival is left that lacks a row" in capsys.readouterr().out


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_race_whose_rivals_all_fail_says_so(monkeypatch, capsys, repeats):
    made, _ = entrants(1 << 30)
    made.rivals, made.teams["ddp"] = [cases.RIVALS["ddp"]], ["c", "d"]  # type: ignore[list-item]

    def fails(rival, steps):
        raise TeamError("team `ddp/0`: rank 1 ended in `run`")

    made.turn = fails  # type: ignore[method-assign]
    result: dict = {"left_out": {}, "rows": [], "links": [], "runs": []}
    raced(made, ["balanced", "compute"], result, monkeypatch, repeats=repeats)
    assert result["rows"] == result["links"] == []
    said = capsys.readouterr().out
    assert "two at balanced: no rival finished a repeat" in said
    assert "two at compute: no rival is left that lacks a row" in said
