"""Tests `jaxcross contention`: its table, its file, and options that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxcross import cli
from jaxcross.commands import contention, launch
from jaxcross.commands.contention_rank import image_side
from jaxcross.interleave.contention import Contention
from jaxcross.plan import MachineContention

ROUND = {"compute_s": 0.1, "exchange_s": 0.5, "compute_beside_s": 0.12, "exchange_beside_s": 0.55}
FASTER = {"compute_s": 0.1, "exchange_s": 0.5, "compute_beside_s": 0.09, "exchange_beside_s": 0.5}


def _found(rounds: list[dict[str, float]]) -> dict[str, Any]:
    facts = {
        "vendor": "mpich",
        "ranks": 2,
        "local_ranks": 1,
        "device": "cpu",
        "megabytes": 25,
        "exchanges": 30,
    }
    return {**facts, "rounds": rounds}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces what the ranks measure by the given rounds. Returns the arguments that the launcher
    received.
    """
    launched: list[Any] = []

    def run(args: Any, variables: Any) -> int:
        launched.append(args)
        Path(args.module[-1]).write_text(json.dumps(_found([ROUND, ROUND, FASTER])))
        return 0

    monkeypatch.setattr(launch, "run", run)
    return launched


def test_the_factors_are_medians(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.json"
    assert cli.main(["contention", str(file), "-n", "2", "--seconds", "5"]) == 0
    assert measured[0].module[:2] == [contention.RANK, "5.0"]
    (point,) = json.loads(file.read_text())
    # Twice half of 25 MiB, in 0.5 s.
    assert point == {
        "mbps": 419.0,
        "compute": 1.2,
        "exchange": 1.1,
    }
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 10 and max(map(len, shown.splitlines()[:-1])) <= 100
    assert "Contention of 2 ranks on 2 hosts, mpich, cpu: 3 rounds, 30 exchanges of 26 MB" in shown
    assert "1.20   0.90 to 1.20 by round" in shown
    assert f"jaxcross plan jobs.toml --contention {file} --mbps 419" in shown


def test_rates_are_kept_alongside_each_other(measured: list[Any], tmp_path: Path) -> None:
    """A new rate is added to the file. A rate that's about the same as a stored one replaces it."""
    file = tmp_path / "c.json"
    before = MachineContention(
        measured=((100.0, Contention(compute=1.01)), (424.0, Contention(compute=2.0)))
    )
    file.write_text(json.dumps(before.to_json()))
    assert cli.main(["contention", str(file)]) == 0
    assert [rate for rate, _ in MachineContention.load(file).measured] == [100.0, 419.0]
    assert cli.main(["contention", str(file), "--mbps", "500"]) == 0
    assert [rate for rate, _ in MachineContention.load(file).measured] == [100.0, 419.0, 500.0]


@pytest.mark.parametrize(
    ("window_s", "least_s", "side"),
    [(3.0, 0.0005, 32), (3.0, 0.011, 32), (0.064, 0.001, 16), (0.025, 0.002, 7), (0.025, 1.0, 4)],
)
def test_a_step_fits_several_times_into_a_window(
    window_s: float, least_s: float, side: int
) -> None:
    """A measurement window has to hold several steps, so images shrink on slow machines.

    The default window is long enough for the largest images even if a step takes 20 times as long
    as on the machine on which we chose it.
    """
    assert image_side(window_s, least_s) == side
    assert side == 4 or 4 * least_s * (side / 4) ** 2 <= window_s


def test_lanes_never_make_each_other_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(args: Any, variables: Any) -> int:
        return Path(args.module[-1]).write_text(json.dumps(_found([FASTER]))) * 0

    monkeypatch.setattr(launch, "run", run)
    assert cli.main(["contention", str(tmp_path / "c.json")]) == 0
    assert MachineContention.load(tmp_path / "c.json").at(1) == Contention()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["c.json", "-n", "1"], "one rank exchanges nothing: `-n` must be at least 2, got 1."),
        (["c.json", "--seconds", "0"], "`--seconds` must be above 0, got 0."),
        (["c.json", "--seconds", "nan"], "`--seconds` must be above 0, got nan."),
        (["c.json", "--mbps", "-1"], "`--mbps` must be above 0, got -1."),
        (["none/c.json"], "`none/c.json` cannot be written: there is no folder `none`."),
        (
            ["wrong.json"],
            "`wrong.json` is not the contention of a machine: contention must be a list of points",
        ),
        (["folder"], "`folder` cannot be read: Is a directory."),
    ],
)
def test_nothing_starts_with_wrong_options(
    measured: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text("{}")
    Path("folder").mkdir()
    assert cli.main(["contention", *words]) == 2
    assert capsys.readouterr().err.startswith(f"jaxcross contention: {message}") and not measured


def test_what_ranks_end_with_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "run", lambda args, variables: 3)
    assert cli.main(["contention", str(tmp_path / "c.json")]) == 3
    assert not (tmp_path / "c.json").exists()
