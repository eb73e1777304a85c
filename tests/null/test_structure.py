"""Tests that classes are either abstract or final, and that modules hold no state."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxcross"

# Per-process state that no object of the package could own.
STATE = {
    ("world/start.py", "_CURRENT"),  # the current world
    ("_link.py", "_EMULATED"),  # the links of all open `with` blocks
    ("_tracing.py", "_CURRENT"),  # per context, and only while a step is being traced
}
# Calls that create mutable state. An empty container at the top level of a module counts as mutable
# state as well, because its only purpose can be that something is added to it later.
CHANGING = (
    "ContextVar",
    "local",
    "Lock",
    "RLock",
    "Event",
    "deque",
    "defaultdict",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "SingleFlightCache",
)


@functools.cache
def trees():
    """Returns the package's syntax trees. Only parsed on use, because every worker collects this
    file.
    """
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def module_state():
    for path, tree in trees().items():
        for node in tree.body:
            target = (
                node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            )
            value = getattr(node, "value", None)
            empty = isinstance(value, ast.List | ast.Dict | ast.Set) and not ast.unparse(
                value
            ).strip("[]{}")
            called = (
                isinstance(value, ast.Call)
                and ast.unparse(value.func).split(".")[-1].split("[")[0] in CHANGING
            )
            if target is not None and (empty or called):
                yield str(path), ast.unparse(target)


def is_concrete(method):
    """Whether a method does something: it isn't abstract, nor just a docstring or an error."""
    if any("abstract" in ast.unparse(decorator) for decorator in method.decorator_list):
        return False
    return not all(
        isinstance(node, ast.Raise | ast.Pass)
        or isinstance(getattr(node, "value", None), ast.Constant)
        for node in method.body
    )


def methods(node):
    return {
        each.name: each
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.integration
def test_no_module_holds_state_but_what_is_named_here():
    assert set(module_state()) == STATE


def test_no_class_overrides_concrete_code():
    every = [
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    found = {
        f"{node.name}.{method}"
        for node in every
        for base in (ast.unparse(each).split("[")[0].split(".")[-1] for each in node.bases)
        for parent in every  # more than one class may have the name of the base
        if parent.name == base and parent is not node
        for method in methods(node).keys() & methods(parent).keys() - {"__init__"}
        if is_concrete(methods(parent)[method])
    }
    assert not found
