"""Which wire a world uses, depending on the argument, the environment and what is installed."""

import re

import pytest

from jaxcross.errors import ExchangeError
from jaxcross.world import wire_choice


def test_the_argument_is_asked_before_the_variable():
    assert wire_choice.chosen("mpi4py", {"JAXCROSS_WIRE": "mpi4jax"}) == "mpi4py"
    assert wire_choice.chosen(None, {"JAXCROSS_WIRE": "mpi4jax"}) == "mpi4jax"
    assert wire_choice.chosen(None, {"JAXCROSS_WIRE": ""}) is wire_choice.chosen(None, {}) is None


@pytest.mark.parametrize(
    ("argument", "environ"), [("nccl", {}), ("", {}), (None, {"JAXCROSS_WIRE": "MPI4PY"})]
)
def test_a_name_of_no_wire_is_refused(argument, environ):
    what = "wire" if argument is not None else "JAXCROSS_WIRE"
    with pytest.raises(ValueError, match=f"^`{what}` must be 'mpi4jax' or 'mpi4py', got "):
        wire_choice.chosen(argument, environ)


def test_mpi4jax_is_the_default_except_on_accelerators_and_where_it_is_missing(monkeypatch):
    pytest.importorskip("mpi4jax")
    assert wire_choice.default(0, {}) == ("mpi4jax", "")
    assert wire_choice.default(1, {"JAX_PLATFORMS": "cpu,"}) == ("mpi4jax", "")
    assert wire_choice.default(1, {})[0] == "mpi4py"
    monkeypatch.setattr(wire_choice.importlib.util, "find_spec", lambda name: None)
    assert wire_choice.default(0, {}) == ("mpi4py", "mpi4jax isn't installed")


def test_different_wires_are_an_error_that_names_the_ranks():
    wire_choice.check_equal(["mpi4py"] * 3)
    missing = "mpi4jax isn't installed"
    text = (
        f"mpi4jax on rank 1; mpi4py on ranks 0, 2 ({missing}). Choose the same one on every rank, "
        "with `initialize("
    )
    with pytest.raises(ExchangeError, match=re.escape(text)):
        wire_choice.check_equal(["mpi4py", "mpi4jax", "mpi4py"], [missing, "", missing])
