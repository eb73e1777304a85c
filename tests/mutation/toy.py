"""Tests the tool itself on a package of seven lines and two suites with known verdicts on each
line.

The verdict for a line doesn't depend on which of its mutants is drawn.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

PACKAGE = '''"""Seven lines."""

LIMIT = 3


def limit():
    return_value = LIMIT
    return (return_value)


def quick(flag):
    return not flag


def killed(a, b):
    return a + b


def unasserted(values):
    values.append(None)


def half_tested(a):
    return a < 3


def hangs(steps):
    while steps:
        steps -= 1


def unused():
    return 7
'''

QUICK = '''
import subprocess
import sys

import pytest
from toy import lines


def test_limit():
    assert lines.limit() == 3


def test_quick():
    assert lines.quick(False) is True


def test_unasserted():
    lines.unasserted([])


def test_half_tested():
    lines.half_tested(0)


def test_hangs():
    lines.hangs(3)


CHILD = """
import os, signal
from toy import lines
print(lines.killed(1, 2), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.integration
def test_killed():
    done = subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "3\\n"
'''

OLD = """
from toy import lines


def test_half_tested_is_asserted():
    assert (lines.half_tested(2), lines.half_tested(3)) == (True, False)
"""

# Maps each function to the verdicts of both suites. The empty name stands for the constant `LIMIT`,
# which is outside of any function.
EXPECTED = {
    "": ("killed", None),
    "limit": ("killed", None),
    "quick": ("killed", None),
    "killed": ("killed", None),
    "unasserted": ("survived", "survived"),
    "half_tested": ("survived", "killed"),
    "hangs": ("hung", None),
    "unused": ("uncovered", "uncovered"),
}


def write(folder: Path, *, old: bool) -> Path:
    """Writes the package and one of the suites as a checkout."""
    files = {
        "toy/__init__.py": "",
        "toy/lines.py": PACKAGE,
        "tests/test_quick.py": QUICK,
        "pytest.ini": (
            "[pytest]\nmarkers =\n    integration: slow\n    exhaustive: slower\npythonpath = .\n"
        ),
        **({"tests/test_old.py": OLD} if old else {}),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    return folder


def smoke(main: Callable[[Sequence[str]], int]) -> int:
    """Compares the two suites with the tool, and returns 0 if every verdict is as expected."""
    with tempfile.TemporaryDirectory(prefix="toy-") as name:
        folder = Path(name)
        out = ["--out", str(folder / "out")]
        for suite in ("new", "old"):
            tree = write(folder / suite, old=suite == "old")
            main(
                [
                    *out,
                    "coverage",
                    "--suite",
                    suite,
                    "--tree",
                    str(tree),
                    "--sources",
                    "toy",
                    "--workers",
                    "2",
                ]
            )
            only = ["--survivors-of", "new"] if suite == "old" else []
            main([*out, "run", "--suite", suite, "--grace", "8", *only])
        failed = main([*out, "show"])
        results = [
            json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()
        ]
        mutants = json.loads((folder / "out" / "mutants.json").read_text())["mutants"]
    functions = {each["key"]: each["function"] for each in mutants}
    found = {(functions[each["mutant"]], each["suite"]): each["verdict"] for each in results}
    expected = {
        (function, suite): verdict
        for function, verdicts in EXPECTED.items()
        for suite, verdict in zip(("new", "old"), verdicts, strict=True)
        if verdict
    }
    wrong = {
        place: (found.get(place), verdict)
        for place, verdict in expected.items()
        if found.get(place) != verdict
    }
    print(
        f"unexpected verdicts, each with the expected one: {wrong}"
        if wrong
        else "all verdicts are as expected"
    )
    return int(bool(wrong) or found.keys() != expected.keys() or failed != 1)
