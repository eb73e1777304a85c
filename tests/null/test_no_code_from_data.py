"""Tests that `jaxcross` never executes anything it reads from a file.

To guarantee that, the package uses neither pickle or similar formats, nor `eval`, nor NumPy arrays
of Python objects. The rule doesn't cover messages between ranks: mpi4py does pickle them, but they
are only sent between processes of the same program and user.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxcross"
UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    "yaml": {"load", "load_all", "full_load", "unsafe_load", "unsafe_load_all"},
    "torch": {"load"},
}
# A notebook's cells are code that the user has just typed, and reach the ranks through pipes in a
# folder that only this user can read.
EXECUTES = {"notebook/cell_rank.py": {"compile", "eval", "exec"}}
# These are bytes to hash, and are never read back.
WRITES_ONLY = [Path(__file__).parents[1] / "model" / "model_state.py"]


def found_in(source):
    """Yields what a module contains that would execute what it reads, or make objects of it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in UNPICKLERS)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in UNPICKLERS:
                    yield module
                yield from (
                    f"{module}.{a.name}" for a in names if a.name in METHODS.get(module, ())
                )
                yield from (a.name for a in names if module == "builtins" and a.name in BUILTINS)
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS:
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                if name in METHODS.get(owner, ()) or (owner == "builtins" and name in BUILTINS):
                    yield f"{owner}.{name}"
            case ast.Call(keywords=keywords):
                for keyword in keywords:
                    refused = (
                        isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    )
                    if keyword.arg == "allow_pickle" and not refused:
                        yield "allow_pickle"


@pytest.mark.integration
def test_no_module_runs_what_it_reads():
    found = {
        str(path.relative_to(PACKAGE)): set(found_in(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == EXECUTES


@pytest.mark.parametrize("path", WRITES_ONLY)
def test_what_only_writes_never_reads(path):
    assert set(found_in(path.read_text())) == {"marshal"}
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert "dumps" in used and not used & {"load", "loads"}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    import pickle", "pickle"),
        ("import dill.session as d", "dill.session"),
        ("from marshal import loads", "marshal"),
        ("import builtins\nbuiltins.exec(text)", "builtins.exec"),
        ("from builtins import eval", "eval"),
        ("run = eval", "eval"),
        ("exec(compile(text, '', 'exec'))", "compile"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("np.load(path, allow_pickle=trusted)", "allow_pickle"),
        ("yaml.load(text)", "yaml.load"),
        ("from yaml import unsafe_load", "yaml.unsafe_load"),
    ],
)
def test_the_reader_sees_it(source, name):
    assert name in set(found_in(source))


def test_the_reader_passes_what_is_harmless():
    harmless = (
        "re.compile(p)\nlowered.compile()\nnp.load(p, "
        "allow_pickle=False)\njson.load(f)\nyaml.safe_load(f)"
    )
    assert not set(found_in(harmless))
