"""Tests that `.ci/wheel.py` detects incomplete builds, and that installations find no compiler."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from packaging.metadata import Metadata

CI = Path(__file__).parents[3] / ".ci"
PROJECT = {
    "name": "jaxcross",
    "version": "1.2",
    "description": "What it is.",
    "requires-python": ">=3.11,<3.14",
    "license": "Apache-2.0",
    "optional-dependencies": {"all": [], "mpich": []},
}
METADATA = """\
Metadata-Version: 2.4
Name: jaxcross
Version: 1.2
Summary: What it is.
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: Python :: 3.11
Classifier: Programming Language :: Python :: 3.12
Classifier: Programming Language :: Python :: 3.13
Requires-Python: <3.14,>=3.11
Requires-Dist: jax>=0.10
Provides-Extra: all
Provides-Extra: mpich
Description-Content-Type: text/markdown

# jaxcross
"""
FILES = [
    "jaxcross/__init__.py",
    "jaxcross/py.typed",
    "examples/a.py",
    "deploy/slurm/b",
    "tests/test_a.py",
    "LICENSE",
]
WHEEL = dict.fromkeys(
    [
        "jaxcross/__init__.py",
        "jaxcross/py.typed",
        "jaxcross/_examples/a.py",
        "jaxcross/_deploy/slurm/b",
    ]
)


def loaded(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(CI)])
    spec = importlib.util.spec_from_file_location(f"ci_{name}", CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel(monkeypatch):
    return loaded("wheel", monkeypatch)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("Version: 1.2\n", "Version: 1.3\n", "version"),
        ("Provides-Extra: all\n", "", "extras"),
        ("License-File: LICENSE\n", "", "license files"),
        (",>=3.11", ",>=3.10", "Python versions"),
        ("Classifier: Programming Language :: Python :: 3.12\n", "", "classifiers"),
        ("text/markdown", "text/x-rst", "type of README"),
        ("jax>=0.10", "jax @ https://example.org/jax.whl", "an index refuses"),
        ("Summary", "Project-URL: Source, https://example.org\nSummary", "project URLs"),
    ],
)
def test_metadata_are_those_of_the_project(wheel, old, new, fault):
    found = wheel.faults_of_metadata(Metadata.from_email(METADATA.replace(old, new, 1)), PROJECT)
    assert [each.startswith(fault) for each in found] == [True] if fault else found == []


def test_supported_pythons_end_at_those_that_are_tried(wheel):
    project = {**PROJECT, "requires-python": ">=3.11,<3.15"}
    text = METADATA.replace("3.14", "3.15").replace(
        "Requires", "Classifier: Programming Language :: Python :: 3.14\nRequires", 1
    )
    (fault,) = wheel.faults_of_metadata(Metadata.from_email(text), project)
    assert fault.startswith("Python 3.11 and 3.13 are tried")


def test_wheel_has_the_package_and_nothing_else(wheel):
    assert wheel.faults_of_wheel(WHEEL, FILES) == []
    without = {name: crc for name, crc in WHEEL.items() if "_deploy" not in name}
    assert wheel.faults_of_wheel(without, FILES) == ["the wheel lacks jaxcross/_deploy/slurm/b"]
    assert wheel.faults_of_wheel({**WHEEL, "tests/test_a.py": 0}, FILES) == [
        "the wheel has tests/test_a.py"
    ]
    untyped = {name: crc for name, crc in WHEEL.items() if "typed" not in name}
    assert wheel.faults_of_wheel(untyped, [f for f in FILES if "typed" not in f]) == [
        "the wheel lacks jaxcross/py.typed"
    ]


def test_names_have_the_version_of_the_tag(wheel):
    names = "jaxcross-1.2-py3-none-any.whl", "jaxcross-1.2.tar.gz"
    assert wheel.faults_of_names(*names, "v1.2") == []
    assert wheel.faults_of_names(*names, "v1.3") != []
    assert wheel.faults_of_names(names[0], "jaxcross-1.1.tar.gz", "v1.2") != []


@pytest.mark.parametrize(
    ("entries", "released", "right"),
    [
        (["Unreleased"], False, True),
        (["Unreleased"], True, False),
        (["1.2"], True, True),
        (["1.2 (2026-12-01)", "1.1"], False, True),
        (["[1.2]", "[1.1]"], False, True),
        (["Unreleased", "1.1"], False, True),
        (["Unreleased", "1.2"], False, False),  # 1.2 is already released
        (["1.1"], False, False),
        ([], False, False),
    ],
)
def test_changelog_begins_with_the_version(wheel, entries, released, right):
    text = "# Changelog\n" + "".join(f"\n## {entry}\n\nText.\n" for entry in entries)
    assert (wheel.faults_of_changelog(text, "1.2", released=released) == []) == right


def test_no_compiler_is_on_the_path(monkeypatch, tmp_path):
    """A folder without compilers stays on the path. Any other folder is replaced by one with links
    to its other programs.
    """
    installs = loaded("installs", monkeypatch)
    for name in ("a/gcc-12", "a/cc", "a/mpirun", "a/nvcc", "a/git", "b/sort"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("")
        program.chmod(0o755)
    (tmp_path / "a" / "ls").symlink_to(tmp_path / "b" / "sort")
    path = f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/none"
    clean = installs.without_compilers(path, tmp_path / "links")
    links, *rest = clean.split(":")
    assert rest == [f"{tmp_path}/b", f"{tmp_path}/none"]
    assert {file.name for file in Path(links).iterdir()} == {"git", "ls"}
    assert shutil.which("ls", path=clean) and not shutil.which("cc", path=clean)
