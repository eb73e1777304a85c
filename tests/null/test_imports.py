"""Imports point one way. Lazy ones inside functions count, too; those for type checkers only do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxcross"

# Who must not know what. The longest matching prefix of a module's name decides.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "jaxcross": ("mpi4py", "mpi4jax"),
    "jaxcross.errors": ("jax", "jaxcross", "mpi4py", "mpi4jax"),
    "jaxcross._jax_compat": ("jaxcross", "mpi4py", "mpi4jax"),
    "jaxcross.program": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.wire",
        "jaxcross.report",
        "jaxcross.data", "mpi4py", "mpi4jax",
    ),
    "jaxcross.exchange": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.wire",
        "jaxcross.report",
        "jaxcross.data", "jaxcross.program", "mpi4py", "mpi4jax",
    ),
    "jaxcross.exchange.auto": (  # counts what would travel
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.report",
        "jaxcross.data", "mpi4py", "mpi4jax",
    ),
    "jaxcross.tensor": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.wire", "jaxcross.report",
        "jaxcross.data", "jaxcross.program", "mpi4py", "mpi4jax",
    ),
    "jaxcross.data": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.wire",
        "jaxcross.report",
        "jaxcross.program", "mpi4py", "mpi4jax",
    ),
    "jaxcross.checkpoint": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.wire",
        "jaxcross.report", "jaxcross.data", "jaxcross.program", "mpi4py", "mpi4jax",
    ),
    "jaxcross.report": (
        "jax", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.world", "jaxcross.wire",
        "jaxcross.data", "jaxcross.program", "mpi4py", "mpi4jax",
    ),
    "jaxcross.world": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.report", "jaxcross.data",
    ),
    "jaxcross.server": (
        "jaxcross.jobs.runner", "jaxcross.step.crossover", "jaxcross.report", "jaxcross.data", "jaxcross.wire", "jaxcross.exchange",
        "mpi4py", "mpi4jax",
    ),
    "jaxcross.server.clocks": ("jax", "numpy", "jaxcross", "mpi4py", "mpi4jax"),
    "jaxcross.wire": (
        "jaxcross.runtime", "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.report", "jaxcross.data",
    ),
    "jaxcross.runtime": (
        "jaxcross.jobs.runner", "jaxcross.server", "jaxcross.step.crossover", "jaxcross.report", "jaxcross.data", "mpi4py", "mpi4jax",
    ),
    "jaxcross.commands.doctor": (),
    "jaxcross.commands.launch": (),
}  # fmt: skip
for _pure in (
    "agreed", "compute_order", "events", "interleaver", "invariants", "joining", "link", "local", "messages",
    "model_case", "model_check", "model_rank", "model_spec", "model_state", "outline", "policy", "simulator", "voice",
    "vote",
):  # fmt: skip
    FORBIDDEN[f"jaxcross.runtime.{_pure}"] = (
        *FORBIDDEN["jaxcross.runtime"],
        "jax",
        "jaxcross.program",
        "jaxcross.world",
    )

# `report` may hear events, and nothing else of the runtime.
ALLOWED: dict[str, tuple[str, ...]] = {"jaxcross.report": ("jaxcross.interleave.instrument",)}
FORBIDDEN["jaxcross.report"] += ("jaxcross.runtime",)


def modules() -> list[str]:
    paths = (path.relative_to(PACKAGE.parent).with_suffix("") for path in sorted(PACKAGE.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported; `from a import b` counts as `a.b`."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value
        pending += ast.iter_child_nodes(node)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def rule(table: dict[str, tuple[str, ...]], module: str) -> tuple[str, ...]:
    return table[max((name for name in table if within(module, name)), key=len, default="")] if table else ()


def wrong(module: str, source: str) -> list[str]:
    forbidden = rule(FORBIDDEN, module)
    allowed = next((names for layer, names in ALLOWED.items() if within(module, layer)), ())
    return [
        f"{module}, line {line}: imports `{name}`"
        for line, name in imports(source)
        if any(within(name, f) for f in forbidden) and not any(within(name, a) for a in allowed)
    ]


def source_of(module: str) -> str:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.mark.parametrize("module", modules())
def test_every_arrow_points_the_right_way(module: str) -> None:
    assert not wrong(module, source_of(module))


@pytest.mark.parametrize("module", modules())
def test_private_jax_names_live_in_one_file(module: str) -> None:
    if module != "jaxcross._jax_compat":
        private = [f"line {n}: {name}" for n, name in imports(source_of(module)) if within(name, "jax._src")]
        assert not private, f"{module} imports private names of JAX; move them to jaxcross/_jax_compat.py: {private}"


@pytest.mark.parametrize("module", modules())
def test_orbax_is_known_to_one_file(module: str) -> None:
    names = [name for _, name in imports(source_of(module)) if within(name, "orbax")]
    assert not names or module == "jaxcross.checkpoint.arrays"


@pytest.mark.parametrize("module", modules())
def test_mpi_is_imported_inside_functions_only(module: str) -> None:
    tree = ast.parse(source_of(module))
    top = [
        ast.Module(body=[s], type_ignores=[]) for s in tree.body if not isinstance(s, ast.FunctionDef | ast.ClassDef)
    ]
    names = [name for part in top for _, name in imports(ast.unparse(part))]
    assert not [name for name in names if within(name, "mpi4py") or within(name, "mpi4jax")]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jaxcross.program.cut", "def f():\n    import mpi4py.MPI"),
        ("jaxcross.program.cut", "from jaxcross import wire"),
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
    assert len(wrong(module, source)) == 1


def test_the_reader_lets_right_ones_pass() -> None:
    assert not wrong("jaxcross.report.table", "from jaxcross.interleave.instrument import Span")
    assert not wrong("jaxcross.jobs.context", "import jax\nfrom jaxcross.program.compile import Compiled")
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxcross.wire import MpiWire"
    assert not wrong("jaxcross.program.cut", source)
