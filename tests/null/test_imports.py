"""Imports point one way: one rule a folder. Lazy imports inside functions and those for type checkers count, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxcross"
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")}

# Folder -> the folders of the package that it must not know. The longest matching prefix of a module's name decides.
FORBIDDEN: dict[str, set[str]] = {
    "errors": FOLDERS,
    "_jax_compat": FOLDERS,
    "_pytree": FOLDERS,
    "_tracing": FOLDERS,
    "_arguments": FOLDERS,
    "_files": FOLDERS,
    "lab": FOLDERS - {"lab", "commands"},
    "step": {"report", "checkpoint"},
    "program": FOLDERS - {"program"},
    "wire": {"runtime", "world", "jobs", "step", "checkpoint", "report", "server", "data"},
    "jobs": {"step", "sweeps"},
    "sweeps": FOLDERS - {"sweeps", "jobs", "checkpoint", "report", "world"},
    "runtime": {"jobs", "report", "step", "server", "data"},
    "interleave": FOLDERS - {"interleave"},
    "world": {"checkpoint", "exchange", "runtime", "jobs", "step", "report", "server", "data"},
    "health": FOLDERS - {"health"},
    "checkpoint": {"runtime", "jobs", "server", "step", "wire", "report", "data", "program"},
    "exchange": {"program", "wire", "world", "runtime", "jobs", "server", "step", "report", "data", "plan"},
    "plan": {"world", "runtime", "jobs", "server", "step", "health", "checkpoint", "data", "lab", "commands"},
    "tensor": {"runtime", "jobs", "step", "world", "wire", "report", "data", "program"},
    "data": {"runtime", "jobs", "server", "step", "world", "wire", "report", "program"},
    "report": FOLDERS - {"report", "interleave"},
    "server": {"jobs.runner", "jobs.plain_loop", "step", "report", "data", "wire"},
    "server.clocks": FOLDERS,
}
MPI = ("mpi4py", "mpi4jax")
KNOW_MPI = {"wire", "world", "health", "lab", "commands.doctor", "commands.launch"}
NO_JAX = {
    "errors",
    "interleave",
    "plan.contention",
    "plan.difference",
    "plan.groups",
    "plan.jobs_file",
    "plan.make",
    "plan.memory",
    "plan.plan",
    "plan.rates",
    "plan.table",
    "plan.profile",
    "plan.twin",
    "report",
    "server.clocks",
}


def modules() -> list[str]:
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


@cache
def imports(source: str) -> tuple[tuple[int, str], ...]:
    """Line and full name of everything that is imported; `from a import b` counts as `a.b`."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called, name = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0]
            if called == "import_module" and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def forbidden(module: str) -> list[str]:
    """The names that a module of the package must not import, and what is below them."""
    place = module.removeprefix("jaxcross").removeprefix(".")
    rule = max((name for name in FORBIDDEN if within(place, name)), key=len, default="")
    names = [f"jaxcross.{folder}" for folder in FORBIDDEN.get(rule, ())]
    names += [] if any(within(place, name) for name in KNOW_MPI) else MPI
    return names + (["jax"] if any(within(place, name) for name in NO_JAX) else [])


def wrong(module: str, source: str) -> list[str]:
    names = forbidden(module)
    return [
        f"{module}, line {line}: imports `{name}`"
        for line, name in imports(source)
        if any(within(name, f) for f in names)
    ]


def source_of(module: str) -> str:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


SOURCES = {module: source_of(module) for module in modules()}


def importing(package: str, sources: dict[str, str]) -> list[str]:
    """The lines that import something of `package`, as `module, line: name`."""
    return [
        f"{module}, line {line}: {name}"
        for module, source in sources.items()
        for line, name in imports(source)
        if within(name, package)
    ]


def at_import(source: str) -> str:
    """What runs when a module is imported: all but its functions and classes."""
    body = [node for node in ast.parse(source).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return "\n".join(ast.unparse(node) for node in body)


def test_every_arrow_points_the_right_way() -> None:
    assert [line for module, source in SOURCES.items() for line in wrong(module, source)] == []


def test_private_jax_names_live_in_one_folder() -> None:
    others = {module: text for module, text in SOURCES.items() if not within(module, "jaxcross._jax_compat")}
    assert importing("jax._src", others) == [], "move these to jaxcross/_jax_compat"
    assert importing("jax._src", SOURCES), "the reader sees them where they are"


def test_orbax_is_known_to_one_file() -> None:
    assert {line.split(",")[0] for line in importing("orbax", SOURCES)} == {"jaxcross.checkpoint.arrays"}


def test_mpi_is_imported_inside_functions_only() -> None:
    tops = {module: at_import(source) for module, source in SOURCES.items()}
    assert importing("mpi4py", tops) + importing("mpi4jax", tops) == []
    assert importing("mpi4py", SOURCES), "the reader sees them where they are"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxcross.program.cut", "def f():\n    import mpi4py.MPI"),
        ("jaxcross.program.cut", "from jaxcross import wire"),
        ("jaxcross.program.cut", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxcross import wire"),
        ("jaxcross.interleave.policy", "import jax.numpy as jnp"),
        ("jaxcross.interleave.vote", "from jaxcross.program.compile import Compiled"),
        ("jaxcross.report.table", "from jaxcross.runtime.driver import Driver"),
        ("jaxcross.report.table", "from importlib import import_module\nimport_module('jaxcross.jobs.runner')"),
        ("jaxcross.world.world", "from jaxcross.jobs.runner import Runner"),
        ("jaxcross.server.lane", "from mpi4py import MPI"),
        ("jaxcross.server.clocks", "from jaxcross.server.lane import Lane"),
        ("jaxcross.checkpoint.checkpointer", "from jaxcross.jobs.context import JobContext"),
    ],
)
def test_the_reader_sees_wrong_arrows(module: str, source: str) -> None:
    assert wrong(module, source)


def test_the_reader_lets_right_ones_pass() -> None:
    assert not wrong("jaxcross.report.table", "from jaxcross.interleave.instrument import Span")
    assert not wrong("jaxcross.jobs.context", "import jax\nfrom jaxcross.program.compile import Compiled")
    assert not wrong("jaxcross.wire.lower", "from jaxcross.program.ir import Program")
