"""Runs benchmarks at toy size for tests, and skips tests where no lab can be made."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from jaxcross.lab import available
from tests.support import warm_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def lab():
    """Skips the test on a machine that cannot make a lab."""
    if (reason := available()) is not None:
        pytest.skip(f"no lab on this machine: {reason}")


@pytest.fixture
def smoke(tmp_path, quick_compiler):
    """Runs a benchmark, and returns what it wrote; a later run finds that file."""

    def run(name: str, *options: str) -> dict:
        out = tmp_path / "out.json"
        line = [
            *warm_python.COMMAND,
            str(BENCHMARKS / name),
            "--smoke",
            "--json",
            str(out),
            *options,
        ]
        subprocess.run(line, check=True, timeout=900, env={**os.environ, **quick_compiler})
        return json.loads(out.read_text())

    return run
