"""Executes a notebook's cells on a rank: `python -m jaxcross.notebook.cell_rank FOLDER`.

The main thread waits for cells and executes them, since signal handlers, JAX and most libraries
expect to be in the main thread. Meanwhile, another thread reads the kernel's messages, so the
kernel can interrupt or end a rank that's busy or waiting for other ranks.

Between cells, the main thread waits for a queue, outside of MPI, whose waits would poll.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import linecache
import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, final

from jaxcross.health import Terminated, traceback_text
from jaxcross.world import read_rank

_EXIT_S = 5.0
_NUDGES_S = (0.05, 0.1, 0.2, 0.4)
_NO_EFFECT = signal.SIGURG


def main() -> None:
    """Serves the kernel whose folder is named on the command line, until it closes its pipe."""
    folder = Path(sys.argv[1])
    rank = read_rank(os.environ)
    if rank is None:
        raise SystemExit("`mpirun` does not tell its ranks their numbers, so no cell can run here.")
    for stream, own in (("out", sys.stdout), ("err", sys.stderr)):
        number = os.open(folder / f"{rank}.{stream}", os.O_WRONLY)
        os.dup2(number, own.fileno())  # also for C code, and for subprocesses
        os.close(number)
        own.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    signal.signal(_NO_EFFECT, lambda *_: None)  # an ignored signal would wake up nobody
    kernel = _Kernel(folder, rank)
    kernel.send({"ready": os.getpid()})
    namespace = _main_module()
    builtins.__dict__["display"] = kernel.display  # where IPython has it, too
    while (message := kernel.next_cell()) is not None:
        try:
            kernel.begin()
            error = executed(message, namespace, kernel.show)
            kernel.finish(error)
        except Terminated:
            return
        except KeyboardInterrupt as late:  # neither in the cell nor in its error
            kernel.finish(_report(late))


def _main_module() -> dict[str, Any]:
    """Creates the module in which cells are executed, and returns its namespace.

    The module is `__main__`, as in any notebook, so that objects defined in a cell can be pickled.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    # The mark of a prompt, for `initialize`: a failed cell doesn't end the ranks.
    sys.ps1 = "In : "
    return module.__dict__


def executed(
    message: Mapping[str, Any], namespace: dict[str, Any], show: Callable[[Any], None]
) -> dict[str, str] | None:
    """Executes a cell, and shows the value of its last expression. Returns the error, if any.

    Args:
        message: The cell's text and its name, which stands in place of a file name.
        namespace: The names that cells have defined.
        show: Called with the value, and with None if there is none, at the end.
    """
    text: str = message["cell"]
    name: str = message["name"]
    # Tracebacks and `inspect.getsource` find the text here. No time means that no file is behind it
    # that could have changed.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        tree = ast.parse(text, name)
        last = tree.body[-1] if tree.body else None
        value = None
        if isinstance(last, ast.Expr) and not text.rstrip().endswith(";"):
            tree.body.pop()
            exec(_compiled(tree, name, "exec"), namespace)
            value = eval(_compiled(ast.Expression(last.value), name, "eval"), namespace)
            namespace["_"] = value
        else:
            exec(_compiled(tree, name, "exec"), namespace)
        show(value)
    except Terminated:
        raise
    except BaseException as error:  # `SystemExit` and Ctrl-C end the cell, not the rank
        return _report(error)
    return None


def _compiled(tree: ast.Module | ast.Expression, name: str, mode: str) -> types.CodeType:
    # Otherwise, this file's `from __future__ import annotations` would apply to the cell as well.
    return compile(tree, name, mode, dont_inherit=True)


def _report(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "traceback": traceback_text(error)}


def _formatter() -> Any:
    """Returns what turns an object into the forms in which a notebook can show it."""
    from IPython.core.formatters import DisplayFormatter

    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _png)
    return formatter


def _png(figure: Any) -> bytes:
    from jaxcross.notebook.figures import png

    return png(figure)


@final
class _Kernel:
    """The notebook's kernel, as this rank sees it.

    Args:
        folder: The folder with the pipes.
        rank: This rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._cells: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._busy = False  # the main thread executes a cell, so a signal would interrupt it
        self._interrupted = False
        self._rank = rank
        self._shown: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sending = threading.RLock()
        self._formatter: Any = None
        self._forked = False
        self._reply = os.open(folder / f"{rank}.reply", os.O_WRONLY)
        os.register_at_fork(after_in_child=self._leave)
        # Must be open before we send anything: the kernel's first reaction is to give up its own
        # reading end.
        messages = (folder / f"{rank}.in").open("rb")
        threading.Thread(
            target=self._read, args=(messages,), name="notebook-kernel", daemon=True
        ).start()

    def _leave(self) -> None:
        """Takes a process that a cell has forked out of the conversation with the kernel."""
        self._forked = True
        # Otherwise the kernel wouldn't notice if this rank ended before the forked process.
        os.close(self._reply)

    def next_cell(self) -> dict[str, Any] | None:
        """Returns the next cell, or None if the kernel is gone. Waits, without polling."""
        return self._cells.get()

    def begin(self) -> None:
        """Lets the kernel interrupt the main thread from now on.

        Raises:
            KeyboardInterrupt: It already has.
        """
        with self._lock:
            self._busy = True
            self._idle.clear()
            if self._interrupted:
                raise KeyboardInterrupt

    def finish(self, error: Mapping[str, str] | None) -> None:
        """Tells the kernel that this rank has returned from a cell, unless it knows.

        A process that the cell has forked exits here, as it would at the end of a script.
        """
        if self._forked:
            if error is not None:
                print(error["traceback"], file=sys.stderr)
            sys.stdout.flush()
            os._exit(int(error is not None))
        with self._lock:
            busy = self._busy
            self._busy = False
            self._interrupted = False
            self._idle.set()
        if busy:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self.send({"done": error})

    def _interrupt(self) -> None:
        """Interrupts the main thread, or else the cell that it's about to execute.

        We send a real signal, because that also wakes up a main thread that sleeps or waits for a
        lock. But the wake-up is lost if the signal arrives just before the main thread falls
        asleep, i.e. after Python has last checked for signals. That's likely to happen, since this
        thread gets to run as soon as the main thread releases the GIL, and it does so just before
        it waits. (In a test, it happened one time out of twelve.) So wake it up again, with a
        signal that has no effect of its own.
        """
        ident = threading.main_thread().ident
        assert ident is not None
        with self._lock:
            self._interrupted = True
            if not self._busy:
                return
            signal.pthread_kill(ident, signal.SIGINT)
        for wait_s in _NUDGES_S:
            if self._idle.wait(wait_s):
                return
            signal.pthread_kill(ident, _NO_EFFECT)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message. Waits while the pipe is full."""
        rest = memoryview(f"{json.dumps(message, default=str)}\n".encode())
        with self._sending:
            while rest:
                rest = rest[os.write(self._reply, rest) :]

    def _read(self, messages: BinaryIO) -> None:
        with messages:
            for line in messages:
                message = json.loads(line)
                if "cell" in message:
                    self._cells.put(message)
                elif "shown" in message:
                    self._shown.put(None)
                elif "interrupt" in message:
                    self._interrupt()
                elif "end" in message:
                    os._exit(0)
        self._cells.put(None)
        # The kernel is gone, or it has no more cells. The main thread exits, unless a cell still
        # runs, or has left behind a thread for which Python waits. If the kernel is gone, nobody
        # else would end this process.
        threading.Event().wait(_EXIT_S)
        os._exit(1)

    def display(self, *objects: Any) -> None:
        """Shows objects in the notebook, like IPython's `display`.

        Does nothing on ranks other than 0, and in processes that a cell has forked.
        """
        if self._rank != 0 or self._forked:
            return
        if self._formatter is None:
            self._formatter = _formatter()
        for each in objects:
            data, metadata = self._formatter.format(each)
            if not data:  # the object has shown itself
                continue
            coded = {
                kind: base64.b64encode(part).decode() if isinstance(part, bytes) else part
                for kind, part in data.items()
            }
            with self._sending:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                self.send({"display": coded, "metadata": metadata})
                # Wait until it's shown, so that whatever we print next comes after it.
                self._shown.get()

    def show(self, value: Any) -> None:
        """Shows a cell's value, unless it's None, and then all figures that are open."""
        if value is not None:
            self.display(value)
        if "matplotlib.pyplot" in sys.modules:
            from jaxcross.notebook.figures import show

            show()


if __name__ == "__main__":
    main()
