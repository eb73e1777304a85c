"""Tests `%%ranks` cells in a real IPython shell, with real ranks."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("IPython")

from IPython.core.error import UsageError

from jaxcross.errors import CellError
from jaxcross.notebook import processes
from jaxcross.notebook.cell import CellInterrupted
from tests.support import notebooks

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# A rank's number, for cells that don't need MPI. Importing JAX takes each rank a second.
NUMBER = """
import os
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "")))
"""
# Joins the ranks, and makes one of them wait for the other in MPI.
JOIN = f"{NUMBER}\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
# A signal that arrives just before a wait begins doesn't end the wait, so there's a limit.
WAIT = "while True: __import__('threading').Event().wait(0.1)"


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    with notebooks.opened(monkeypatch, tmp_path) as opened:
        yield opened


def test_cells_share_names_and_show_output_values_and_errors(notebook):
    """The ordinary case, on one pair of ranks."""
    first = notebook.on_ranks(f"{NUMBER}\nprint('hello')\nnumbers = [rank]").check()
    assert (first.out, first.err, first.displayed) == ("hello\n", "", [])

    second = notebook.on_ranks("print(numbers, flush=True)\nnumbers * 2").check()
    assert second.out == "[0]\n[rank 1] [1]\n"
    assert [data["text/plain"] for data in second.displayed] == ["[0, 0]"]

    shown = notebook.on_ranks(
        "class Table:\n"
        "    def _repr_html_(self):\n"
        "        return '<b>table</b>'\n"
        "print('before')\n"
        "display(Table())\n"
        "print('after')\n"
        "Table();"
    ).check()
    assert [data["text/html"] for data in shown.displayed] == ["<b>table</b>"]
    assert shown.out == "before\nafter\n"

    typo = notebook.on_ranks("def f():\n    return numbrs\n\nf()")
    assert isinstance(typo.error, CellError)
    assert str(typo.error) == "The cell failed with NameError on all 2 ranks."
    assert "On all 2 ranks:" in typo.out
    assert 'File "<In[5]>", line 5, in <module>\n    f()' in typo.out  # `%%ranks 2` is line 1
    assert "cell_rank.py" not in typo.out and "cell.py" not in typo.out

    one = notebook.on_ranks("if rank == 1:\n    raise ValueError('no data')")
    assert isinstance(one.error, CellError)
    assert "ValueError on rank 1, but not on rank 0" in str(one.error)
    assert "On rank 1:" in one.out and "ValueError: no data" in one.out

    wrong = notebook.on_ranks("numbers = (")
    assert isinstance(wrong.error, CellError)
    assert str(wrong.error).startswith("The cell is not valid Python, so it has not run.")
    assert 'File "<In[7]>", line 2\n    numbers = (' in wrong.out

    for line in ("two", "0", "-1", "2.5", "", "100000"):
        refused = notebook.run(f"%%ranks {line}\nnumbers = 1")
        assert isinstance(refused.error, UsageError), line
        assert "`%%ranks` needs the number of ranks" in str(refused.error)
    refused = notebook.on_ranks("1", ranks=3)
    assert isinstance(refused.error, UsageError)
    assert "2 ranks are running" in str(refused.error)

    assert notebook.on_ranks("print(numbers == [rank])").check().out == "True\n"
    assert notebook.run("%ranks_stop").check().out == ""
    assert notebook.run("%ranks_stop").check().out == "No ranks are running.\n"
    again = notebook.on_ranks("numbers")
    assert str(again.error) == "The cell failed with NameError on all 2 ranks."


@pytest.mark.integration
def test_a_rank_that_waits_for_a_failed_one_is_ended(notebook):
    notebook.on_ranks(f"{JOIN}\nkept = 1").check()
    failed = notebook.on_ranks("if rank == 1:\n    1 / 0\nprint('waits')\ncomm.barrier()")
    assert isinstance(failed.error, CellError)
    assert "ZeroDivisionError on rank 1, and 5 s later, rank 0 has not returned" in str(
        failed.error
    )
    assert "names that earlier cells defined are lost" in str(failed.error)
    assert failed.out.startswith("waits\n") and "ZeroDivisionError" in failed.out
    assert notebook.on_ranks("print('kept' in globals())").check().out == "False\n"


@pytest.mark.integration
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_ends_is_named(notebook, end):
    ended = notebook.on_ranks(f"{JOIN}\nif rank == 1:\n    {end}\ncomm.barrier()")
    assert isinstance(ended.error, CellError)
    if sys.platform == "linux":  # elsewhere, `mpirun` ends the others at once
        assert str(ended.error).startswith("Rank 1 has ended during the cell")
    assert notebook.on_ranks("print(1)").check().out == "1\n"


@pytest.mark.integration
@pytest.mark.parametrize("end", ["os._exit(0)", "comm.Abort(3); os._exit(3)"])
def test_a_rank_whose_end_ends_the_others_fails_the_cell(notebook, end):
    """MPICH returns from `Abort`, and ends all ranks a moment later."""
    ended = notebook.on_ranks(f"{JOIN}\nif rank == 1:\n    {end}\ncomm.barrier()")
    assert isinstance(ended.error, CellError)
    assert "ended during the cell" in str(ended.error)
    assert notebook.on_ranks("print(1)").check().out == "1\n"


@pytest.mark.integration
def test_ranks_that_ended_between_cells_are_reported(notebook):
    late = "import threading\nthreading.Timer(0.0, os._exit, [1]).start()"
    fifo = Path("gone")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    notebook.on_ranks(
        f"{NUMBER}\nif rank == 1:\n    held = open('gone', 'w')\n    held.write('x')\n"
        "    held.flush()"
    ).check()
    os.set_blocking(reader, True)
    ended = notebook.on_ranks(f"if rank == 1:\n{textwrap.indent(late, '    ')}")
    while os.read(reader, 10):  # until rank 1 is gone
        pass
    os.close(reader)
    if ended.error is None:  # the rank ended after the cell
        ended = notebook.on_ranks("print('not run')")
    assert isinstance(ended.error, CellError)
    assert "not run" not in ended.out
    assert str(ended.error).startswith("Rank 1 has ended")
    assert notebook.on_ranks("print(1)").check().out == "1\n"


@pytest.mark.integration
def test_threads_can_print_and_display_between_cells(notebook):
    notebook.on_ranks(
        f"{NUMBER}\nimport threading\n"
        "go = threading.Event()\n"
        "def late():\n"
        "    go.wait()\n"
        "    display(rank)\n"
        "    print('late')\n"
        "thread = threading.Thread(target=late)\n"
        "thread.start()"
    ).check()
    first = notebook.on_ranks("go.set()").check()
    second = notebook.on_ranks("thread.join()").check()
    # If rank 0 prints its line during one cell and rank 1 during the other, both are shown.
    assert (first.out + second.out).replace("[rank 1] late\n", "") == "late\n"
    assert [data["text/plain"] for data in first.displayed + second.displayed] == ["0"]


@pytest.mark.integration
def test_a_forked_process_neither_displays_nor_returns_from_the_cell(notebook):
    forked = notebook.on_ranks(
        "import os\npid = os.fork()\n"
        "if pid == 0:\n    display('forked')\nelse:\n    print(os.waitpid(pid, 0)[1])"
    ).check()
    assert (forked.out, forked.displayed) == ("0\n", [])
    failed = notebook.on_ranks(
        "pid = os.fork()\nif pid == 0:\n    1 / 0\nprint(os.waitpid(pid, 0)[1] >> 8)"
    ).check()
    assert failed.out == "1\n"
    assert "ZeroDivisionError" in failed.err


@pytest.mark.integration
def test_ranks_that_do_not_start_say_why(notebook, monkeypatch):
    module = processes.MODULE
    monkeypatch.setattr(processes, "MODULE", "jaxcross.notebook.nothing")
    failed = notebook.on_ranks("1")
    assert isinstance(failed.error, CellError)
    assert str(failed.error).startswith("The 2 ranks could not be started; `jaxcross doctor`")
    assert "No module named jaxcross.notebook.nothing" in str(failed.error)
    monkeypatch.setattr(processes, "MODULE", module)
    assert notebook.on_ranks("print(1)").check().out == "1\n"


def test_without_mpirun_no_rank_is_started(notebook, monkeypatch):
    monkeypatch.setattr(processes, "find_mpirun", lambda: None)
    assert "No `mpirun` was found. Remedy:" in str(notebook.on_ranks("1").error)


@pytest.mark.integration
def test_an_interrupt_ends_the_cell(notebook):
    interrupted = notebook.on_ranks(
        f"{JOIN}\nimport signal\ncomm.barrier()\n"
        f"if rank == 1:\n    os.kill({os.getpid()}, signal.SIGINT)\n"
        f"{WAIT}"
    )
    assert isinstance(interrupted.error, CellInterrupted)
    assert "names that earlier cells defined are lost" in str(interrupted.error)
    assert "On all 2 ranks:" in interrupted.out or "On rank 1:" in interrupted.out
    assert WAIT in interrupted.out
    assert notebook.on_ranks("print('rank' in globals())").check().out == "False\n"


@pytest.mark.integration
def test_a_second_interrupt_ends_ranks_that_do_not_react(notebook):
    interrupted = notebook.on_ranks(
        f"{NUMBER}\nimport signal\n"
        f"signal.signal(signal.SIGINT, lambda *_: os.kill({os.getpid()}, signal.SIGINT))\n"
        f"if rank == 1:\n    os.kill({os.getpid()}, signal.SIGINT)\n"
        f"{WAIT}"
    )
    assert isinstance(interrupted.error, CellInterrupted)
    assert notebook.on_ranks("print(1)").check().out == "1\n"


@pytest.mark.integration
def test_steps_reports_and_sources_work_in_cells(notebook):
    start = "import jaxcross\nworld = jaxcross.initialize()\nimport jax\nimport jax.numpy as jnp"
    notebook.on_ranks(start).check()
    ran = notebook.on_ranks(
        f"{start}\n"  # again
        "@jaxcross.crossover(axes='batch')\n"
        "def step(w, x):\n"
        "    return w + jax.lax.pmean(x, 'batch'), {}\n"
        "import inspect, pickle\n"
        "assert 'lax.pmean' in inspect.getsource(step)\n"
        "jobs = [jaxcross.Job(n, step, jnp.zeros(1), [jnp.ones(1)] * 4) for n in 'ab']\n"
        "jaxcross.run(jobs, progress=False)"
    ).check()
    assert "<table" in ran.displayed[-1]["text/html"]
    assert "Report of 2 jobs" in ran.displayed[-1]["text/plain"]
    wrong = notebook.on_ranks(
        "@jaxcross.crossover(axes='batch')\n"
        "def wrong(x):\n"
        "    ref = jax.new_ref(x)\n"
        "    ref[...] = jax.lax.pmean(x, 'batch')\n"
        "    return ref[...]\n"
        "wrong(jnp.ones(3))"
    )
    assert "CutError on all 2 ranks" in str(wrong.error)
    assert "cannot be cut at <In[4]>:" in wrong.out  # the user's line
    plan = notebook.on_ranks(
        "from jaxcross import plan\n"
        "jobs = [plan.Profile.whole(n, compute_s=0.2, exchange_s=0.1) for n in 'ab']\n"
        "display(jobs[0], plan.predict(jobs, steps=40))"
    ).check()
    assert ["<table" in data["text/html"] for data in plan.displayed] == [True, True]


@pytest.mark.integration
def test_figures_are_shown(notebook):
    pytest.importorskip("matplotlib")
    shown = notebook.on_ranks(
        "from matplotlib import pyplot\n"
        "pyplot.plot([1, 2])\n"
        "pyplot.show()\n"
        "print('after')\n"
        "pyplot.plot([2, 1]);"
    ).check()
    assert [sorted(data) for data in shown.displayed] == [["image/png", "text/plain"]] * 2
    assert (shown.out, shown.err) == ("after\n", "")


KERNEL = """
import os, signal, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell(config=config)
hold, busy, end = sys.argv[1:]
signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
shell.run_cell("%load_ext jaxcross")
shell.run_cell(f"%%ranks 2\\n{hold}")
if busy:
    shell.run_cell(f"%%ranks 2\\nif rank == 0: os.kill({os.getpid()}, 10)\\n{busy}")
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""
# SIGTERM doesn't end these ranks, and neither does the end of their main thread.
STUBBORN = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=threading.Event().wait).start();
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("stubborn", "busy", "end"),
    [
        ("", "", "exits"),
        ("", "", "killed"),
        ("", "comm.recv(source=1 - rank)", "killed"),
        (STUBBORN, "", "killed"),
    ],
    ids=["idle-exits", "idle-killed", "busy-killed", "stubborn-killed"],
)
def test_ranks_end_with_the_kernel(tmp_path, stubborn, busy, end):
    """Each rank holds a pipe open, which the test reads until both ranks are gone."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    # A bare file descriptor, which Python doesn't close before the process ends.
    hold = f"{JOIN}\nos.write(os.open({str(fifo)!r}, os.O_WRONLY), b'x');\n{stubborn}"
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL, hold, busy, end],
        env={**os.environ, "PYTHONPATH": PATH, "IPYTHONDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=240)
    os.set_blocking(reader, True)
    with open(reader) as held:
        assert held.read() == "xx", output
    assert "Error" not in output, output
    assert process.returncode == (0 if end == "exits" else -9)


@pytest.mark.integration
def test_a_kernel_that_has_joined_a_world_can_start_ranks(tmp_path):
    code = KERNEL.replace(
        "shell.run_cell(", "import jaxcross; jaxcross.initialize()\nshell.run_cell(", 1
    )
    cell = "import jaxcross\nprint(jaxcross.initialize().size)"
    done = subprocess.run(
        [sys.executable, "-c", code, cell, "", "exits"],
        env={**os.environ, "PYTHONPATH": PATH, "IPYTHONDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (0, "2\n")
