"""Steps that are a `jax.shard_map`, over MPI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python
from tests.support.shard_map_table import ROWS, cases

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parents[3]
QUICK = ("inserted",)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(ROWS), marks=pytest.mark.exhaustive)], ids=["few", "all"]
)
def test_rows_equal_devices(
    mpirun: Any, quick_compiler: dict[str, str], names: tuple[str, ...]
) -> None:
    environ = quick_compiler
    done = mpirun(4, "shard_map_ranks.py", *names, timeout=900, env=environ).check()
    assert done.stdout.count(f"{len(cases(names))} hold") == 4, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_the_example_on_ranks_equals_devices(
    mpirun: Any, quick_compiler: dict[str, str], tmp_path: Path, ranks: int
) -> None:
    """The example itself compares its parameters with those of real devices, within 2e-5."""
    script, environ = (
        ROOT / "examples" / "shard_map_mlp.py",
        {"PYTHONPATH": str(ROOT), **quick_compiler},
    )
    line = [
        *warm_python.COMMAND,
        str(script),
        "--devices",
        str(ranks),
        "--save",
        str(tmp_path / "devices.npz"),
    ]
    subprocess.run(line, check=True, timeout=900, env={**os.environ, **environ})
    options = ("--compare", str(tmp_path / "devices.npz"))
    done = mpirun(ranks, str(script), *options, timeout=900, env=environ).check()
    assert done.stdout.count("apart") == 1
    assert "compiled again" not in done.stderr, "a step's results have the types of its arguments"
