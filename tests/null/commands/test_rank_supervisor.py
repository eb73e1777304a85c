"""Tests the supervisor that holds a dead rank's place.

It ends the way the rank did, passes signals on once, and is never outlived by its rank.
"""

import json
import os
import signal
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxcross.commands import rank_supervisor
from jaxcross.commands.launch import SUPERVISOR
from jaxcross.commands.rank_supervisor import LogFile, OutputStream

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


def tagged(*chunks):
    """Returns what is written, piece by piece, for a stream that arrives in these chunks."""
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_supervisor, "_write", lambda _, piece: written.append(piece))
        stream = OutputStream(1, "[1] ")
        for chunk in (*chunks, b""):
            stream.write(chunk)
    return written


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        ([b"a\nb\n\n"], [b"[1] a\n", b"[1] b\n", b"[1] \n"]),
        ([b"a", b"b", b"c\nd"], [b"[1] abc\n", b"[1] d\n"]),
        ([b"a\r", b"\nb\r\n"], [b"[1] a\r\n", b"[1] b\r\n"]),
        ([b"\r0%", b"\r50%", b"\r100%\n"], [b"[1] 0%\r", b"[1] 50%\r", b"[1] 100%\n"]),
        ([b"50%\r", b"100%\r"], [b"[1] 50%\r", b"[1] 100%\n"]),
        ([b"\xff\x00\x85\n\x0c", b"\xe2"], [b"[1] \xff\x00\x85\n", b"[1] \x0c\xe2\n"]),
        ([b"done\n", b"\r  \r"], [b"[1] done\n"]),
        ([], []),
    ],
)
def test_each_line_is_written_at_once_with_its_rank(chunks, pieces):
    assert tagged(*chunks) == pieces


@given(st.lists(st.text("ab\r\n", max_size=9).map(str.encode), max_size=9))
def test_lines_do_not_depend_on_the_chunks_in_which_they_arrive(chunks):
    chunks = [chunk for chunk in chunks if chunk]
    assert tagged(*chunks) == tagged(*([b"".join(chunks)] if chunks else []))


@pytest.mark.parametrize("length", [4089, 4090, 4091, 4092, 4093, 8184])
@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_long_lines_are_broken_up_so_that_mpirun_keeps_each_piece_whole(length, size, end):
    line = b"x" * length + end
    pieces = tagged(*(line[n : n + size] for n in range(0, len(line), size)))
    assert all(len(piece) <= 4096 and piece.startswith(b"[1] x") for piece in pieces)
    assert sum(piece.count(b"x") for piece in pieces) == length
    assert (length > 4092) <= (len(pieces) > 1)


@pytest.mark.parametrize("character", ["é", "€", "🚀"])
@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_long_lines_are_broken_up_between_characters(character, before, size, end):
    text = "x" * before + character * 5000
    line = text.encode() + end
    pieces = tagged(*(line[n : n + size] for n in range(0, len(line), size)))
    assert all(4089 <= len(piece) <= 4096 for piece in pieces[:-1])
    assert "".join(piece.decode().removeprefix("[1] ").rstrip("\n") for piece in pieces) == text


def test_long_lines_that_are_not_utf8_are_broken_up_as_well():
    pieces = tagged(b"\x80" * 9000)
    assert [len(piece) for piece in pieces[:-1]] == [4095, 4095]
    assert sum(piece.count(b"\x80") for piece in pieces) == 9000


def supervise(rank, options, code, **variables):
    line = [sys.executable, "-I", "-S", str(SUPERVISOR), *options, "0", sys.executable, "-c", code]
    environ = {k: v for k, v in os.environ.items() if k not in ("JAXCROSS_EVENTS", "PMIX_RANK")}
    return subprocess.run(
        line,
        check=False,
        capture_output=True,
        timeout=60,
        env=environ | ({} if rank is None else {rank: "7"}) | variables,
    )


OUTPUT = """
import os, sys
print("out")
print("err", file=sys.stderr)
sys.stdout.write("a partial line")
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("variable", ["PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_nothing_that_a_killed_rank_has_printed_is_lost(tmp_path, variable):
    """Without the tag, the bytes of both streams are unchanged."""
    for options, out, err in (
        (["--tag"], b"[7] out\n[7] a partial line\n", b"[7] err\n"),
        ([f"--log={tmp_path}"], b"out\na partial line", b"err\n"),
        (["--tag", f"--log={tmp_path}/new"], b"[7] out\n[7] a partial line\n", b"[7] err\n"),
    ):
        done = supervise(variable, options, OUTPUT)
        assert (done.returncode, done.stdout, done.stderr) == (-9, out, err)
    for folder in (tmp_path, tmp_path / "new"):
        kept = (folder / "rank-7.log").read_bytes()
        assert sorted(kept) == sorted(b"out\nerr\na partial line")
    supervise(variable, [f"--log={tmp_path}"], OUTPUT)
    assert (tmp_path / "rank-7.log").read_bytes().count(b"out") == 2, "nothing is overwritten"


def test_a_killed_supervisor_loses_nothing_that_is_in_the_file(tmp_path):
    """`mpirun` kills the supervisor, and the kernel kills the rank."""
    code = "import os, signal; print('x' * 50_000); os.kill(os.getppid(), 9); signal.pause()"
    assert supervise("PMI_RANK", [f"--log={tmp_path}"], code).returncode == -9
    # `capture_output` has waited until the last process that holds the pipes has ended.
    assert (tmp_path / "rank-7.log").read_text() == "x" * 50_000 + "\n"


def test_an_output_process_outlives_signals_for_the_whole_group(tmp_path):
    code = """
import os, signal
from jaxcross._processes import related
(output,) = {*related(os.getppid())} - {os.getpid()}
os.kill(output, signal.SIGTERM)
print("still here")
"""
    done = supervise("PMI_RANK", ["--tag"], code)
    assert (done.returncode, done.stdout) == (0, b"[7] still here\n")


def test_a_log_file_that_cannot_be_made_starts_nothing(tmp_path):
    (tmp_path / "file").touch()
    done = supervise("PMI_RANK", [f"--log={tmp_path}/file"], "print('started')")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"jaxcross launch: rank 7 on host" in done.stderr and b"`--log-dir`" in done.stderr


def test_a_launcher_that_numbers_no_ranks_is_refused():
    done = supervise(None, ["--tag"], "print('started')")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"doesn't tell a process which rank it is" in done.stderr


def test_a_full_disk_is_reported_once(capfd):
    log = LogFile(os.open("/dev/full", os.O_WRONLY), "logs/rank-0.log")
    log.write(b"a")
    log.write(b"b")
    assert capfd.readouterr().err == (
        "jaxcross launch: `logs/rank-0.log` is incomplete, but the run continues: [Errno 28] No "
        "space left on device.\n"
    )


def test_a_reader_that_is_gone_stops_only_its_own_stream():
    read, write = os.pipe()
    os.close(read)
    stream = OutputStream(write, "[1] ")
    stream.write(b"a\n")
    stream.write(b"b\n")
    os.close(write)
