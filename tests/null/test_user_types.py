"""Tests that type checkers see the types of the public API.

A step keeps its function's parameters and result, and the programs in `user_programs/` have no
errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxcross

PACKAGE = Path(jaxcross.__file__).parent
PROGRAMS = sorted(Path(__file__).with_name("user_programs").glob("*.py"))
# A comment gives the type that its line reveals. `...` stands for brackets that the two checkers
# print differently.
SOURCE = """
import jaxcross

def plain(weights: dict[str, int], lr: float) -> dict[str, int]:
    return weights

direct = jaxcross.crossover(plain, axes="batch")
reveal_type(direct)  # Step[...weights: dict[str, int], lr: float..., dict[str, int]]
reveal_type(direct({}, lr=0.1))  # dict[str, int]
direct({}, "fast")  # error

@jaxcross.crossover(axes="batch", donate_argnums=0)
def decorated(count: int, *, scale: float = 1.0) -> tuple[int, str]:
    return count, ""

reveal_type(decorated)  # Step[...count: int, *, scale: float =..., tuple[int, str]]
reveal_type(decorated(1))  # tuple[int, str]
decorated("1")  # error
decorated(1, size=2)  # error

class Trainer:
    @jaxcross.crossover(axes="batch")
    def step(self, batch: bytes) -> float:
        return 0.0

reveal_type(Trainer().step(b""))  # float
Trainer().step("")  # error
Trainer().step()  # error

jaxcross.crossover(plain)  # error
jaxcross.crosover  # error
reveal_type(jaxcross.Runner())  # Runner
reveal_type(jaxcross.current_world())  # World
jaxcross.run([], progres=False)  # error
"""

MYPY_SETTINGS = """
[mypy]
ignore_missing_imports = True
check_untyped_defs = True
# Only the package's own types are looked at: those of JAX are large, and Optuna brings a database
# along.
[mypy-jax.*,jaxlib.*,flax.*,optax.*,numpy.*,ml_dtypes.*,orbax.*,grain.*,matplotlib.*,PIL.*,rich.*,mpi4py.*,mpi4jax.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-cv2.*,optuna.*,sqlalchemy.*,packaging.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


def pyright(folder: Path) -> str:
    (folder / "pyrightconfig.json").write_text("{}")
    return run("pyright", "--pythonpath", sys.executable, "--project", str(folder), folder=folder)


def mypy(folder: Path) -> str:
    (folder / "mypy.ini").write_text(MYPY_SETTINGS)
    return run(
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        os.devnull,
        *(path.name for path in sorted(folder.glob("*.py"))),
        folder=folder,
    )


def run(tool: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", tool, *arguments]
    environment = {**os.environ, "NO_COLOR": "1"}
    found = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode in (0, 1), found.stdout + found.stderr  # 1 means that there are errors
    return found.stdout


@pytest.mark.integration
@pytest.mark.parametrize("checker", [pyright, mypy])
def test_checker_sees_the_types_of_steps(checker: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SOURCE)
    printed = checker(tmp_path)
    wrong = {int(number) for number in re.findall(r"user\.py:(\d+).* error: ", printed)}
    expected = {
        n: line.partition("  # ")[2]
        for n, line in enumerate(SOURCE.splitlines(), 1)
        if "  # " in line
    }
    assert wrong == {n for n, expectation in expected.items() if expectation == "error"}, printed
    for number, expectation in expected.items():
        if expectation != "error":
            type_ = ".*".join(map(re.escape, expectation.split("...")))
            assert re.search(rf'user\.py:{number}\b.* is "(jaxcross[\w.]*\.)?{type_}"', printed), (
                expectation,
                printed,
            )


@pytest.mark.integration
@pytest.mark.parametrize("checker", [pyright, mypy])
def test_programs_of_users_have_no_type_errors(
    checker: Callable[[Path], str], tmp_path: Path
) -> None:
    assert len(PROGRAMS) == 10
    for path in PROGRAMS:
        shutil.copy(path, tmp_path)
    wrong = tmp_path / "wrong.py"  # proves that the programs are checked
    wrong.write_text("import jaxcross\njaxcross.run(1)\n")
    printed = checker(tmp_path)
    names = "|".join(path.name for path in (*PROGRAMS, wrong))
    found = re.findall(rf"^.*?({names}):\d+.* error: .*", printed, flags=re.MULTILINE)
    assert found == ["wrong.py"], printed


def test_wheel_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
