"""Tests that the numbers in the documentation are those of the stored results."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import pages.race  # pyright: ignore[reportMissingImports]
import tables as tables_script  # pyright: ignore[reportMissingImports]

from jaxcross.report import Comparison

ROOT = Path(__file__).parents[3]


def tables(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_page_is_what_the_results_say() -> None:
    done = tables("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tutorial_has_the_numbers_of_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "pictures")
    reports = runpy.run_path(str(ROOT / "docs/pictures/crossover.py"))["reports"]
    comparison = Comparison.of(*reports())
    page = (ROOT / "docs/tutorial/first-run.md").read_text()

    def words(line: str) -> list[str]:
        return re.sub("[\u2500-\u257f]", " ", line).split()

    printed = [words(line) for line in str(comparison).splitlines()]
    shown = [words(line) for line in page.splitlines()]
    left_out = (["A", "round", "is"], ["Rates", "of", "a"])  # explained on the page
    rows = [line for line in printed if line and line[:3] not in left_out]
    assert len(rows) == 11
    assert [line for line in rows if line not in shown] == []
    rounds = comparison.second
    assert (
        f"crossover it is {rounds.hidden_share:.0%}." in page
        and f"{comparison.ratio:.2f} times here" in page
    )


def test_table_without_a_stored_result_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("Before.\n\n<!-- table convergence -->\n| a | b |\n\nAfter.\n")
    done = tables("--root", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert page.read_text() == "Before.\n\n<!-- table convergence -->\n\nAfter.\n"


def test_every_kept_result_has_its_place() -> None:
    text = "".join(page.read_text() for page in tables_script.pages_of(ROOT))
    marks = set(tables_script.MARK.findall(text))
    shown = set()

    def read(name: str) -> dict[str, Any]:
        shown.add(name)
        return tables_script.kept_result(ROOT / "benchmarks" / "results" / f"{name}.json")

    for name, argument in marks:
        tables_script.table(read, name, argument)
    elsewhere = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")} - shown
    named = {name for name in elsewhere if f"results/{name}.json" in text}
    assert elsewhere == named, "neither a table shows it nor a page names it"
    kept = json.loads((ROOT / "benchmarks" / "results" / "race.json").read_text())["rows"]
    runs = {
        case: sorted({r["run"] for r in kept if r["case"] == case})
        for case in {r["case"] for r in kept}
    }
    tables = set()
    for case, rate, *nth in (argument.split(":") for name, argument in marks if name == "race"):
        tables |= {
            (case, rate, run) for run in ([runs[case][int(nth[0]) - 1]] if nth else runs[case])
        }
    for argument in ",".join(argument for name, argument in marks if name == "race-verdicts").split(
        ","
    ):
        tables |= {(r["case"], r["rate"], r["run"]) for r in pages.race.raced_alike(read, argument)}
    assert tables >= {(r["case"], r["rate"], r["run"]) for r in kept}


@pytest.mark.integration
def test_a_changed_number_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    page = tmp_path / "benchmarks" / "results" / "benchmarks.md"
    page.write_text(page.read_text().replace("| mlp | ", "| mlp | 1", 1))
    done = tables("--check", "--root", str(tmp_path))
    assert done.returncode == 1 and "benchmarks.md is not what the results say" in done.stdout, (
        done.stderr
    )


def test_exchange_choice_follows_the_measurements() -> None:
    """If a benchmark uses a different name for an exchange than the table does, the table silently
    loses that exchange's figures.
    """

    def read(name: str) -> dict[str, Any]:
        return tables_script.kept_result(ROOT / "benchmarks" / "results" / f"{name}.json")

    _, *rows = tables_script.TABLES["choose"](read, "")
    lacking = {row[0] for row in rows if "-" in (*row[2].split(", "), *row[3].split(", "))}
    later = {
        "`diloco(every=H)`",
        "`streaming_diloco(every=H, bits=b)`",
        "`delayed_mean`",
        "`decoupled_momentum(density)`",
        "`sparse_loco(every=H, density=d)`",
        "`no_loco(every=H)`",
    }
    assert lacking == {"`ParameterServer`", *later}, "of which not both accuracies are measured"


def test_repeat_is_compared_with_fastest_of_its_run() -> None:
    """Only repeats in which all rivals of a kind took part count, from runs with as many steps as
    the latest.
    """

    def row(run: int, rival: str, *seconds: float, c: float = 1.0) -> dict[str, Any]:
        raw = [{"s_per_job_step": s, "c_s": [c, c]} for s in seconds]
        facts = {
            "case": "two",
            "rate": "balanced",
            "efficiency": 0.5 + run / 10,
            "efficiency_with_tax": 0.9,
        }
        return {**facts, "run": run, "rival": rival, "raw": raw}

    everybody = {
        "fused": (4.0, 4.0),
        "fused-k": (3.0, 3.2),
        "gloo": (5.0, 5.0),
        "gloo-k": (3.5, 2.8),
    }
    rows = [row(0, "crossover", 9.0), row(0, "fused", 1.0)]  # fewer steps than the latest run
    rows += [
        row(1, "crossover", 2.0, 2.0),
        *(row(1, name, *seconds) for name, seconds in everybody.items()),
    ]
    rows += [row(1, "ddp", 2.2, 2.0, c=0.5), row(1, "ddp-k", 2.4, 2.4, c=0.5)]
    rows += [row(2, "crossover", 1.0), row(2, "fused", 3.0)]
    found = {"rows": rows, "runs": [{"steps": 4}, {"steps": 8}, {"steps": 8}]}
    _, verdict = pages.race.race_verdicts(lambda _: found, "two")
    # The ratios: 3.0 and 3.2 in the first run (gloo-k's 3.15 is larger), 4.0 to 2.0 twice, and 3.0
    # to 1.0.
    assert verdict == (
        "two",
        "balanced",
        "crossover",
        "3",
        "0.65 (0.60 to 0.70)",
        "0.90",
        "2.00 (2.00 to 3.00)",
        "1.55 (1.50 to 1.60)",
        "1.05 (1.00 to 1.10)",
        "2.10 (2.00 to 2.20)",
    )


def test_who_failed_in_a_later_repeat_is_named() -> None:
    """A rival that failed is named alongside those that never took part, even if only PyTorch
    raced.
    """

    def row(rival: str, repeats: int) -> dict[str, Any]:
        of_jobs = {"c_s": [1.0], "m_s": [2.0], "tax_s": [0.1], "slow_down": [1.2]}
        facts = {
            "case": "two",
            "rate": "balanced",
            "rate_bits_per_s": 1e9,
            "run": 0,
            "raw": [{}] * repeats,
        }
        return {**facts, **of_jobs, "rival": rival}

    def shown_link(*rows: dict[str, Any]) -> tuple[str, ...]:
        link = {"case": "two", "rate": "balanced", "run": 0, "tcp_bits_per_s": [9e8, 9.1e8]}
        found = {
            "rows": rows,
            "runs": [{"repeats": 2}],
            "links": [link],
            "left_out": {"two/gloo": "", "two/ddp": ""},
        }
        _, line = pages.race.race_links(lambda _: found, "two")
        return line

    before = ("balanced", "1000 Mbit/s", "900 Mbit/s", "2.00", "0.10 s", "x 1.20", "2")
    assert shown_link(row("crossover", 2), row("ddp", 1)) == (*before, "gloo, ddp after 1 of 2")
    assert shown_link(row("ddp", 2)) == (*before, "gloo")


def test_wait_free_is_compared_with_uncut_of_its_run() -> None:
    """If `uncut` never ran alongside it, there's nothing to compare. A result that was given as a
    rate comes last.
    """
    facts = {"pieces": 4, "c_s": 2.0, "m_s": 1.0, "first_bucket_s": 1.0, "last_bucket_s": 0.5}
    runs = {  # for each run: what was raced, and how long it took
        ("500mbit", 0): {"uncut": 8.0, "wait-free": 4.0},
        ("compute", 0): {"uncut": 9.0, "wait-free": 9.0},
        ("compute", 1): {"uncut": 2.0, "wait-free": 1.0, "wait-free-bf16": 0.5},
        ("balanced", 2): {"wait-free": 1.0},
    }
    rows = [
        {"case": "one", "rate": rate, "run": run, "rival": name, "s_per_job_step": s}
        for (rate, run), raced in runs.items()
        for name, s in raced.items()
    ]
    links = [{"case": "one", "rate": rate, "run": run, "wait_free": facts} for rate, run in runs]
    _, *lines = pages.race.wait_free(lambda _: {"rows": rows, "links": links}, "")
    assert [(line[0], line[6], line[7], line[8]) for line in lines] == [
        ("compute", "9.00 s", "9.00 s", "1.00"),
        ("compute", "2.00 s", "1.00 s", "0.50"),
        ("500mbit", "8.00 s", "4.00 s", "0.50"),
    ]
    found = pages.race.raced_alike(lambda _: {"rows": rows, "runs": [{"steps": 8}] * 3}, "one")
    assert list(dict.fromkeys(row["rate"] for row in found)) == ["balanced", "compute", "500mbit"]
