"""A copy of a checkout with its own environment, in which we mutate files and run tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
INSIDE = HERE / "inside"


class InterruptedRunError(Exception):
    """The command was stopped from outside, so its outcome means nothing."""


class Workspace:
    """A copy, in `folder`, of the files in `tree` that git tracks or would track.

    The package is installed in it, just as in the checkout, because some tests start scripts that
    import the installed package. If the tree has no `pyproject.toml`, the workspace uses the
    interpreter of this process.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree
        self.folder = folder
        self.output = folder.with_suffix(".log")
        # The path must be short, because tests bind Unix sockets below it.
        self.scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
        self._copy()
        installed = (folder / "pyproject.toml").exists()
        if installed:
            self._install()
        self.python = str(folder / ".venv" / "bin" / "python") if installed else sys.executable

    def _copy(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir() and path.name != ".venv":
                shutil.rmtree(path)
            elif path.name != ".venv":
                path.unlink()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(
            listed, cwd=self.tree, check=True, capture_output=True, text=True
        ).stdout
        for name in [*filter(None, names.split("\0")), "uv.lock"]:
            if os.path.lexists(self.tree / name):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.tree / name, self.folder / name, follow_symlinks=False)

    def _install(self) -> None:
        uv = [path] if (path := shutil.which("uv")) else [sys.executable, "-m", "uv"]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        frozen = ["--frozen"] if (self.folder / "uv.lock").exists() else []
        env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        subprocess.run(
            [*uv, "sync", "--quiet", "--python", python, *frozen],
            cwd=self.folder,
            check=True,
            env=env,
        )

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    def write(self, file: str, source: bytes) -> None:
        """Writes a source file and removes its bytecode.

        Otherwise, Python would use stale bytecode if the source still has the same size and was
        written within the same second.
        """
        path = self.folder / file
        path.write_bytes(source)
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink()

    def _environment(self) -> dict[str, str]:
        """Returns the environment of a plain shell, without the variables that `uv run` or pytest
        have set for this process.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        for name in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
            env.pop(name, None)
        path = [str(Path(self.python).parent), *env["PATH"].split(os.pathsep)]
        own = str(Path(sys.executable).parent)
        env["PATH"] = os.pathsep.join(
            each for at, each in enumerate(path) if at == 0 or each != own
        )
        return {**env, "PYTHONPATH": str(INSIDE), "TMPDIR": str(self.scratch)}

    def pytest(
        self, arguments: list[str], hopeless: Callable[[], bool] = lambda: False
    ) -> int | None:
        """Runs pytest, waits for it, and returns its exit code, or `None` if it was stopped because
        `hopeless` returned true.

        Calls `hopeless` twice per second. Leaves neither processes that the tests started nor
        temporary files behind.
        """
        command = [sys.executable, str(HERE / "guard.py"), self.python, "-m", "pytest", *arguments]
        try:
            with (
                self.output.open("w") as output,
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=self._environment(),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                ) as guard,
            ):
                while True:
                    try:
                        code = guard.wait(timeout=0.5)
                    except subprocess.TimeoutExpired:
                        if not hopeless():
                            continue
                        guard.communicate()  # closes its stdin
                        return None
                    if code == 125:
                        raise InterruptedRunError
                    return code
        finally:
            for left in (*self.scratch.iterdir(), self.folder / ".hypothesis"):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(
                    missing_ok=True
                )

    def close(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
