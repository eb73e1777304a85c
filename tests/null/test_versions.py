"""Tests that unsupported JAX versions are refused, and the error for a broken mpi4jax.

That error names the cause and the remedy.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxcross._versions import JAX_BELOW, JAX_FROM, mpi4jax_fault, mpi4jax_remedy, unsupported_jax

ROOT = Path(__file__).parents[2]
REFUSED = (
    "jaxcross needs jax 0.10 to 0.12; this is {}. Install one of these: `pip install "
    "'jax>=0.10,<0.13'`."
)


def test_range_is_that_of_the_package():
    first, below = (".".join(map(str, bound)) for bound in (JAX_FROM, JAX_BELOW))
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"jax>={first},<{below}", f"jaxlib>={first},<{below}"} <= set(needed)


@pytest.mark.parametrize("version", ["0.10.0", "0.10.0rc1", "0.12.0.1", "0.12.3.dev20260101"])
def test_supported_version_is_admitted(version):
    assert unsupported_jax(version) == ""


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0", "0.13.0.dev1", "1.0"])
def test_other_version_is_refused(version):
    assert unsupported_jax(version) == REFUSED.format(version)


def test_import_of_what_needs_jax_names_the_version(tmp_path):
    """The version is checked before we access any private name of JAX."""
    (tmp_path / "jax.py").write_text("__version__ = '0.9.2'")
    line = [sys.executable, "-c", "import jaxcross; jaxcross.initialize()"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == f"ImportError: {REFUSED.format('0.9.2')}"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ("No module named 'mpi4jax'", "mpi4jax is not installed."),
        (
            "the handler's API version (0.5) is incompatible",
            (
                "mpi4jax was built against a newer jaxlib than the installed 0.11.2: "
                "the handler's API version"
            ),
        ),
        ("MPI ABI incompatibility detected!", "mpi4jax cannot be used with this MPI: MPI ABI"),
    ],
)
def test_fault_of_mpi4jax_names_its_cause(error, fault):
    assert mpi4jax_fault(error, "0.11.2").startswith(fault)


def test_remedy_pins_the_installed_jaxlib():
    remedy = mpi4jax_remedy("0.11.2")
    assert 'echo "jaxlib==0.11.2" > build.txt\n' in remedy and "JAXCROSS_WIRE=mpi4py" in remedy
