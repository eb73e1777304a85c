"""Runs scripts in separate processes, and contains code that several of them use."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import warm_python

RAISED = """
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
"""


def run_to_end(code: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    """Runs a script that prints `end` on its last line, and checks that it got that far."""
    done = subprocess.run(
        [*warm_python.COMMAND, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.stdout.endswith("end\n"), done.stdout + done.stderr
    return done
