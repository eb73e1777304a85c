"""The world on several ranks: communicators, agreements, and how the world ends on an error."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from functools import partial

import pytest


@pytest.fixture
def mpirun(mpirun):
    """Starts real processes, because these tests are about starts, exits and signals."""
    return partial(mpirun, warm=False)


START = (
    "import threading, sys\nfrom jaxcross.world import initialize\nworld = "
    "initialize(stall_timeout_s={watchdog})\n"
)
TOGETHER = (
    "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()  # one start may take longer than others\n"
)
WAIT = "\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Dup().Barrier()\n"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_agreements_and_communicators(mpirun, ranks):
    done = mpirun(ranks, "world_checks.py", warm=True).check()
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert {name: outcome for name, outcome in found.items() if outcome != "ok"} == {}
    assert len(found) == 8


def test_exception_on_one_rank_ends_all_with_traceback(mpirun):
    code = (
        START.format(watchdog=300)
        + "if world.rank == 1:\n    raise ValueError('no more data')"
        + WAIT
    )
    done = mpirun(2, code)
    assert done.returncode != 0
    assert "jaxcross: rank 1 of 2 failed:" in done.stderr
    assert "ValueError: no more data" in done.stderr and "Traceback" in done.stderr
    assert "rank 0 failed" not in done.stderr


def test_an_exception_in_a_thread_ends_all(mpirun):
    code = START.format(watchdog=300) + (
        "def loader():\n    raise OSError('disk')\n"
        "if world.rank == 1:\n    threading.Thread(target=loader, name='loader').start()" + WAIT
    )
    done = mpirun(2, code)
    assert done.returncode != 0
    assert "jaxcross: rank 1 of 2 failed in thread 'loader':" in done.stderr
    assert "OSError: disk" in done.stderr


@pytest.mark.integration
def test_an_interrupt_ends_all_without_a_traceback(mpirun):
    code = START.format(watchdog=300) + "if world.rank == 0:\n    raise KeyboardInterrupt" + WAIT
    done = mpirun(2, code)
    assert done.returncode != 0
    assert "jaxcross: rank 0 was interrupted; all 2 ranks end." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.integration
def test_daemon_thread_error_ends_all_at_exit(mpirun):
    """The exception comes in a daemon thread while the main thread ends."""
    code = START.format(watchdog=300) + (
        "def loader():\n    raise OSError('disk')\n"
        "if world.rank == 1:\n    threading.Thread(target=loader, daemon=True).start()\n"
        "    threading.Event().wait(0.1)\nelse:" + WAIT.replace("\n", "\n    ")
    )
    done = mpirun(2, code)
    assert done.returncode != 0
    assert "OSError: disk" in done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    "worse",
    [
        "sys.stderr.close()",
        "import os, signal\n    threading.Timer(0.1, os.kill, (os.getpid(), 2)).start()",
    ],
)
def test_nothing_keeps_an_exception_from_ending_all(mpirun, worse):
    """Neither a closed stderr nor Ctrl-C during the report prevents the abort."""
    code = (
        START.format(watchdog=300)
        + f"if world.rank == 1:\n    {worse}\n    raise ValueError"
        + WAIT
    )
    assert mpirun(2, code).returncode != 0


@pytest.mark.integration
def test_watchdog_names_the_rank_that_has_not_arrived(mpirun):
    code = (
        TOGETHER
        + START.format(watchdog=12)
        + (
            "def decode_for_ever():\n    threading.Event().wait()\n"
            "if world.rank == 1:\n    decode_for_ever()\n"
            "with world.monitor(job='lr-0.1', step=12, segment=3, what='psum'):\n    "
            + WAIT.strip().replace("\n", "\n    ")
        )
    )
    done = mpirun(3, code)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "s in job 'lr-0.1', step 12, segment 3 (psum)." in output
    assert "rank 1 has not arrived: it is in no exchange, after 0 of 1 exchanges." in output
    assert "rank 0 has not arrived" not in output and "rank 2 has not arrived" not in output
    assert output.count("s in job 'lr-0.1'") == 1, "one report"
    assert "jaxcross: stacks of rank 1:" in output and "decode_for_ever" in output


@pytest.mark.integration
def test_rank_missing_from_initialize_ends_all(mpirun):
    code = (
        "from mpi4py import MPI\nimport threading\n"
        "if MPI.COMM_WORLD.Get_rank() == 1:\n    threading.Event().wait()\n"
        + START.format(watchdog=12)
    )
    done = mpirun(2, code)
    assert done.returncode != 0
    assert (
        "jaxcross: rank 0 has waited 12 s for all ranks to call `jaxcross.initialize()`; all 2 "
        "ranks" in done.stderr
    )


@pytest.mark.integration
def test_unresponsive_stuck_rank_is_aborted(mpirun):
    # The late rank holds the interpreter lock, so it can't answer.
    code = (
        TOGETHER
        + START.format(watchdog=12)
        + (
            "if world.rank == 1:\n    import ctypes\n    ctypes.PyDLL(None).sleep(1000)\n"
            "with world.monitor(job='a', step=0, segment=0, what='psum'):\n    "
            + WAIT.strip().replace("\n", "\n    ")
        )
    )
    done = mpirun(2, code)
    assert done.returncode != 0
    # The watchdog asks the rank after 12 s. On a busy machine, 30 s without a heartbeat may be
    # noticed first.
    assert re.search(
        r"rank 1 (does not answer: it has ended, or its interpreter is blocked|is silent for)",
        done.stderr,
    )


def alone(code, **environ):
    environ = {**os.environ, **environ}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.integration
def test_one_process_without_a_launcher_is_a_world():
    code = (
        START.format(watchdog=300) + "print(world.size, world.rank, world.rank_grid('batch').shape)"
    )
    done = alone(code)
    assert done.stdout.split("\n")[0] == "1 0 (1,)", done.stderr


RECORDS_ENVIRONMENT = """
import os, sys
class StartRecorder:  # what the environment is when MPI is about to be loaded, which starts it
    def find_spec(self, name, *rest):
        if name == "mpi4py.MPI":
            names = ("OMPI_MCA_btl_tcp_flags", "OMPI_MCA_mpi_yield_when_idle")
            print(*(os.environ.get(x) for x in names))
sys.meta_path.insert(0, StartRecorder())
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("before", "own", "expected"),
    [
        ("", {}, "send 1"),
        ("", {"OMPI_MCA_btl_tcp_flags": "put"}, "put 1"),
        ("from mpi4py import MPI\n", {}, "None None"),
    ],
    ids=["as measured", "the user's own", "the script has started MPI"],
)
def test_mpi_starts_with_measured_default_settings(before, own, expected, monkeypatch):
    """The measured settings apply unless the user has set others."""
    after = 'print(os.environ.get("OMPI_MCA_mpi_yield_when_idle"))\n'
    for name in [
        name for name in os.environ if name.startswith("OMPI_MCA_")
    ]:  # set by a world of this process
        monkeypatch.delenv(name)
    done = alone(RECORDS_ENVIRONMENT + before + START.format(watchdog=300) + after, **own)
    assert done.stdout.splitlines() == [expected, expected.split()[1]], done.stderr


def test_a_silent_singleton_is_refused():
    done = alone(START.format(watchdog=300), OMPI_COMM_WORLD_SIZE="4")
    assert done.returncode != 0
    message = "The launcher started 4 ranks (`OMPI_COMM_WORLD_SIZE=4`), but MPI sees a world of 1."
    assert message in done.stderr
    assert "Remedy: use the `mpirun` of the same MPI" in done.stderr


@pytest.mark.integration
def test_a_pool_that_came_too_early_is_refused():
    code = "import jax\njax.devices()\nfrom jaxcross.world import initialize\ninitialize()"
    done = alone(code, NPROC="1")
    assert done.returncode != 0
    assert (
        "ExchangeError: JAX started before `jaxcross.initialize()`, with a CPU pool of 1"
        in done.stderr
    )


@pytest.mark.integration
def test_the_pool_has_the_size_that_the_world_says():
    code = START.format(watchdog=300) + (
        "import jax, os\nassert os.environ['PJRT_NPROC'] == str(world.pool_size)\njax.devices()\n"
        "jax.jit(lambda x: x + 1)(1.0).block_until_ready()\nprint(world.pool_size)"
    )
    done = alone(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2


@pytest.mark.integration
def test_an_mpi4jax_for_another_mpi_is_explained(tmp_path):
    (tmp_path / "mpi4jax.py").write_text("raise RuntimeError('MPI ABI incompatibility detected!')")
    done = alone(START.format(watchdog=300), PYTHONPATH=str(tmp_path), JAXCROSS_WIRE="mpi4jax")
    assert done.returncode != 0
    assert (
        "ExchangeError: mpi4jax cannot be used with this MPI: MPI ABI incompatibility detected!"
        in done.stderr
    )
    assert "--no-cache-dir --no-binary mpi4jax mpi4jax" in done.stderr


# A call compiled against version 0.99 of the interface, which it writes when XLA asks for its
# metadata.
FOREIGN_CALL = """
import ctypes, jax

@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def handler(frame):
    extension = ctypes.c_void_p.from_address(frame + 8).value
    metadata = ctypes.c_void_p.from_address(extension + 24).value
    ctypes.c_int.from_address(metadata + 24).value = 0
    ctypes.c_int.from_address(metadata + 28).value = 99

jax.ffi.register_ffi_target("foreign", jax.ffi.pycapsule(handler), platform="cpu")
"""


@pytest.mark.integration
def test_an_mpi4jax_for_a_newer_jaxlib_is_explained(tmp_path):
    """The rank ends in `initialize()` rather than at its first array, and the remedy names the
    installed jaxlib.
    """
    (tmp_path / "mpi4jax.py").write_text(FOREIGN_CALL)
    done = alone(START.format(watchdog=300), PYTHONPATH=str(tmp_path), JAXCROSS_WIRE="mpi4jax")
    assert done.returncode != 0
    jaxlib = importlib.metadata.version("jaxlib")
    assert (
        f"ExchangeError: mpi4jax was built against a newer jaxlib than the installed {jaxlib}: "
        in done.stderr
    )
    assert (
        "handler's API version (0.99)" in done.stderr
        and f'echo "jaxlib=={jaxlib}" > build.txt' in done.stderr
    )


JOB_RAISES = """
import jaxcross
world = jaxcross.initialize()
import jax, jax.numpy as jnp

def load(batch):
    if batch == 2 and world.rank == 1:
        raise OSError("no more data")
    return jnp.float32(batch)

@jaxcross.crossover(axes="batch")
def step(state, batch):
    return state + jax.lax.psum(batch, "batch")

def train(job):
    state = job.restore(jnp.float32(0))
    for batch in range(4):
        state = step(state, load(batch))
    return state

with jaxcross.Runner(world) as runner:
    runner.add("a", train)
    runner.run()
"""
JOB_LINES = """jaxcross: job `a` failed on rank 1 of 2:
Traceback (most recent call last):
  File "{script}", line 18, in train
    state = step(state, load(batch))
  File "{script}", line 8, in load
    raise OSError("no more data")
OSError: no more data
""".splitlines()
ENDS = (
    "jaxcross: rank {rank} of 2 ends after the run: JobError: Job `a` failed on rank 1 after step "
    "2: OSError: no more data. Every rank leaves the job after step 2, the last one that all of "
    "them committed; other jobs continue."
)
SCRIPT_RAISES = (
    START.format(watchdog=300) + "if world.rank == 1:\n    raise OSError('no more data')" + WAIT
)


def launched(tmp_path, code, **environ):
    """Runs a script under `jaxcross launch`.

    Returns its lines, without MPI's own, and the folders that it left.
    """
    script, left = tmp_path / "train.py", tmp_path / "left"
    script.write_text(code)
    left.mkdir()
    # mpi4jax warns if JAX is newer than the versions it was tested with.
    environ = {**os.environ, "TMPDIR": str(left), "MPI4JAX_NO_WARN_JAX_VERSION": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-m", "jaxcross.cli", "launch", "-n", "2", str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    text = re.sub(
        r"^-{20,}\n.*?^-{20,}\n", "", done.stderr, flags=re.DOTALL | re.MULTILINE
    )  # Open MPI's own text
    lines = [
        line for line in text.splitlines() if line.strip("\0") and not line.startswith("Abort(")
    ]
    return script, lines, [path.name for path in left.glob("jaxcross-events-*")]


@pytest.mark.integration
def test_failing_job_prints_one_traceback(tmp_path):
    script, lines, left = launched(tmp_path, JOB_RAISES)
    lines = [line for line in lines if line.strip(" ~^")]  # Python versions mark a call differently
    wanted = [line.format(script=script) for line in JOB_LINES]
    assert [line for line in lines if line in wanted] == wanted
    ends = [line for line in lines if line not in wanted]
    assert ENDS.format(rank=0) in ends or ENDS.format(rank=1) in ends
    # A late rank is terminated by the other rank's notice, and says so.
    assert all(
        line.startswith(("jaxcross: rank 0 of 2 ends ", "jaxcross: rank 1 of 2 ends "))
        for line in ends
    ), ends
    assert left == []


def test_failing_script_prints_one_traceback(tmp_path):
    script, lines, left = launched(tmp_path, SCRIPT_RAISES)
    assert len(lines) == 7 and left == [], lines
    assert (
        lines.count("OSError: no more data")
        == lines.count("Traceback (most recent call last):")
        == 1
    )
    assert f'  File "{script}", line 5, in <module>' in lines
    assert sum(line.startswith("jaxcross: rank 0 of 2 ends while") for line in lines) == 1


@pytest.mark.integration
def test_unfiltered_tracebacks_of_jax_keep_all_lines(tmp_path):
    _, lines, _ = launched(tmp_path, SCRIPT_RAISES, JAX_TRACEBACK_FILTERING="off")
    assert any("runpy" in line for line in lines)


@pytest.mark.integration
def test_silently_dying_rank_leaves_a_post_mortem(tmp_path):
    dies = "import os\nif world.rank == 1:\n    os._exit(1)"
    _, lines, left = launched(tmp_path, START.format(watchdog=300) + dies + WAIT)
    assert any("post-mortem" in line for line in lines) and len(left) == 1


def test_mpi_that_was_finalized_is_named(mpirun) -> None:
    done = mpirun(
        1, "from mpi4py import MPI; import jaxcross; MPI.Finalize(); jaxcross.initialize()"
    )
    assert done.returncode != 0
    assert (
        "ExchangeError: MPI was finalized in this process (`MPI.Finalize()`), and cannot start "
        "again." in done.stderr
    )


@pytest.mark.integration
def test_a_typo_at_the_prompt_does_not_end_python():
    typed = "import jaxcross\nworld = jaxcross.initialize()\nwrold\nprint('still', world.size)\n"
    done = subprocess.run(
        [sys.executable, "-i"],
        input=typed,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "NameError: name 'wrold' is not defined" in done.stderr
    assert done.stdout.splitlines()[-1] == "still 1" and done.returncode == 0
