"""Checks that an installed wheel is complete, outside the clone and with no compiler on the path.

    python .ci/wheel.py quick             # in .ci/run: installs the wheel and trains on two ranks,
                                          in seconds
    python .ci/wheel.py release           # in .ci/more: rehearses a release from a tag
    python .ci/wheel.py tests [ARGUMENTS] # in .ci/more: the quick tests, with the installed wheel;
                                          ARGUMENTS go to pytest

`quick` uses the Python and the package versions of the clone's environment, because uv already has
their wheels in its cache.

`release` tags a temporary clone of the last commit with the version in pyproject.toml and builds
the sdist and the wheel from there. It checks their metadata, their contents, and the top entry of
the changelog. Then it installs the wheel with pip on the oldest supported Python and with uv on the
newest one, and trains in both environments. If the machine lacks one of these Pythons, the last
line says so.

`tests` runs in a copy of the clone without the folder `jaxcross`, so that Python can only import
the installed package. We don't install mpi4jax there, because building it needs a compiler.
Exchanges therefore go over mpi4py, and tests that call mpi4jax are skipped.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from installs import (
    ROOT,
    UV,
    Installed,
    build,
    entered,
    find_python,
    install,
    outside,
    run,
    train,
    versions_here,
    wheel_with,
)
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

OLDEST, NEWEST = "3.11", "3.13"
# Folders of the clone -> where the wheel has their files. The wheel contains nothing else.
IN_THE_WHEEL = {
    "jaxcross/": "jaxcross/",
    "examples/": "jaxcross/_examples/",
    "deploy/": "jaxcross/_deploy/",
}
OF_PYTHON = "Programming Language :: Python :: "
# Tests of the clone itself: they read the package's source from the clone, or its `.ci`.
ABOUT_THE_CLONE = (
    "--ignore=tests/null/ci",
    "--ignore=tests/null/docs",  # whether pages match the source and benchmarks/results
    "--ignore=tests/null/test_mutation.py",  # a tool that modifies the source
    "--ignore=tests/null/test_no_code_from_data.py",
    "--ignore=tests/null/test_structure.py",
    # copies the source into an image
    "--deselect=tests/null/deploy/test_recipes.py::test_image_copies_what_is_there",
)


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def quick(scratch: Path) -> None:
    wheel = build(ROOT, scratch / "dist")
    environ = outside(scratch)
    made = install(
        "uv",
        sys.executable,
        [wheel_with("mpich", wheel)],
        scratch / "env",
        environ,
        *versions_here(scratch),
    )
    report("uv", made)
    train(made.folder, environ)


def report(installer: str, made: Installed) -> None:
    packages = made.packages
    print(
        f"{installer}: {made.seconds:.0f} s, {made.megabytes} MB in {len(packages)} packages, jax "
        f"{packages['jax']}",
        flush=True,
    )


def release(scratch: Path) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tag = f"v{project['version']}"

    step(f"build from the tag {tag}")
    tree = scratch / "clone"
    run("git", "clone", "--quiet", ROOT, tree, cwd=scratch)
    at_head = git(tree, "tag", "--points-at", "HEAD").split()
    if tag not in at_head:
        run(
            "git", "tag", tag, cwd=tree
        )  # fails if another commit has this tag: then raise the version
    run("git", "checkout", "--quiet", tag, cwd=tree)
    wheel = build(tree, scratch / "dist")
    (sdist,) = (scratch / "dist").glob("*.tar.gz")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", scratch / "direct", tree, cwd=scratch)

    step("check metadata, contents and changelog")
    files = git(tree, "ls-files").splitlines()
    direct = scratch / "direct" / wheel.name
    faults = [
        *faults_of_names(wheel.name, sdist.name, tag),
        *faults_of_metadata(metadata_of(wheel), project),
        *faults_of_wheel(contents(wheel), files),
        *(
            []
            if contents(wheel) == contents(direct)
            else ["the sdist builds another wheel than the clone"]
        ),
        *faults_of_changelog(
            (tree / "CHANGELOG.md").read_text(), project["version"], released=tag in at_head
        ),
    ]
    for fault in faults:
        print(f"FAULT: {fault}")
    run(UV, "tool", "run", "--quiet", "twine", "check", "--strict", wheel, sdist, cwd=scratch)
    run(UV, "tool", "run", "--quiet", "check-wheel-contents", wheel, cwd=scratch)

    environ = outside(scratch)
    missing = []
    for installer, version in (("pip", OLDEST), ("uv", NEWEST)):
        step(f"{installer}, Python {version}")
        if python := find_python(version):
            made = install(
                installer, python, [wheel_with("mpich", wheel)], scratch / installer, environ
            )
            report(installer, made)
            run(
                made.folder / "bin" / "jaxcross",
                "doctor",
                cwd=scratch,
                environ=entered(environ, made.folder),
            )
            train(made.folder, environ)
        else:
            missing.append(version)
    if missing:
        print(f"NOT TESTED: Python {' and '.join(missing)}, which this machine doesn't have")
    return int(bool(faults))


def git(tree: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=tree, capture_output=True, text=True, check=True
    ).stdout


def contents(wheel: Path) -> dict[str, int]:
    """Returns the checksum of each file in a wheel, except the files about the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            each.filename: each.CRC
            for each in archive.infolist()
            if ".dist-info/" not in each.filename
        }


def metadata_of(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(archive.read(name), validate=True)
        folder = name.rpartition("/")[0]
        lacking = {f"{folder}/licenses/{file}" for file in found.license_files or ()} - set(
            archive.namelist()
        )
    if lacking:
        raise SystemExit(f"the wheel names {', '.join(lacking)}, but doesn't have it")
    return found


def faults_of_names(wheel: str, sdist: str, tag: str) -> list[str]:
    built = {parse_wheel_filename(wheel)[1], parse_sdist_filename(sdist)[1]}
    return (
        []
        if built == {Version(tag)}
        else [f"the tag is {tag}, but {wheel} and {sdist} were built from it"]
    )


def faults_of_metadata(found: Metadata, project: Mapping[str, Any]) -> list[str]:
    """Returns the faults of a wheel's metadata.

    A fault is anything that differs from pyproject.toml, or that an index would refuse or display
    wrongly.
    """
    says = {
        "name": (found.name, project["name"]),
        "version": (found.version, Version(project["version"])),
        "summary": (found.summary, project["description"]),
        "Python versions": (found.requires_python, SpecifierSet(project["requires-python"])),
        "license": (found.license_expression, project["license"]),
        "license files": (found.license_files, ["LICENSE"]),
        "extras": (sorted(found.provides_extra or ()), sorted(project["optional-dependencies"])),
        "project URLs": (found.project_urls or {}, project.get("urls", {})),
        "type of README": (found.description_content_type, "text/markdown"),
    }
    faults = [
        f"{what}: {has!r}, not {wanted!r}" for what, (has, wanted) in says.items() if has != wanted
    ]
    classified = [
        line.removeprefix(OF_PYTHON)
        for line in found.classifiers or ()
        if line.startswith(OF_PYTHON)
    ]
    admitted = [
        f"3.{n}" for n in range(50) if SpecifierSet(project["requires-python"]).contains(f"3.{n}")
    ]
    if classified != ["3", *admitted]:
        faults.append(
            f"classifiers name Python {', '.join(classified)}, but `requires-python` admits "
            f"{admitted}"
        )
    if [admitted[0], admitted[-1]] != [OLDEST, NEWEST]:
        faults.append(
            f"Python {OLDEST} and {NEWEST} are tried as the oldest and the newest of {admitted}"
        )
    pinned = [str(each) for each in found.requires_dist or () if each.url]
    return [*faults, *(f"an index refuses dependencies with a URL: {each}" for each in pinned)]


def faults_of_wheel(has: Mapping[str, int], files: Sequence[str]) -> list[str]:
    """Returns the clone's files that the wheel lacks, and other files that the wheel contains."""
    places = [
        (file, of, to) for file in files for of, to in IN_THE_WHEEL.items() if file.startswith(of)
    ]
    wanted = {to + file.removeprefix(of) for file, of, to in places} | {"jaxcross/py.typed"}
    lacks, more = sorted(wanted - has.keys()), sorted(has.keys() - wanted)
    return [
        *(f"the wheel lacks {name}" for name in lacks),
        *(f"the wheel has {name}" for name in more),
    ]


def faults_of_changelog(text: str, version: str, *, released: bool) -> list[str]:
    """Returns what is wrong with the changelog's top entry.

    The top entry must be either `Unreleased` or the version in pyproject.toml, and on a commit with
    that version's tag, it must be the version. If an entry further down has the same version or a
    later one, that version has already been released, so the one in pyproject.toml must be raised.
    """
    entries = re.findall(r"^## \[?([^\]\s]+)", text, re.MULTILINE)
    if not entries:
        return ["CHANGELOG.md has no entry"]
    top, *before = entries
    later = [each for each in before if each == "Unreleased" or Version(each) >= Version(version)]
    faults = [f"CHANGELOG.md has an entry {each} below {top}" for each in later]
    if top != version and (top != "Unreleased" or released):
        faults.append(f"CHANGELOG.md begins with {top}, and the version is {version}")
    return faults


def tests(scratch: Path, arguments: Sequence[str]) -> int:
    step("build and install")
    copy = scratch / "copy"
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if not name.startswith("jaxcross/") and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    wheel = build(ROOT, scratch / "dist")
    environ = outside(scratch)
    folder = scratch / "env"
    line = (
        UV,
        "sync",
        "--quiet",
        "--no-install-project",
        "--no-group",
        "mpi",
        "--python",
        sys.executable,
    )
    run(*line, cwd=ROOT, environ={**environ, "UV_PROJECT_ENVIRONMENT": str(folder)})
    line = (
        UV,
        "pip",
        "install",
        "--quiet",
        "--no-config",
        "--python",
        folder,
        *versions_here(scratch),
    )
    run(*line, wheel_with("mpich,all", wheel), cwd=scratch, environ=environ)
    environ = entered(environ, folder)
    run(
        "python",
        "-c",
        "import sys, jaxcross; assert jaxcross.__file__.startswith(sys.prefix)",
        cwd=copy,
        environ=environ,
    )

    step("quick tests")
    line = ["python", "-m", "pytest", *ABOUT_THE_CLONE, *arguments]
    return subprocess.run(line, cwd=copy, env=environ, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("quick", "release", "tests"):
        commands.add_parser(name)
    args, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="jaxcross-wheel-") as folder:
        scratch = Path(folder)
        if args.command == "tests":
            return tests(scratch, arguments)
        if arguments:
            parser.error(f"`{args.command}` takes no further arguments, got {arguments}")
        if args.command == "release":
            return release(scratch)
        quick(scratch)
        return 0


if __name__ == "__main__":
    sys.exit(main())
