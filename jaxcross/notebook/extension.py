"""The extension for IPython, with the magics `%%ranks` and `%ranks_stop`."""

from __future__ import annotations

import ast
import atexit
import sys
import traceback
from typing import Any, NoReturn, final

from jaxcross.commands import crowded
from jaxcross.errors import CellError
from jaxcross.notebook.cell import check_idle, run_cell
from jaxcross.notebook.processes import RankProcesses
from jaxcross.world import xla_pool

_LEAST_MOST = 8
_PER_CORE = 4


def load_ipython_extension(ipython: Any) -> None:
    """Adds the magics `%%ranks` and `%ranks_stop` to a notebook, for `%load_ext jaxcross`.

    A cell that starts with `%%ranks 2` runs on two ranks of this machine. They live on between
    cells, so a cell can use what earlier cells have defined. See docs/howto/notebook.md.

    Args:
        ipython: The `InteractiveShell`, which IPython passes.
    """
    magics = _Magics(ipython)
    ipython.register_magic_function(magics.ranks, "cell", "ranks")
    ipython.register_magic_function(magics.ranks_stop, "line", "ranks_stop")
    atexit.register(magics.stop)


def unload_ipython_extension(ipython: Any) -> None:
    """Ends the ranks and removes the magics, for `%unload_ext jaxcross`.

    Args:
        ipython: The `InteractiveShell`, which IPython passes.
    """
    magics = ipython.magics_manager.magics
    magics["cell"].pop("ranks")
    ours: _Magics = magics["line"].pop("ranks_stop").__self__
    ours.stop()
    atexit.unregister(ours.stop)


@final
class _Magics:
    """The magics of one shell, and its ranks.

    Args:
        shell: The `InteractiveShell`.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._ranks: RankProcesses | None = None

    def ranks(self, line: str, cell: str) -> None:
        """Runs this cell on N local ranks: `%%ranks N`.

        The first such cell starts the ranks, and later ones use the same ranks, so they can use
        whatever the cell's predecessors have defined. The names are those of the ranks, not those
        of the notebook itself. Shows the output of rank 0, the value of the last expression on rank
        0, and whatever the other ranks print that rank 0 doesn't.

        `%ranks_stop` ends the ranks.
        """
        size = self._checked(line)
        # The magic itself is the first line of the cell, as the notebook counts.
        text = f"\n{cell}"
        # The cell's number in the notebook. IPython 9 changed when `execution_count` is increased,
        # but not this.
        name = f"<In[{self._shell.displayhook.prompt_count}]>"
        _check_syntax(text, name)  # before it costs anything
        show = self._shell.display_pub.publish
        try:
            if self._ranks is None:
                self._ranks = _started(size)
            else:
                check_idle(self._ranks, show)
            run_cell(self._ranks, text, name, show)
        finally:
            if self._ranks is not None and self._ranks.ended:
                self._ranks = None

    def ranks_stop(self, line: str) -> None:
        """Ends the ranks that `%%ranks` has started. The names that their cells defined are lost.

        They also end with the kernel.
        """
        if line.strip():
            _refuse(f"`%ranks_stop` has no arguments, got `{line.strip():.60}`.")
        if self._ranks is None:
            print("No ranks are running.")
        self.stop()

    def stop(self) -> None:
        """Ends the ranks if there are any. Waits for up to 5 s."""
        ranks = self._ranks
        self._ranks = None
        if ranks is not None:
            ranks.end(now=False)

    def _checked(self, line: str) -> int:
        """Returns the number of ranks, or raises IPython's error for the wrong use of a magic."""
        text = line.strip()
        most = max(_LEAST_MOST, _PER_CORE * xla_pool.cores())
        if not text.isdecimal() or not 1 <= int(text) <= most:
            _refuse(
                f"`%%ranks` needs the number of ranks to run the cell on, from 1 to {most} on this "
                f"machine, as in `%%ranks 2`; got `{text:.60}`. `%ranks_stop` ends the ranks."
            )
        size = int(text)
        if self._ranks is not None and self._ranks.size != size:
            _refuse(
                f"`%%ranks {size}`: {self._ranks.size} ranks are running, with the names that "
                f"earlier cells defined. Use `%%ranks {self._ranks.size}`, or end these ranks with "
                "`%ranks_stop` first."
            )
        return size


def _check_syntax(text: str, name: str) -> None:
    try:
        ast.parse(text, name)
    except SyntaxError as error:
        failure = CellError(
            "The cell is not valid Python, so it has not run. In a `%%ranks` cell, there are no "
            "magics and no shell commands."
        )
        failure.shown = ["".join(traceback.format_exception_only(error))]
        raise failure from None


def _started(size: int) -> RankProcesses:
    """Starts ranks and waits until they're ready. Warns if they'd better be fewer."""
    text = crowded(size, xla_pool.cores(), option="%%ranks")
    if text:
        print(f"jaxcross: {text}", file=sys.stderr, flush=True)
    return RankProcesses(size)


def _refuse(text: str) -> NoReturn:
    from IPython.core.error import UsageError

    raise UsageError(text)
