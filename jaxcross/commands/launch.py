"""`jaxcross launch -n 2 script.py ...`: starts ranks with this environment's `mpirun`.

If a rank dies, the other ranks are kept alive long enough to report what they were waiting for.
Once everything has ended, you get a post-mortem that says what each rank was doing. With
`--max-restarts`, the run is then restarted and resumes from its checkpoints.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxcross._files import TIME, start_time, with_time
from jaxcross._processes import related
from jaxcross.commands import end_with
from jaxcross.commands.hosts import (
    agent_of,
    is_here,
    missing_hosts,
    parse_hosts,
    start_text,
    unreachable_hosts,
)
from jaxcross.commands.restart_decision import is_explained, stop_text
from jaxcross.commands.restart_loop import Ended, RunFiles, latest_run, run_until_over
from jaxcross.errors import quoted

if TYPE_CHECKING:
    from jaxcross.commands.live_table import LaunchTable
    from jaxcross.report import RankRecord

SUPERVISOR = Path(__file__).with_name("rank_supervisor.py")
RANK = "jaxcross.commands.rank"
HOLD_S = 40
"""How many seconds a dead rank's supervisor lives on, which keeps `mpirun` from terminating the
other ranks. They need 3 s to report a missing rank, or 30 s if it was on another host.
"""

NO_MPIRUN = "No `mpirun` was found. Remedy: `pip install mpich`, or load your MPI module."

_BY_SIGNAL = 128
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mpirun:
    """A launcher on this machine. The vendor is `mpich`, `openmpi`, `intel` or `unknown`."""

    path: str
    vendor: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `launch` to the command line."""
    parser = subparsers.add_parser(
        "launch", help="start a script on several MPI ranks", description=__doc__
    )
    add_options(parser)
    add_output_options(parser)
    add_restart_options(parser)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="a module and its arguments, not a script",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script.py and its arguments")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options shared by all commands that start ranks."""
    parser.add_argument(
        "-n", "--ranks", type=int, default=2, help="number of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and do not run it"
    )
    parser.add_argument(
        "--events",
        type=_folder,
        metavar="DIR",
        help="folder for the ranks' event files (default: temporary, removed if all is well)",
    )
    parser.add_argument(
        "--hosts", metavar="A,B", help="hosts that share the ranks equally (default: this machine)"
    )
    parser.set_defaults(max_restarts=0, tag=False, log_dir=None)


def _folder(text: str) -> Path:
    if not text:  # e.g. an unset variable of a shell; `Path("")` would be the working directory
        raise argparse.ArgumentTypeError(
            "the name of the folder is empty. Name a folder, or `.` for the working directory."
        )
    return Path(text)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the ranks' output, shared by the commands that train."""
    parser.add_argument(
        "--tag", action="store_true", help="begin each line of output with its rank, as `[1] `"
    )
    parser.add_argument(
        "--log-dir",
        type=_folder,
        metavar="DIR",
        help=(
            "also write the output of rank N to `DIR/attempt-1/rank-N.log`; a restart or a later "
            "run with the same folder writes to `attempt-2`, and so on"
        ),
    )


def add_restart_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options shared by the commands that can restart a run."""
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help=(
            "after a lost rank or host, restart the run from its checkpoints; give up after N "
            "restarts in a row without a new checkpoint (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--same-ranks",
        action="store_true",
        help="wait for a lost host even if fewer ranks could resume the run",
    )
    parser.add_argument(
        "--host-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for a host (%(default)s)",
    )


def run(args: argparse.Namespace, variables: Mapping[str, str] | None = None) -> int:
    """Prints the `mpirun` command, runs it, and returns its exit code.

    If the run fails, prints a post-mortem of what each rank was doing and which of them ended
    first. With `--max-restarts`, `jaxcross.commands.restart_decision` then decides whether to
    restart the run.

    Args:
        args: The command line.
        variables: Environment variables for the ranks, on top of this process's own. If there are
            any, no live table is shown.
    """
    start = prepared(args)
    return start if isinstance(start, int) else start(variables or {})


def prepared(args: argparse.Namespace) -> int | Callable[[Mapping[str, str]], int]:
    """Checks the command line and returns a function that runs it like `run`.

    If it can't be run, prints the reason and returns an exit code instead.
    """
    program = ["-m", *args.module] if args.module else args.program
    program = program[1:] if program[:1] == ["--"] else program
    try:
        hosts = _checked(args, program)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    mpirun = find_mpirun()
    if mpirun is None:
        print(NO_MPIRUN, file=sys.stderr)
        return 1
    starts_once = not args.dry_run and args.max_restarts == 0
    missing = unreachable_hosts(hosts, os.environ) if starts_once else []
    if missing:
        names = quoted(missing)
        remedy = (
            f"Check the name and the network: `{' '.join(agent_of(os.environ))} {missing[0]} true` "
            "must work here."
        )
        print(
            f"`--hosts`: {names} cannot be reached, so no rank is started. {remedy}",
            file=sys.stderr,
        )
        return 1
    return partial(_start, args, program, hosts, mpirun)


def _start(
    args: argparse.Namespace,
    program: Sequence[str],
    hosts: Sequence[str],
    mpirun: Mpirun,
    variables: Mapping[str, str],
) -> int:
    started = {TIME: start_time()}
    folder = args.events or os.environ.get("JAXCROSS_EVENTS") or None
    # We need to read event files written by ranks on other hosts. Those hosts can't see a temporary
    # folder in this machine's /tmp, so put it in the working directory: if the hosts share any
    # folder with this machine, it's that one.
    where = Path.cwd() if hosts else None
    try:
        events = with_time(folder or "jaxcross-events", started)
        logs = None if args.log_dir is None else with_time(args.log_dir, started).absolute()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    def run_once(hosts: Sequence[str]) -> Ended:
        return _run_once(
            args,
            program,
            mpirun,
            hosts,
            events,
            named=folder is not None,
            logs=logs,
            variables={**started, **variables},
            draw=not variables,
        )

    made = folder is None and not args.dry_run
    with terminable():
        try:
            if made:
                events = Path(tempfile.mkdtemp(prefix="jaxcross-events-", dir=where))
            ended = run_until_over(args, hosts, run_once)
        except (KeyboardInterrupt, SystemExit):  # raised before or between runs
            if made:
                with suppress(OSError):
                    events.rmdir()  # fails if there are files in it, as it should
            raise
    if made and (ended.code == 0 or ended.explained or not ended.records):
        shutil.rmtree(events, ignore_errors=True)
    return ended.code


@contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into an exception, so we get to stop processes and remove temporary files."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(_BY_SIGNAL + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _checked(args: argparse.Namespace, program: Sequence[str]) -> tuple[str, ...]:
    """Checks the arguments and returns the list of hosts."""
    if args.ranks < 1:
        raise ValueError(f"`-n` must be at least 1 rank, got {args.ranks}.")
    if not program:
        raise ValueError(f"Name the script to start: `jaxcross launch -n {args.ranks} train.py`.")
    if args.max_restarts < 0:
        raise ValueError(f"`--max-restarts` must be at least 0, got {args.max_restarts}.")
    if (args.tag or args.log_dir is not None) and sys.platform != "linux":
        raise ValueError("`--tag` and `--log-dir` need Linux. Leave them out.")
    hosts = parse_hosts(args.hosts) if args.hosts is not None else ()
    if hosts and args.ranks % len(hosts):
        raise ValueError(
            f"`-n {args.ranks}` must be a multiple of the {len(hosts)} hosts, which share the "
            "ranks equally."
        )
    elsewhere = hosts or args.dry_run  # the script may exist only over there
    if not elsewhere:
        why = _missing_module(args.module[0]) if args.module else _missing_script(program[0])
        if why:
            raise ValueError(why)
    return hosts


def _missing_script(name: str) -> str:
    """Returns the reason why Python can't run this script, or "" if it can."""
    if not Path(name).exists():
        return f"There is no script `{name}` in `{Path.cwd()}`."
    if Path(name).is_dir() and not Path(name, "__main__.py").exists():
        return (
            f"`{name}` is a folder. Name the script in it, as `{Path(name, 'train.py')}`, or give "
            "it a `__main__.py`."
        )
    return ""


def _missing_module(name: str) -> str:
    """Returns why `python -m` can't run this module, or "" if it can. Doesn't import anything."""
    top, *inner = name.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top)
    for n, part in enumerate(inner):
        places = None if spec is None else spec.submodule_search_locations
        inside = ".".join([top, *inner[:n], part])
        spec = None if places is None else PathFinder.find_spec(inside, places)
    if spec is None:
        return (
            f"There is no module `{name}`, neither in `{Path.cwd()}` nor installed for "
            f"`{sys.executable}`. For a script, leave out `-m`."
        )
    places = spec.submodule_search_locations
    if places is not None and PathFinder.find_spec(f"{name}.__main__", places) is None:
        return (
            f"`{name}` is a package without a `__main__.py`. Name a module in it, as `-m "
            f"{name}.train`."
        )
    return ""


def _run_once(
    args: argparse.Namespace,
    program: Sequence[str],
    mpirun: Mpirun,
    hosts: Sequence[str],
    events: Path,
    *,
    named: bool,
    logs: Path | None,
    variables: Mapping[str, str],
    draw: bool,
) -> Ended:
    """Prints the command for these hosts, runs it once, and explains how it ended.

    After a restart, `hosts` can be a subset of those that `--hosts` names.
    """
    from jaxcross.commands import live_table
    from jaxcross.report import screen_width
    from jaxcross.world import START_CHECKS, xla_pool

    notes = {"JAXCROSS_EVENTS": str(events), **variables}
    if "PYTHONFAULTHANDLER" not in os.environ:
        notes["PYTHONFAULTHANDLER"] = "1"  # prints the Python stack after a segmentation fault
    ranks = args.ranks // len(args.hosts.split(",")) * len(hosts) if hosts else args.ranks
    attempt = None if logs is None else next_attempt(logs)
    if attempt is not None and not args.dry_run:
        try:
            attempt.mkdir(parents=True)
        except OSError as error:
            print(
                f"`--log-dir`: the folder `{attempt}` can't be created: {error.strerror}.",
                file=sys.stderr,
            )
            return Ended(code=1)
    line, extra = mpirun_command(
        mpirun=mpirun,
        ranks=ranks,
        program=supervised(python_program(program), tag=args.tag, logs=attempt),
        root=os.geteuid() == 0,
        cores=xla_pool.cores(),
        environ={**os.environ, **notes},
        hosts=hosts,
    )
    extra |= {name: value for name, value in notes.items() if named or name != "JAXCROSS_EVENTS"}
    print(printed(line, extra), flush=True)
    text = "" if hosts else crowded(ranks, xla_pool.cores())
    if text:
        print(f"jaxcross launch: {text}", file=sys.stderr, flush=True)
    if args.dry_run:
        return Ended(code=0)
    if attempt is not None:
        text = f"the output of each rank is also written to `{attempt}`."
        print(f"jaxcross launch: {text}", file=sys.stderr, flush=True)
    files = RunFiles(events=events, earlier=latest_run(events), hosts=hosts, ranks=ranks)
    environ = {**os.environ, **extra, **notes}
    columns = screen_width(os.environ)
    if columns and "COLUMNS" not in environ:
        environ["COLUMNS"] = str(columns)  # ranks write to a pipe, so they can't tell the width
    console = live_table.terminal(os.environ) if draw else None
    if console is None:
        with live_table.start_lines(events, ranks, os.environ):
            code, stops = _run(line, environ, mpirun.vendor, files=files)
    else:
        environ["JAXCROSS_PROGRESS"] = "0"
        with live_table.LaunchTable(console, events, ranks) as table:
            code, stops = _run(line, environ, mpirun.vendor, table, files=files)
    records = files.read() if code else []
    text = stop_text(code, stops, records)
    if text:
        print(f"jaxcross launch: {text}.", file=sys.stderr, flush=True)
    elif code and hosts and not records:
        agent = agent_of(os.environ)
        text = start_text(
            hosts, missing_hosts([h for h in hosts if not is_here(h)], agent), agent, START_CHECKS
        )
        print(f"jaxcross launch: {text}.", file=sys.stderr, flush=True)
    explained = bool(text) or is_explained(code, records)
    if not explained:
        _explain(records, events)
    return Ended(code=code, stopped=stops > 0, records=records, explained=explained)


def _explain(records: Sequence[RankRecord], events: Path) -> None:
    """Prints the post-mortem and where to find the event files."""
    from jaxcross.commands.post_mortem_table import show
    from jaxcross.report import read_event_files

    if not records:
        with suppress(OSError):
            events.rmdir()  # fails unless it is empty
        return
    skipped: dict[int, str] = {}
    with suppress(OSError, ValueError):
        read_event_files(events, skipped=skipped)
    show(records, sys.stderr, skipped)
    print(
        "The event files are kept, because no rank has reported why it ended. To see this table "
        "again: jaxcross doctor "
        f"--post-mortem {shlex.quote(str(events))}",
        file=sys.stderr,
        flush=True,
    )


def _run(
    line: Sequence[str],
    environ: Mapping[str, str],
    vendor: str,
    table: LaunchTable | None = None,
    *,
    files: RunFiles | None = None,
) -> tuple[int, int]:
    """Runs `mpirun` and forwards signals to the ranks.

    Returns the exit code of `mpirun` (128 + n if signal n stopped it) and the number of stop
    signals we've received. With several hosts, losing a rank can leave `mpirun` stuck, in which
    case we kill it.

    On Ctrl-C, the terminal signals every process running in it, whereas a batch system usually only
    signals this one. Either way, the ranks should receive the signal exactly once, so we run
    `mpirun` in its own session, out of reach of the terminal's signals, and forward each signal
    ourselves.

    Open MPI's `mpirun` needs special treatment: it kills the ranks one second after receiving any
    signal, even if they're in the middle of writing a checkpoint. So instead of `mpirun` itself, we
    signal the ranks. On this machine those are its children; on other hosts, we go through the
    agent (e.g. `ssh`).
    """
    spared = vendor == "openmpi"
    remote = files if files is not None and files.hosts else None
    processes: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that arrived before `mpirun` was started
    stops: list[int] = []

    def forward(number: int) -> None:
        if number not in (
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):  # those mean whatever the ranks want them to
            stops.append(number)
            if not processes:
                early.append(number)
        for process in processes:
            if (
                spared and remote is not None and remote.signal(number)
            ):  # don't signal its children, which are the agents that run the ranks on other hosts
                continue
            ranks = related(process.pid) if spared else []
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not ranks:
                process.send_signal(number)

    # Map each incoming signal to the one we send to the ranks. Closing the terminal (SIGHUP) or
    # pressing Ctrl-\ (SIGQUIT) has the same effect as SIGTERM.
    forwarded = {n: n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    forwarded[signal.SIGHUP] = signal.SIGTERM
    forwarded[signal.SIGQUIT] = signal.SIGTERM
    before = {
        number: signal.signal(number, lambda *_, passed=passed: forward(passed))
        for number, passed in forwarded.items()
        if signal.getsignal(number) != signal.SIG_IGN  # as is the case under nohup
    }
    try:
        out = None if table is None else table.pipe(sys.stdout)
        err = None if table is None else table.pipe(sys.stderr)
        tied = end_with.tied(line, os.getpid())
        processes.append(
            subprocess.Popen(tied, env=environ, start_new_session=True, stdout=out, stderr=err)
        )
        if table is not None:
            table.follow(processes[0])
        for number in early:
            processes[0].send_signal(number)
        code = _wait(processes[0], remote)
        # If a signal stopped the run, the exit code should be 128 + the signal's number. `mpirun`
        # often gets this wrong, so fix it up here: Open MPI merely reports that some rank had a
        # nonzero exit code, while MPICH returns 15 if SIGTERM arrived before its handler was
        # installed, and 255 if a second Ctrl-C made it kill the ranks.
        if stops and code and (spared or code == stops[0] or len(stops) > 1):
            code = _BY_SIGNAL + stops[0]
        return code if code >= 0 else _BY_SIGNAL - code, len(stops)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], remote: RunFiles | None) -> int:
    """Waits for `mpirun` and returns its status. If it's stuck, kills it and its children."""
    while remote is not None:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        if remote.is_stuck():
            for pid in (*related(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            break
    return process.wait()


def python_program(program: Sequence[str]) -> list[str]:
    """Returns the command that runs a script on a rank.

    We run the script under mpi4py's runner (`python -m mpi4py`) for the sake of scripts in which a
    single rank calls `sys.exit(1)`. Without the runner, the other ranks could wait for that rank
    forever; with it, all ranks exit with the same code.
    """
    return [sys.executable, "-m", RANK, *program]


def supervised(
    program: Sequence[str], *, tag: bool = False, logs: Path | None = None, hold_s: int = HOLD_S
) -> list[str]:
    """Returns a command that runs a rank's command under a supervisor.

    If the rank dies, the supervisor keeps `mpirun` from terminating the others right away.

    Args:
        program: The command.
        tag: Whether each line of output begins with the rank.
        logs: The folder for the log files, if any.
        hold_s: For how many seconds `mpirun` doesn't notice that a rank has died.
    """
    if sys.platform != "linux":
        return list(program)
    options = ["--tag"] * tag
    if logs is not None:
        options.append(f"--log={logs}")
    return [sys.executable, "-I", "-S", str(SUPERVISOR), *options, str(hold_s), *program]


def next_attempt(logs: Path) -> Path:
    """Returns the next folder `attempt-N` in a folder of logs, which needn't exist."""
    taken = [
        int(found[1])
        for path in logs.glob("attempt-*")
        if (found := re.fullmatch(r"attempt-(\d+)", path.name))
    ]
    return logs / f"attempt-{max(taken, default=0) + 1}"


def mpirun_command(
    *,
    mpirun: Mpirun,
    ranks: int,
    program: Sequence[str],
    root: bool,
    cores: int,
    environ: Mapping[str, str],
    hosts: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """Returns the launch command and the variables to add to the environment. Pure.

    Args:
        mpirun: The launcher.
        ranks: Number of ranks, either all on this machine or divided equally among `hosts`.
        program: The command that each rank runs.
        root: Whether we're running as root, which Open MPI only allows with two extra settings.
        cores: Number of cores that the ranks share.
        environ: The environment. Variables that the user has already set are left alone.
        hosts: The hosts to start the ranks on, in this order; empty for this machine.
    """
    from jaxcross.world import MPI_SETTINGS, malloc, xla_pool

    line = [mpirun.path, "-n", str(ranks)]
    extra: dict[str, str] = {}
    if mpirun.vendor == "openmpi":
        extra |= MPI_SETTINGS
        # By default, Open MPI may bind each rank to a single core. A rank waiting for an exchange
        # polls, i.e. it busy-waits until the exchange is done. On a single core, that would steal
        # time from its own computation.
        line += ["--bind-to", "none"]
        if root:
            extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if ranks > cores:
            extra["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
            extra["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if not any(environ.get(v) for v in ("NPROC", "PJRT_NPROC")):
        extra["PJRT_NPROC"] = str(xla_pool.needed(cores))
    extra |= malloc.settings(environ)
    line[1:1] = _placement(
        mpirun.vendor, ranks, hosts, [*extra, *(n for n in _TO_HOSTS if n in environ)]
    )
    return [*line, *program], {k: v for k, v in extra.items() if k not in environ}


_TO_HOSTS = (
    "JAXCROSS_EVENTS",
    "JAXCROSS_TIME",
    "JAXCROSS_LINK",
    "PYTHONFAULTHANDLER",
    "NPROC",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
)


def _placement(
    vendor: str, ranks: int, hosts: Sequence[str], variables: Collection[str]
) -> list[str]:
    """Returns the `mpirun` options that name the hosts.

    MPICH passes on the whole environment to the hosts, whereas Open MPI only passes on the
    variables we list.
    """
    if not hosts:
        return []
    share = ranks // len(hosts)
    if vendor == "openmpi":
        passed = [
            word
            for name in variables
            if not name.startswith(("OMPI_", "PRTE_"))
            for word in ("-x", name)
        ]
        return ["--host", ",".join(f"{host}:{share}" for host in hosts), *passed]
    return ["-hosts", ",".join(hosts), "-ppn", str(share)]


def shared_accelerator(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that let the ranks of this machine share a GPU.

    By default, every JAX process grabs three quarters of the GPU's memory on startup. If ranks
    share a GPU, that doesn't leave enough for the second.
    """
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    return {name: "false"} if Path("/dev/nvidiactl").exists() and name not in environ else {}


def crowded(ranks: int, cores: int, option: str = "-n") -> str:
    """Returns a warning if there are more ranks than cores on this machine, otherwise "". Pure.

    Args:
        ranks: Number of ranks.
        cores: Number of cores.
        option: What the user has written before the number of ranks.
    """
    if ranks <= cores:
        return ""
    return (
        f"{ranks} ranks share {cores} core{'s' * (cores > 1)}, so they can't all compute at the "
        "same time, and wait for one another in every exchange. The results are correct, but "
        f"don't rely on the times. For one core per rank, use `{option} {cores}`."
    )


def printed(line: Sequence[str], extra: Mapping[str, str]) -> str:
    """Formats the command the way a user would type it."""
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in extra.items()), shlex.join(line)])


def find_mpirun() -> Mpirun | None:
    """Returns the `mpirun` next to this Python, or else the first on PATH, and its vendor."""
    neighbour = Path(sys.executable).parent / "mpirun"
    path = (
        str(neighbour) if neighbour.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    )
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Mpirun(path=path, vendor="unknown")
    return Mpirun(path=path, vendor=vendor_of_mpirun(done.stdout + done.stderr))


def vendor_of_mpirun(version: str) -> str:
    """Identifies the vendor from the output of `mpirun --version`. Pure."""
    text = version.lower()
    marks = {"open mpi": "openmpi", "openrte": "openmpi", "prte": "openmpi", "intel": "intel"}
    found = next((vendor for mark, vendor in marks.items() if mark in text), None)
    return found or ("mpich" if "hydra" in text or "mpich" in text else "unknown")
