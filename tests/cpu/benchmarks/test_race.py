"""The race's arithmetic, its models' sizes, and how a rank and its controller speak. The race itself: tests/mpi."""

import contextlib
import importlib.util
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import exchange_cost
import hosts
import memory
import race
import race_bounds
import race_file
import race_show
import workloads
from race_bounds import Cost
from race_measure import Calibration, Entrants
from rivals import cases, jax_work, serving
from rivals.teams import Stage, TeamError, lab_or_exit

SPECS = [cases.RESNET, cases.LANGUAGE, cases.TOY_RESNET, cases.TOY_LANGUAGE]


def cost(c: float, m: float, tax: float = 0.0) -> Cost:
    return Cost(compute_s=c, exchange_s=m, tax_s=tax)


@pytest.mark.parametrize(
    ("jobs", "bound"),
    [
        ([cost(2, 1), cost(2, 1)], 2),  # sum c
        ([cost(1, 2), cost(1, 2)], 2),  # sum m
        ([cost(1, 1), cost(5, 4)], 4.5),  # one job's chain
        ([cost(2, 1)], 3),
    ],
)
def test_bound_is_the_longest_of_three(jobs, bound):
    assert race_bounds.bound_s(jobs) == bound
    assert race_bounds.taxed_bound_s(jobs) == bound


@pytest.mark.parametrize(
    ("job", "first", "last", "best"),
    [(cost(2, 4), 1.0, 0.1, 5.0), (cost(4, 2), 1.0, 0.1, 4.2), (cost(2, 2), 2.0, 1.0, 4.0)],
)
def test_no_cut_of_one_job_beats_its_first_bucket_and_the_wire_or_its_last_one(job, first, last, best):
    assert race_bounds.wait_free_s(job, first, last) == best


def test_a_job_that_overlaps_itself_has_no_chain():
    assert race_bounds.bound_s([cost(2, 1)], chain=False) == 2


def test_tax_is_what_exchanges_take_of_the_computing_core():
    assert race_bounds.taxed_bound_s([cost(2, 1, 0.5), cost(2, 1, 0.25)]) == 2.375
    # network-bound: what is lost fits beside the exchange
    assert race_bounds.taxed_bound_s([cost(1, 4, 0.1), cost(1, 4, 0.1)]) == 4


@pytest.mark.parametrize(("measured", "share"), [(3, 0.0), (2.5, 0.5), (2, 1.0), (1.9, 1.0), (4, 0.0)])
def test_hidden_share(measured, share):
    assert race_bounds.hidden_share([cost(2, 1)], measured) == share


def test_rate_gives_the_wanted_exchange_time():
    # 100 MB at 500 Mbit/s: 1.6 s and a constant of 0.1 s, twice
    jobs, sent = [cost(1.5, 1.7)] * 2, [100e6] * 2
    rate = race_bounds.rate_for(3.0, jobs, sent, 500e6)
    assert 2 * (0.1 + 8 * 100e6 / rate) == pytest.approx(3.0)
    assert race_bounds.rate_for(0.1, jobs, sent, 500e6) == race_bounds.MAX_RATE
    assert race_bounds.rate_for(1e9, jobs, sent, 500e6) == race_bounds.MIN_RATE


@pytest.mark.parametrize(
    ("text", "bits"), [("500mbit", 5e8), ("1.5gbit", 1.5e9), ("10bit", 10), ("2kbps", 16e3), ("8tbit", 8e12)]
)
def test_rates_as_tc_spells_them(text, bits):
    assert race_bounds.bits_a_second(text) == bits


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
def test_parameters_are_those_of_the_jax_models(spec):
    work = jax_work.workload(spec)
    shapes = jax.eval_shape(lambda: work.state(0))[0]
    assert cases.parameters(spec) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
def test_parameters_are_those_of_the_torch_models(spec):
    pytest.importorskip("torch")
    from rivals import torch_models

    model = torch_models.work(spec, seed=0).model
    assert cases.parameters(spec) == sum(p.numel() for p in model.parameters())


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


def entrants(crossed_bytes: int) -> tuple[Entrants, list]:
    """A case on a stage where nothing runs and every command moves so many bytes."""
    told: list = []
    counter = iter(range(0, 1 << 60, crossed_bytes)) if crossed_bytes else iter(lambda: 0, 1)

    def ask(teams, do, **facts):
        told.append((do, teams))
        answer = {"cpu_s": 1.0, "peak_rss_bytes": 100, "seconds": 1.0, "raw": [float(len(told)), float(len(told))]}
        return [answer] * (2 * len(teams if do == "run" else [teams]))

    stage = SimpleNamespace(ask=ask, lab=SimpleNamespace(bytes_crossed=lambda: next(counter)))
    stage.end = lambda kind: None
    made = Entrants(stage, "two", True, [])  # type: ignore[arg-type]
    made.teams = {"fused": ["a", "b"], "crossed": ["both"]}  # type: ignore[dict-item]
    return made, told


@pytest.mark.parametrize(("name", "runs", "peak"), [("fused", [["a"], ["b"]], 100), ("fused-k", [["a", "b"]], 200)])
def test_one_after_the_other_or_at_once(name, runs, peak):
    made, told = entrants(1 << 30)
    row = made.run(cases.RIVALS[name], 4)
    assert [teams for do, teams in told if do == "run"] == runs
    assert row["peak_rss_bytes"] == peak
    assert row["wire_bytes"] == (1 << 30) / 8
    assert row["cpu_s"] == 4 / 8


def test_a_turn_is_timed_between_two_measurements_of_its_own_compute():
    made, told = entrants(1 << 30)
    sample = made.turn(cases.RIVALS["fused"], 4)
    assert [do for do, _ in told] == ["prepare", "prepare", "compute", "run", "run", "compute"]
    assert sample["own_c_s"] == [4.5, 4.5]  # told third and sixth: of 3, 3, 6, 6
    assert sample["c_raw"] == [{"model": "resnet8", "before": [[3.0, 3.0]] * 2, "after": [[6.0, 6.0]] * 2}]


def test_who_runs_the_same_processes_goes_on_and_others_find_them_at_rest():
    made, told = entrants(1 << 30)
    first = made.turn(cases.RIVALS["fused"], 4)
    told.clear()
    second = made.turn(cases.RIVALS["fused-k"], 4)
    assert [do for do, _ in told] == ["run", "compute"]
    assert second["c_raw"][0]["before"] == first["c_raw"][0]["after"]
    told.clear()
    made.turn(cases.RIVALS["crossover"], 4)
    made.turn(cases.RIVALS["crossover-cut"], 4)
    turn = ["prepare", "compute", "run", "compute"]
    assert told[0] == ("rest", ["a", "b"])
    assert [do for do, _ in told] == ["rest", *turn, "rest", *turn]
    told.clear()
    made.rest()
    made.rest()
    assert told == [("rest", ["both"])]


def test_a_rival_that_does_not_use_the_link_is_found_out():
    made, _ = entrants(1000)
    with pytest.raises(TeamError, match="rival `crossover` sent 0.0 MB over the link, its all-reduces need 5.1 MB"):
        made.run(cases.RIVALS["crossover"], 4)


def test_a_row_says_what_was_measured():
    calibration = Calibration(
        compute_s=[9, 9],
        exchange_s={"float32": [1, 1]},
        tax_s={"float32": [0.25, 0.25]},
        beside_s={"float32": [10.8, 9.9]},
        rate_bits_per_s=1e9,
        sent_bytes=[1, 1],
        raw={},
    )
    sample = {"cpu_s": 3.0, "wire_bytes": 8.0, "peak_rss_bytes": 9}
    # each repeat is judged by its own c: the slow machine of the last one is not the rival's fault
    own = {"own_c_s": [7, 8]}
    samples = [{**sample, **own, "s_per_job_step": s, "c_s": [c, c]} for s, c in ((2.4, 2), (2.5, 2), (4, 3.2))]
    facts = {"case": "two", "rate": "compute", "link": "1gbit", "run": 0}
    row = race.row_of(cases.RIVALS["fused-k"], samples, calibration, facts)
    assert row["s_per_job_step"] == 2.5 and row["spread"] == [2.4, 4]
    assert row["c_s"] == [2, 2] and row["own_c_s"] == [7, 8] and row["m_s"] == [1, 1] and row["tax_s"] == [0.25, 0.25]
    assert row["slow_down"] == pytest.approx([1.2, 1.1])
    assert row["bound_s"] == 2 and row["efficiency"] == 0.8
    assert row["bound_with_tax_s"] == 2.25 and row["efficiency_with_tax"] == pytest.approx(2.25 / 2.5)
    assert row["hidden_share"] == 0.5 and "hidden_share_from_trace" not in row
    assert row["over_own_compute"] == 1.25
    traced = [{**s, "hidden_share_from_trace": 0.9, "steady_s_per_job_step": 2.1} for s in samples]
    row = race.row_of(cases.RIVALS["crossover"], traced, calibration, facts)
    assert row["hidden_share"] == 0.5 and row["hidden_share_from_trace"] == 0.9 and row["steady_s_per_job_step"] == 2.1
    assert row["steady_efficiency"] == pytest.approx(2 / 2.1)


def test_costs_are_medians_over_all_repeats():
    def once(c, m, sent):
        taxes = {"tax_float32": [[0.5], [0.5]], "tax_bfloat16": [[0.25], [0.25]], "taxed_c_bfloat16": [[7.5], [7.5]]}
        m_raw = {"m_float32": [[m], [m]], "m_bfloat16": [[m / 2], [m / 2]]}
        return {cases.RESNET: {"c": [[c], [c + 1]], **m_raw, **taxes, "sent_bytes": [sent]}}

    found = Calibration.of(
        [cases.RESNET] * 2, [once(1.0, 5.0, 10.0), once(9.0, 6.0, 20.0), once(2.0, 7.0, 30.0)], "1gbit"
    )
    assert found.rate_bits_per_s == 1e9 and found.ratio == 6.0 / 2.5
    assert found.costs("float32") == [cost(2.5, 6.0, 0.5)] * 2  # of 1, 2, 9 and of 2, 3, 10
    assert found.costs("float32", [7.0, 8.0]) == [cost(7.0, 6.0, 0.5), cost(8.0, 6.0, 0.5)]
    assert found.costs("bfloat16") == [cost(2.5, 3.0, 0.25)] * 2 and found.slow_down("bfloat16") == [3.0, 3.0]
    assert found.sent_bytes == [20.0, 20.0]
    assert found.raw[cases.RESNET]["c"] == [[1.0, 9.0, 2.0], [2.0, 10.0, 3.0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--cases", "five"], "there is no `five`"),
        (["--rivals", "mine"], "there is no `mine`"),
        (["--steps", "3"], "`--steps 3`: fewer than 4"),
        (["--apart", "gloo,crossed"], "there is no `crossed`"),
        (["--rates", "balnced"], "`--rates` takes network, balanced, compute, or a rate of the link: `balnced` is no"),
        (["--json", "nowhere/x.json"], "argument --json: `nowhere/x.json` cannot be written"),
        (["--json", "."], "argument --json: `.` cannot be written"),
        (["--png", "/dev/null/x"], "argument --png: `/dev/null/x` takes no files"),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, line, message):
    monkeypatch.setattr(sys, "argv", ["race.py", *line])
    with pytest.raises(SystemExit):
        race.options()
    assert message in capsys.readouterr().err


def test_a_rate_of_ones_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["race.py", "--rates", "compute,500mbit"])
    assert race.options().rates == ["compute", "500mbit"]


@pytest.mark.parametrize(
    ("parse", "line", "message"),
    [
        (lambda: workloads.parser("").parse_args(), ["--json", "nowhere/x.json"], "argument --json: `nowhere/x.json`"),
        (memory.main, ["--jobs", "1,5"], "argument --jobs: there is no case of `5` jobs; there are 1, 2, 3, 4."),
        (lambda: exchange_cost.options().parse_args(), ["--limits", "none,64K"], "argument --limits: `64K` is neither"),
    ],
)
def test_wrong_arguments_of_others(monkeypatch, capsys, parse, line, message):
    monkeypatch.setattr(sys, "argv", ["it.py", *line])
    monkeypatch.setattr(memory, "measure", lambda *_, **__: pytest.fail("measured before"))
    with pytest.raises(SystemExit):
        parse()
    assert message in capsys.readouterr().err


def test_limits_in_bytes():
    parse = exchange_cost.options().parse_args
    assert parse(["--limits", "none,64k,4m"]).limits == {"none": 0, "64k": 65536, "4m": 4 << 20}
    assert parse([]).limits == parse(["--limits="]).limits == {}


def test_a_rank_does_not_look_where_results_go(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    assert race_file.out_file("nowhere/x.json") == Path("nowhere/x.json")


@pytest.mark.parametrize("write", [race_file.write, lambda path, result: workloads.write_json(path, "why?", result)])
def test_only_the_named_file_is_written(tmp_path, write):
    link, kept, other = tmp_path / "link", tmp_path / "race.two", tmp_path / "race.new"
    kept.write_text("old")
    other.write_text("of somebody else")
    link.symlink_to("race.two")
    write(race_file.out_file(str(link)), {"rows": [1]})
    assert link.is_symlink() and json.loads(kept.read_text())["rows"] == [1]
    assert other.read_text() == "of somebody else" and set(tmp_path.iterdir()) == {link, kept, other}
    there, here = os.pipe()
    write(race_file.out_file(f"/dev/fd/{here}"), {"rows": [2]})
    os.close(here)
    with os.fdopen(there) as stream:
        assert json.load(stream)["rows"] == [2]


@pytest.mark.parametrize(
    "start",
    [
        race.main,
        lambda: hosts.on_hosts("x.py", "500Mbit"),
        lambda: memory.measure(1, "one process", rate="500Mbit", smoke=True, image_size=None),
    ],
)
def test_no_lab_ends_with_its_reason(monkeypatch, start):
    monkeypatch.setattr(sys, "argv", ["race.py", "--smoke"])
    monkeypatch.setattr(hosts, "find_mpirun", lambda: "mpirun")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no lab on this machine: the command `ip` is missing|`500Mbit` is not a rate"):
        start()


def test_an_error_inside_a_lab_stays_one(monkeypatch):
    monkeypatch.setattr("rivals.teams.Lab", lambda **_: contextlib.nullcontext())
    with pytest.raises(OSError, match="of the work"), lab_or_exit():
        raise OSError("of the work")


def test_a_stage_stands_whatever_the_folder_is_called(monkeypatch, tmp_path):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    stage = Stage(SimpleNamespace(), folder)  # type: ignore[arg-type]
    with stage, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(str(stage._path))
    assert not stage._path.parent.exists() and not list(folder.iterdir())


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


def test_rivals_of_one_framework_share_their_c():
    def sample(*seconds):
        return {"c_raw": [{"model": "resnet50", "before": [list(seconds)] * 2, "after": [list(seconds)] * 2}]}

    slow, quick, torch = sample(3.0), sample(1.0, 1.0), sample(7.0)
    race.share_compute((cases.RESNET,) * 2, [("jax", slow), ("torch", torch), ("jax", quick)])
    assert slow["c_s"] == quick["c_s"] == [1.0, 1.0] and torch["c_s"] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("told", "rates", "kept"),
    [
        ([2.0], ["400.0mbit"], 0),
        ([3.0, 2.01], ["400.0mbit", "800.0mbit"], 1),
        ([3.0, 2.2, 1.5], ["400.0mbit", "800.0mbit", "1000.0mbit"], 1),  # the closest, not the last
    ],
)
def test_a_rate_is_looked_for_until_it_fits(told, rates, kept):
    """An exchange of 100 MB takes 2 s at 400 Mbit/s, as predicted, or a second more, which no rate changes."""
    made, _ = entrants(1)
    made.case, made.stage.lab.rate = "one", "800mbit"

    def set_rate(rate):
        made.stage.lab.rate = rate

    made.stage.lab.set_rate = set_rate

    def at(m):
        return Calibration(
            compute_s=[1.0], exchange_s={"float32": [m]}, tax_s={}, beside_s={}, sent_bytes=[100e6], raw={},
            rate_bits_per_s=race_bounds.bits_a_second(made.stage.lab.rate),
        )  # fmt: skip

    answers = iter(told)
    reference = at(1.0)
    made.calibrated = lambda times: at(next(answers))  # type: ignore[method-assign]
    tries = race.find_rate(made, 2.0, reference, 3)
    assert [x["link"] for x in tries] == rates and made.stage.lab.rate == rates[kept]
    assert abs(tries[kept]["ratio"] - 2) < 0.25


def test_bfloat16_is_held_against_bfloat16():
    rows = [
        {"run": 0, "case": "two", "rate": "balanced", "rival": name, "s_per_job_step": s}
        for name, s in (("ddp", 3.0), ("ddp-bf16", 2.0), ("crossover", 1.5), ("crossover-bf16", 1.0))
    ]
    assert [race_show.over_reference(row, rows) for row in rows] == [2, 2, 1, 1]
    assert race_show.over_reference({**rows[0], "run": 1}, rows) is None


def test_a_race_resumes(monkeypatch, tmp_path):
    out = tmp_path / "race.json"
    monkeypatch.setattr(sys, "argv", ["race.py", "--resume", "--json", str(out)])
    new = race.earlier(race.options())
    (run,) = new["runs"]
    assert new["rows"] == [] and "jax" in run["versions"]
    new["rows"] += [{"run": 0, "case": "one", "rate": "balanced", "rival": r.name} for r in cases.rivals_of("one")[1:]]
    race.write(out, new)
    assert not list(tmp_path.glob("*.new"))
    assert race.earlier(race.options()) == {**new, "runs": [run, run]}
    lacking = race.lacking("one", race.options(), new)
    assert [([r.name for r in rivals], rates) for rivals, rates in lacking.items()] == [
        ([r.name for r in cases.rivals_of("one")], ["network", "compute"]),
        (["fused", "wait-free"], ["balanced"]),  # and whom it is held against
    ]  # fmt: skip
    race.write(out, {**new, "runs": [{**run, "steps": 4, "versions": {**run["versions"], "jax": "0"}}]})
    with pytest.raises(SystemExit, match="cannot be resumed: other jax, steps"):
        race.earlier(race.options())
    monkeypatch.setattr(sys, "argv", ["race.py", "--cases", "three", "--resume", "--json", str(out)])
    assert len(race.earlier(race.options())["runs"]) == 2  # another case is not held against those rows


def test_a_rank_answers_until_it_is_told_to_end(tmp_path):
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


def test_kinds_that_stand_apart_make_room_for_each_other(monkeypatch):
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
        "gloo starts", "gloo", "gloo-k", "gloo ends", "ddp starts", "ddp", "crossover",
        # the order turns by one, and back
        "ddp ends", "gloo starts", "gloo", "crossover", "gloo ends", "ddp starts", "ddp",
        "ddp ends", "gloo starts", "gloo-k",
    ]  # fmt: skip
    assert result["left_out"] == {}


def test_who_fails_is_left_out_from_there_on():
    made, _ = entrants(1 << 30)
    made.case, made.rivals = "two", [cases.RIVALS[name] for name in ("ddp", "ddp-k", "fused", "crossover")]
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
    samples, measured = race.alternate(made, "balanced", SimpleNamespace(repeats=2, steps=4, times=3), result)
    assert measured == [{"c": 3}] * 2
    assert {name: len(runs) for name, runs in samples.items()} == {"fused": 2, "crossover": 2}
    assert result["left_out"] == {"two/ddp": "team `ddp/0`: rank 1 ended in `run`"}
    assert ended == ["ddp"]


def raced(made, rates, result, monkeypatch, *, repeats=2):
    """Lets a case race at rates where nothing can be measured but who comes to it."""
    made.case, made.stage.lab.rate = "two", "500mbit"
    made.stage.lab.set_rate, made.stage.lab.measure_rate = (lambda rate: None), (lambda seconds: (1.0, 1.0))
    made.measure = lambda times, tax=True: {}
    made.calibrated = lambda times: None
    monkeypatch.setattr(race, "find_rate", lambda *_: [])
    monkeypatch.setattr(race, "start", lambda entrants, kind: race.missing(kind))
    args = SimpleNamespace(apart=made.apart, times=2, steps=4, repeats=repeats, smoke=True, json=None)
    race.race(made.stage, made, rates, args, result)


@pytest.mark.parametrize("apart", [(), ("ddp",)])
def test_whom_others_are_held_against_races_again_for_somebody_only(monkeypatch, capsys, apart):
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
    assert "two at balanced: nobody came to the end of a repeat" in said
    assert "two at compute: no rival is left that lacks a row" in said
