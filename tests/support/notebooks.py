"""A notebook: an IPython shell in this process, whose cells a test runs one after the other."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from jaxcross.commands import find_mpirun


@dataclass(frozen=True)
class Ran:
    """What a cell has left: its error, its output, and the data that was displayed."""

    error: BaseException | None
    out: str
    err: str
    displayed: list[dict[str, Any]]

    def check(self) -> Ran:
        assert self.error is None, f"{self.error!r}\n{self.out}\n{self.err}"
        return self


class Notebook:
    """An IPython shell with the extension."""

    def __init__(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        self.shell = InteractiveShell(config=config)
        self.shell.display_pub.publish = self._publish  # type: ignore[method-assign]
        self._displayed: list[dict[str, Any]] = []
        self.run("%load_ext jaxcross").check()

    def _publish(self, data: dict[str, Any], metadata: Any = None, **_: Any) -> None:
        self._displayed.append(data)

    def run(self, cell: str) -> Ran:
        self._displayed = []
        out = io.StringIO()
        err = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            result = self.shell.run_cell(cell, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        return Ran(error, out.getvalue(), err.getvalue(), self._displayed)

    def on_ranks(self, code: str, ranks: int = 2) -> Ran:
        return self.run(f"%%ranks {ranks}\n{code}")


@contextlib.contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, folder: Any):
    """Yields a notebook. At the end, its ranks are ended as well."""
    if find_mpirun() is None:
        pytest.skip("no mpirun")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell replaces it
    monkeypatch.setattr(sys, "displayhook", sys.displayhook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a kernel
    try:
        notebook = Notebook()
        yield notebook
        notebook.run("%unload_ext jaxcross").check()
    finally:
        signal.signal(signal.SIGINT, before)
