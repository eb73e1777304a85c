"""A warm process behaves like `python`: arguments, files, exit codes and signals.

The only difference is that JAX is already imported.
"""

import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from jaxcross.world import workers
from tests.support.warm_client import VARIABLE
from tests.support.warm_python import COMMAND

pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason="JAXCROSS_TESTS_COLD is set")

IS_WARM = "import sys; print('jax' in sys.modules)"


@pytest.fixture(autouse=True)
def no_child_of_a_rank(monkeypatch):
    """Makes processes warm even if a test has called `initialize` here.

    That call makes this process a rank, and a rank's children are never warm.
    """
    monkeypatch.delenv(workers.VARIABLE, raising=False)


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_ranks_are_warm(mpirun):
    """If ranks weren't warm, each would import JAX again.

    All other tests would still pass, only slower.
    """
    assert mpirun(2, IS_WARM).check().stdout == "True\nTrue\n"
    assert mpirun(2, IS_WARM, warm=False).check().stdout == "False\nFalse\n"


@pytest.mark.parametrize("name", ["JAX_ENABLE_X64", "PYTHONHASHSEED", "MALLOC_ARENA_MAX"])
def test_what_is_read_at_start_needs_a_new_interpreter(name):
    assert run("-c", IS_WARM, env={**os.environ, name: "1"}).stdout == "False\n"


def test_program_sees_its_own_arguments_environment_and_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), os.environ['MINE'], __name__, "
        "__file__)"
    )
    done = run(str(script), "a", "b", cwd=tmp_path, env={**os.environ, "MINE": "yes"})
    assert (
        done.stdout == f"{[str(script), 'a', 'b']} {tmp_path} {tmp_path} yes __main__ {script}\n"
    ), done.stderr
    assert run("-c", "print(input())", input="typed").stdout == "typed\n"
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run("-m", "module", "c", cwd=tmp_path).stdout == "__main__ ['c']\n"


def test_each_program_starts_fresh():
    code = (
        "import builtins, random; print(hasattr(builtins, 'left')); builtins.left = 1; "
        "print(random.random())"
    )
    first, second = run("-c", code).stdout.split(), run("-c", code).stdout.split()
    assert first[0] == second[0] == "False"
    assert first[1] != second[1]


@pytest.mark.parametrize(
    "code", ["raise SystemExit(7)", "import os; os._exit(9)", "1/0", "import os; os.abort()"]
)
def test_exit_codes_are_those_of_python(code):
    cold = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, check=False
    )
    assert run("-c", code).returncode == cold.returncode


WAITS = "import signal, sys; print(__import__('os').getpid(), flush=True); sys.stdin.read()"


def started():
    process = subprocess.Popen(
        [*COMMAND, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, int(process.stdout.readline())


def test_signals_reach_the_program():
    process, program = started()
    with process:
        assert program != process.pid
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_program_dies_with_its_client():
    """`mpirun` kills the process that it started, which is the client."""
    process, program = started()
    watched = os.pidfd_open(program)
    with process:
        process.kill()
        process.wait(60)
        assert select.select([watched], [], [], 60)[0]
    os.close(watched)


@pytest.mark.parametrize("sent", [b"", b"\xff", b"\x08\0\0\0half"])
def test_clients_that_die_early_leave_the_server_alone(sent):
    """Launchers kill ranks that are just starting, even before the server has accepted them or read
    their request.
    """
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(os.environ[VARIABLE])
            client.send(sent)
    assert run("-c", IS_WARM).stdout == "True\n"
