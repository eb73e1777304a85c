"""Tests that `import jaxcross` provides the public names, and starts nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import jaxcross


def fresh(code: str) -> str:
    """Returns the output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_starts_nothing() -> None:
    code = (
        "import jaxcross, sys; print([n for n in ('jax', 'mpi4py', 'mpi4jax', 'flax', 'numpy') if "
        "n in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_import_loads_the_standard_library_only() -> None:
    """This keeps the import at about 15 ms of CPU time. NumPy alone takes ten times as long."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import jaxcross\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))\n"
        "print(sorted(name for name in sys.modules if name.startswith('jaxcross.')))"
    )
    assert fresh(code) == "['jaxcross']\n['jaxcross._lazy']"


def test_the_decisions_of_a_run_need_no_jax() -> None:
    """Interleaver, policies, vote, simulator and twin run without arrays, whatever they import in
    turn.
    """
    code = (
        "import sys\n"
        "from jaxcross.interleave import interleaver, policy, simulator, vote\n"
        "from jaxcross.plan import predict\n"
        "print([n for n in ('jax', 'mpi4py', 'mpi4jax') if n in sys.modules])"
    )
    assert fresh(code) == "[]"


@pytest.mark.integration
def test_public_names_start_neither_mpi_nor_a_device() -> None:
    code = (
        "import jaxcross, sys\n"
        "for name in jaxcross.__all__: getattr(jaxcross, name)\n"
        "import jaxcross._jax_compat as compat\n"
        "print('mpi4py.MPI' in sys.modules, 'mpi4jax' in sys.modules, compat.backends_started())"
    )
    assert fresh(code) == "False False False"


def test_the_command_line_needs_no_jax_for_its_help() -> None:
    code = (
        "import sys\n"
        "from jaxcross.cli import main\n"
        "sys.argv = ['jaxcross', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules and 'mpi4py' not in sys.modules"
    )
    assert "demo" in fresh(code)


@pytest.mark.parametrize("name", jaxcross.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert (getattr(jaxcross, name).__doc__ or "").strip()


def test_completion_offers_the_public_names() -> None:
    assert list(jaxcross.__all__) == sorted(jaxcross.__all__) == dir(jaxcross)
    assert {"JobContext", "Runner", "data", "lab", "plan", "testing"} <= set(jaxcross.__all__)


@pytest.mark.parametrize(
    "name", ["data", "errors", "exchange", "lab", "plan", "report", "tensor", "testing"]
)
def test_completion_in_a_module_offers_its_public_names_only(name: str) -> None:
    module = getattr(jaxcross, name)
    assert dir(module) == sorted(module.__all__)


def test_a_public_name_is_the_object_of_its_module() -> None:
    instrument = importlib.import_module("jaxcross.interleave.instrument")
    assert jaxcross.Instrument is instrument.Instrument
    assert jaxcross.lab is importlib.import_module("jaxcross.lab")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="^module `jaxcross` has no attribute `crossing`"):
        jaxcross.crossing  # noqa: B018
