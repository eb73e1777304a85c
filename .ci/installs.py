"""Installs the wheel outside the clone, with no compiler on the path, and trains there.

`build` makes the sdist, and the wheel from that sdist. `.ci/wheel.py` checks that installation and
training work, and `benchmarks/installations.py` measures how long they take.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = os.environ.get("UV", "uv")  # `uv run` sets it, even if uv itself isn't on the path
COMPILERS = ("*gcc*", "*g++*", "c++*", "cc", "*clang*", "nvcc*", "mpi*")
# Variables that a user's shell doesn't have, but a run started by uv or pytest does.
OF_THIS_RUN = ("PYTHON", "VIRTUAL_ENV", "JAX", "XLA_", "MPIR_", "OMPI_")
# `promise`, which tensorflow-datasets needs, is pure Python but has no wheel. pip and uv can build
# it without a compiler.
WHEELS_ONLY = ("--only-binary", ":all:", "--no-binary", "promise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment, and how long it took to create."""

    folder: Path
    seconds: float

    @property
    def megabytes(self) -> int:
        return round(sum(file.lstat().st_size for file in self.folder.rglob("*")) / 1e6)

    @property
    def packages(self) -> dict[str, str]:
        """Returns the version of each package, except those of the installer itself."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        found = {each.name: each.version for each in distributions(path=[str(packages)])}
        return {
            name: version for name, version in found.items() if name not in ("pip", "setuptools")
        }


def run(*line: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> None:
    subprocess.run(line, cwd=cwd, env=environ, check=True)


def build(tree: Path, out: Path) -> Path:
    """Builds the sdist of a checkout and the wheel from that sdist. Returns the wheel."""
    run(UV, "build", "--quiet", "--out-dir", out, cwd=tree)
    (wheel,) = out.glob("*.whl")
    return wheel


def without_compilers(path: str, scratch: Path) -> str:
    """Returns a search path with all programs on `path` except compilers and those of an MPI.

    A folder that contains a compiler is replaced by a new folder in `scratch`, which has links to
    the other programs.
    """
    found = []
    for name in path.split(os.pathsep):
        folder = Path(name or ".").absolute()
        files = (
            [file for file in folder.iterdir() if not file.is_dir()]
            if os.access(folder, os.R_OK | os.X_OK)
            else []
        )
        others = [
            file for file in files if not any(fnmatch(file.name, pattern) for pattern in COMPILERS)
        ]
        if len(others) < len(files):
            folder = scratch / f"path-{len(found)}"
            folder.mkdir(parents=True)
            for file in others:
                (folder / file.name).symlink_to(file)
        found.append(str(folder))
    return os.pathsep.join(found)


def outside(scratch: Path, *, compilers: bool = False) -> dict[str, str]:
    """Returns the environment variables of a user's shell.

    They don't point to the clone's environment and, unless you ask for them, exclude compilers.
    """
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RUN)
    }
    own = os.path.join(os.environ.get("VIRTUAL_ENV", "/nowhere"), "bin")
    path = os.pathsep.join(
        name for name in environ["PATH"].split(os.pathsep) if name.rstrip("/") != own
    )
    if compilers:
        return {**environ, "PATH": path}
    path = without_compilers(path, scratch)
    left = [
        name
        for name in ("gcc", "cc", "g++", "c++", "clang", "nvcc", "mpicc", "mpirun")
        if shutil.which(name, path=path)
    ]
    if left:
        raise SystemExit(f"{', '.join(left)} is still on the path {path}")
    return {**environ, "PATH": path}


def entered(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns the variables after `source folder/bin/activate`."""
    return {
        **environ,
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{folder / 'bin'}{os.pathsep}{environ['PATH']}",
    }


def find_python(version: str) -> str | None:
    """Returns a Python of a version such as "3.12" that can create environments, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    name = f"python{version}"
    for candidate in (shutil.which(name), *pyenv.glob(f"versions/{version}.*/bin/{name}")):
        line = [str(candidate), "-c", "import ensurepip"]
        if candidate and subprocess.run(line, capture_output=True, check=False).returncode == 0:
            return str(candidate)
    return None


def versions_here(scratch: Path) -> tuple[str, ...]:
    """Returns the options that pin an installation to the versions in the clone's environment."""
    file = scratch / "versions.txt"
    found = sorted({(each.name, each.version) for each in distributions()})
    file.write_text(
        "".join(f"{name}=={version}\n" for name, version in found if name != "jaxcross")
    )
    return ("--constraint", str(file))


def install(
    installer: str,
    python: str,
    wanted: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    *options: str,
) -> Installed:
    """Creates an environment and installs `wanted` with a single pip or uv command.

    Only `promise` is built from source.
    """
    start = time.perf_counter()
    if installer == "pip":
        run(python, "-m", "venv", folder, cwd=folder.parent, environ=environ)
        line = [folder / "bin" / "pip", "install", "--disable-pip-version-check"]
    else:
        run(
            UV,
            "venv",
            "--quiet",
            "--no-project",
            "--python",
            python,
            folder,
            cwd=folder.parent,
            environ=environ,
        )
        line = [UV, "pip", "install", "--no-config", "--python", folder]
    run(*line, "--quiet", *WHEELS_ONLY, *options, *wanted, cwd=folder.parent, environ=environ)
    return Installed(folder=folder, seconds=time.perf_counter() - start)


def wheel_with(extras: str, wheel: Path) -> str:
    return f"jaxcross[{extras}] @ file://{wheel}"


def train(folder: Path, environ: Mapping[str, str]) -> None:
    """Trains on two ranks in an environment, with the `mpirun` installed in it.

    Raises:
        subprocess.CalledProcessError: A rank failed, or both ranks trained without exchanging.
    """
    # If we're root, e.g. in a container, Open MPI refuses to start unless these are set.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    script = shutil.copy(Path(__file__).with_name("train.py"), folder)
    run(
        folder / "bin" / "mpirun",
        "-n",
        "2",
        "python",
        script,
        cwd=folder,
        environ={**entered(environ, folder), **root},
    )
