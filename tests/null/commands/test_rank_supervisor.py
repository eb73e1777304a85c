"""Tests the supervisor that holds a dead rank's place.

It ends the way the rank did, passes signals on once, and is never outlived by its rank.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

from jaxcross.commands.launch import SUPERVISOR

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
def start():
    started = []

    def make(seconds, code, events=None):
        line = [
            sys.executable,
            "-I",
            "-S",
            str(SUPERVISOR),
            str(seconds),
            sys.executable,
            "-I",
            "-c",
            code,
        ]
        environ = {k: v for k, v in os.environ.items() if k != "JAXCROSS_EVENTS"}
        if events is not None:
            environ["JAXCROSS_EVENTS"] = str(events)
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environ))
        return started[-1]

    yield make
    for process in started:
        process.kill()  # which also kills its child
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_code_is_passed_on(start, code):
    assert finish(start(0, f"raise SystemExit({code})"))[0] == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_it_dies_of_the_same_signal(start, number):
    assert finish(start(0, f"import os; os.kill(os.getpid(), {int(number)})"))[0] == -number


def test_it_stays_when_its_child_is_dead(start):
    process = start(1000, "import os; print(flush=True); os._exit(3)")
    assert process.stdout.readline() == "\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert finish(process)[0] == -signal.SIGTERM, "a rank that receives SIGTERM ends"


# What a rank that has joined a run of two executes.
JOIN = """
import json, os
facts = {"run": "r", "size": 2, "host": "h", "pid": os.getpid(), "rank": 0}
with open(os.environ["JAXCROSS_EVENTS"] + "/rank-0.jsonl", "w") as stream:
    print(json.dumps(facts), file=stream)
"""


def test_who_has_not_joined_is_not_missed(start, tmp_path):
    assert finish(start(1000, "raise SystemExit(3)", tmp_path))[0] == 3


def test_where_nobody_lives_nobody_misses(start, tmp_path):
    facts = {"run": "r", "size": 2, "host": "h", "pid": 2**22 + 1, "rank": 1}
    (tmp_path / "rank-1.jsonl").write_text(json.dumps(facts))
    (tmp_path / "rank-7.jsonl").write_text("nonsense")
    assert finish(start(1000, JOIN + "os._exit(3)", tmp_path))[0] == 3


@pytest.mark.parametrize(
    "facts", [{"host": "h", "pid": os.getpid()}, {"host": "another", "pid": 1}]
)
def test_another_rank_may_miss_it(start, tmp_path, facts):
    (tmp_path / "rank-1.jsonl").write_text(json.dumps({"run": "r", "size": 2, "rank": 1} | facts))
    process = start(1000, JOIN + "print(flush=True); os._exit(3)", tmp_path)
    assert process.stdout.readline() == "\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_child_once(start, number):
    process = start(
        0,
        (
            "import signal\nseen = []\n"
            f"signal.signal({int(number)}, lambda n, _: seen.append(n))\nprint(flush=True)\n"
            "while not seen: signal.sigtimedwait([], 0.02)\n"
            "signal.sigtimedwait([], 0.2)\nprint(seen)"
        ),
    )
    process.stdout.readline()
    process.send_signal(number)
    code, out, _ = finish(process)
    assert (code, out) == (0, f"[{int(number)}]\n")


@pytest.mark.parametrize(("module", "held"), [("jaxcross.commands.rank", "[2]"), ("mpi4py", "[]")])
def test_ctrl_c_waits_until_a_rank_can_take_it(module, held):
    """The supervisor starts a rank with SIGINT blocked, and the rank unblocks it when it's ready.

    A program that doesn't use jaxcross wouldn't know that it has to do that, so for such a program
    nothing is blocked.
    """
    code = "import signal; print([int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])])"
    line = [
        sys.executable,
        "-I",
        "-S",
        str(SUPERVISOR),
        "0",
        sys.executable,
        "-I",
        "-c",
        code,
        module,
    ]
    done = subprocess.run(line, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{held}\n"


def test_its_child_does_not_outlive_it(start):
    process = start(1000, "import signal; print(flush=True); signal.pause()")
    process.stdout.readline()
    process.kill()
    # The pipe reaches its end only when the last process that holds it has ended.
    assert finish(process)[:2] == (-signal.SIGKILL, "")


def test_a_command_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-I", str(SUPERVISOR), "0", "/no/such"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 127
    assert done.stderr.startswith("jaxcross launch: `/no/such` cannot be started:")
