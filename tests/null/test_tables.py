"""The numbers in the documentation are those of the kept results."""

import os
import subprocess
import sys
from pathlib import Path

TABLES = Path(__file__).parents[2] / "benchmarks" / "tables.py"
BESIDE = {**os.environ, "PYTHONPATH": str(TABLES.parent)}  # for a copy of it elsewhere


def test_the_page_is_what_the_results_say() -> None:
    done = subprocess.run([sys.executable, str(TABLES), "--check"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_whose_result_is_not_kept_yet_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "benchmarks"
    (root / "results").mkdir(parents=True)
    (root / "tables.py").write_text(TABLES.read_text())
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("Before.\n\n<!-- table convergence -->\n| a | b |\n\nAfter.\n")
    subprocess.run([sys.executable, str(root / "tables.py")], check=True, env=BESIDE)
    assert page.read_text() == "Before.\n\n<!-- table convergence -->\n\nAfter.\n"


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    root = tmp_path / "benchmarks"
    root.mkdir()
    (root / "tables.py").write_text(TABLES.read_text())
    (root / "results").symlink_to(TABLES.parent / "results")
    (tmp_path / "docs").mkdir()
    page = (TABLES.parents[1] / "docs" / "benchmarks.md").read_text()
    (tmp_path / "docs" / "benchmarks.md").write_text(page.replace("| mlp | ", "| mlp | 1", 1))
    command = [sys.executable, str(root / "tables.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=BESIDE)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
