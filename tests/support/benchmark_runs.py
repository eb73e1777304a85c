"""Fixtures that run benchmarks at toy size, and skip tests on machines that can't make a lab."""

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
    if (reason := available()) is not None:
        pytest.skip(f"no lab on this machine: {reason}")


@pytest.fixture
def smoke(tmp_path, quick_compiler):
    """Runs a benchmark and returns what it wrote. All runs of a test share the output file."""

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
