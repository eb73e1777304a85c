"""Tests that the folders of the package use one another only through their doors.

A door is a folder's `__init__`. `lint-imports` checks which folder may use which.
"""

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxcross"
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imports_of_folders(folder, source):
    """Yields (folder, what is imported from it, names) for each import of another folder."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(node.module, [alias.name for alias in node.names])]
        else:
            continue
        for module, names in modules:
            package, _, path = module.partition(".")
            other = path.partition(".")[0]
            if package == "jaxcross" and other in FOLDERS and other != folder:
                yield other, module, names


@functools.cache
def imports():
    """Returns the imports between folders of every file in the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0]
        found += [
            (path.relative_to(PACKAGE), *each)
            for each in imports_of_folders(folder, path.read_text())
        ]
    return found


def behind_door(found):
    return [f"{path}: {module}" for path, other, module, _ in found if module.count(".") > 1]


def test_folders_import_only_from_doors():
    assert behind_door(imports()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from jaxcross.wire.bytes import wire_bytes",
        "import jaxcross.wire.bytes",
        "def f():\n    from jaxcross.wire.bytes import wire_bytes",
        "if TYPE_CHECKING:\n    from jaxcross.wire.bytes import wire_bytes",
    ],
)
def test_an_import_from_behind_a_door_is_found(source):
    assert behind_door(("x.py", *each) for each in imports_of_folders("step", source)) == [
        "x.py: jaxcross.wire.bytes"
    ]
    assert not list(imports_of_folders("wire", source))


def test_doors_list_only_what_other_folders_use():
    used = defaultdict(set)
    for _, other, _, names in imports():
        used[other].update(names)
    for folder in FOLDERS:
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text())
        public = {
            name
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)
        }
        listed = {
            alias.name
            for block in tree.body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for line in block.body
            for alias in line.names
        }
        assert listed <= used[folder] | public, folder
