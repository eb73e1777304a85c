"""The numbers in the documentation are those of the kept results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import tables as tables_script

ROOT = Path(__file__).parents[2]


def tables(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_page_is_what_the_results_say() -> None:
    done = tables("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_whose_result_is_not_kept_yet_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("Before.\n\n<!-- table convergence -->\n| a | b |\n\nAfter.\n")
    done = tables("--root", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert page.read_text() == "Before.\n\n<!-- table convergence -->\n\nAfter.\n"


def test_every_kept_result_has_its_place() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    marks = set(tables_script.MARK.findall(pages))
    shown = set()

    def read(name: str) -> dict[str, Any]:
        shown.add(name)
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    for name, argument in marks:
        tables_script.table(read, name, argument)
    elsewhere = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")} - shown
    named = {name for name in elsewhere if f"results/{name}.json" in pages}
    assert elsewhere == named, "neither a table shows it nor a page names it"
    kept = json.loads((ROOT / "benchmarks" / "results" / "race.json").read_text())["rows"]
    runs = {case: sorted({r["run"] for r in kept if r["case"] == case}) for case in {r["case"] for r in kept}}
    tables = set()
    for case, rate, *nth in (argument.split(":") for name, argument in marks if name == "race"):
        tables |= {(case, rate, run) for run in ([runs[case][int(nth[0]) - 1]] if nth else runs[case])}
    assert tables >= {(r["case"], r["rate"], r["run"]) for r in kept}


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    (tmp_path / "docs" / "benchmarks.md").write_text(page.replace("| mlp | ", "| mlp | 1", 1))
    done = tables("--check", "--root", str(tmp_path))
    assert done.returncode == 1 and "benchmarks.md is not what the results say" in done.stdout, done.stderr


def test_the_choice_of_an_exchange_is_by_what_was_measured() -> None:
    """Where a benchmark calls an exchange otherwise than the table, its figures are gone and nothing fails."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    _, *rows = tables_script.TABLES["choose"](read, "")
    lacking = {row[0] for row in rows if "-" in (*row[2].split(", "), *row[3].split(", "))}
    assert lacking == {"`ParameterServer`"}, "of which no accuracy is measured"
