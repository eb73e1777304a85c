"""Tests the mutation testing tool: a file's mutants, its probes, and that no process is left
behind.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import find, sample, with_probes
from tests.mutation.show import column

MUTATION = Path(__file__).parents[1] / "mutation"


def texts(source: str) -> set[str]:
    """Returns the changed line of each of a source's mutants."""
    found = find(source.encode(), "package/file.py").values()
    return {each.difference(source.encode())[1] for each in found}


@pytest.mark.parametrize(
    ("line", "mutated"),
    [
        ("x = a < b", {"x = (a <= b)", "x = (a >= b)"}),
        ("x = a is b", {"x = (a is not b)"}),
        ("x = a in b", {"x = (a not in b)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = (a + b) * c", {"x = ((a - b)) * c"}),
        ("x = 5", {"x = 6", "x = 4"}),
        ("x = 0", {"x = 1", "x = (-1)"}),
        ("x = True", {"x = False"}),
        ("x = not a", {"x = (a)"}),
        ("x += a", {"x -= a", "pass"}),
        ("f(a)", {"pass"}),
        ("while a: break", {"while a: continue"}),
        ("if a: b", {"if True: b", "if False: b"}),
        ("x = b if a else c", {"x = b if True else c", "x = b if False else c"}),
        ("def f(x: int = 1) -> int: return x", {
            "def f(x: int = 2) -> int: return x", "def f(x: int = 0) -> int: return x",
            "def f(x: int = 1) -> int: return None",
        }),
    ],
)  # fmt: skip
def test_each_operator_changes_one_node(line, mutated):
    assert texts(line) == mutated


@pytest.mark.parametrize(
    "line",
    [
        '"""A docstring."""',
        "x: Literal[1]",
        "def f(): return None",
        "__all__ = [1]",
        "@dataclass(frozen=True)\nclass A: pass",
        "if TYPE_CHECKING: x = 1",
        "raise ValueError(1 + 1)",
        "error = ValueError(1 + 1)",
        "_log.warning(1 + 1)",
        "assert a < b, 1",
        'x = f"{a + b}"',
        "match a:\n    case 1: b",
    ],
)
def test_texts_types_and_checks_are_not_mutated(line):
    assert texts(line) == set()


def test_all_other_lines_keep_their_numbers():
    source = b"def f(a):\n    g(a,\n      1)\n    return (a\n            + 1)\n"
    for mutant in find(source, "package/file.py").values():
        changed = mutant.applied(source)
        assert ast.parse(changed)
        assert changed.count(b"\n") == source.count(b"\n")


def test_a_mutant_is_the_same_after_changes_elsewhere(tmp_path):
    """So we can compare the results of two checkouts, and a sample stays almost the same."""
    function = "def f(a):\n    return a + 1\n"
    before = find(function.encode(), "package/file.py")
    after = find(f"import os\n\n\n{function}".encode(), "package/file.py")
    assert before.keys() == after.keys()
    assert not before.keys() & find(function.replace("1", "2").encode(), "package/file.py").keys()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "file.py").write_text(function)
    drawn = sample(tmp_path, before.values(), 1, seed=0)
    assert drawn == sample(tmp_path, reversed(before.values()), 1, seed=0)


def test_probes_see_what_is_evaluated_and_keep_values():
    source = b'''"""A module."""
from __future__ import annotations
def f(a, b=2):
    if a < b and (a or
                  b): return a
    elif not a:
        a += 1
    for x in range(3):
        if x: break
    return [y for y in range(a) if y > 1]
'''
    mutants = find(source, "package/file.py").values()
    probed = with_probes(source, "package/file.py", mutants, functions=True)
    assert probed.count(b"\n") == source.count(b"\n")
    places: list[str] = []
    new, old = ({}, {})
    exec(
        probed.decode().replace("from package._mutation_probe import hit as _mutation_hit", "pass"),
        new,
    )
    exec(source.decode(), old)
    new["_mutation_hit"] = places.append
    for arguments, lines in {
        (1,): {3, 4, 5},
        (5,): {3, 4, 6, 8, 9, 10},
        (0, 0): {3, 4, 6, 7, 8, 9, 10},
    }.items():
        places.clear()
        assert new["f"](*arguments) == old["f"](*arguments)
        assert "entry package/file.py" in places
        assert {each.line for each in mutants if each.key in places} == lines


@pytest.mark.parametrize(
    ("new", "old", "named"),
    [
        ("killed", None, "quick"),
        ("hung", None, "hung"),
        ("survived", "killed", "old only"),
        ("limited", "hung", "old only"),
        ("uncovered", "survived", "survive both"),
        ("survived", None, "open"),
        ("survived", "absent", "absent"),
        ("absent", "killed", "open"),
        (None, None, "open"),
    ],
)
def test_a_mutant_is_in_one_column(new, old, named):
    assert (
        column(*(verdict and {"verdict": verdict, "stage": 0} for verdict in (new, old))) == named
    )


def test_guard_leaves_no_process():
    """The grandchild has its own session, and keeps stdout open for as long as it lives."""
    grandchild = "import threading; print('started', flush=True); threading.Event().wait()"
    started = (
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True).wait()"
    )
    child = f"import subprocess, sys; {started}"
    line = [sys.executable, str(MUTATION / "guard.py"), sys.executable, "-c", child]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout.readline() == "started\n"
        guard.stdin.close()
        assert guard.stdout.read() == ""  # end of file: no process has it open
    assert guard.returncode == 125


@pytest.mark.integration
def test_the_tool_finds_what_a_toy_suite_misses():
    line = [sys.executable, str(MUTATION / "mutate.py"), "--smoke"]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all verdicts are as expected" in done.stdout
