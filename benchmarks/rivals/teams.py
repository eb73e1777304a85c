"""The controller's side of a race: starts teams of processes on a lab's hosts, and commands them.

A team is one program on two hosts. No process outlives the `with` block of its `Stage`, whatever
happens: the stage first asks its teams to end, then the lab is closed, and the kernel kills all
processes that are still in its namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxcross.commands.launch import find_mpirun, python_program
from jaxcross.lab import Lab
from jaxcross.world import malloc
from jaxcross.world.launch_env import MPI_SETTINGS
from rivals.cases import RANKS

HERE = Path(__file__).parent
LAUNCHED_BY_MPI = (
    "fused",
    "crossed",
    "crossed-mpi4py",
    "planned",
    "carried",
    "adapters",
    "swept",
)
WIRES = {"crossed": "mpi4jax", "crossed-mpi4py": "mpi4py"}
"""These teams run the same program, but exchange with different libraries."""
SETTINGS = ("NPROC", "PJRT_NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
FIRST_PORT = 29400
Answers = list[dict[str, Any]]


class TeamError(RuntimeError):
    """A team failed, didn't start, or didn't answer."""


@contextlib.contextmanager
def lab_or_exit(**options: Any) -> Iterator[Lab]:
    """Enters a `Lab`. If this machine doesn't allow such a lab, exits with the reason."""
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(**options))
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None
        yield lab


class Team:
    """The ranks of one program. Made by `Stage.start`."""

    def __init__(self, name: str, processes: Sequence[subprocess.Popen[Any]], log: Path) -> None:
        self.name, self.processes, self.log = name, processes, log
        self.ranks: dict[int, socket.socket] = {}
        self.streams: dict[int, Any] = {}

    def send(self, command: dict[str, Any]) -> None:
        for rank in sorted(self.streams):
            try:
                self.streams[rank].write(json.dumps(command) + "\n")
                self.streams[rank].flush()
            except OSError as error:
                raise self.failure(f"rank {rank} is gone before `{command['do']}`") from error

    def receive(self, what: str, patience_s: float) -> Answers:
        deadline = time.monotonic() + patience_s
        answers = []
        for rank in sorted(self.streams):
            self.ranks[rank].settimeout(max(0.1, deadline - time.monotonic()))
            try:
                line = self.streams[rank].readline()
            except TimeoutError:
                raise self.failure(
                    f"rank {rank} did not answer `{what}` within {patience_s:.0f} s"
                ) from None
            except OSError:
                line = ""
            if not line:
                raise self.failure(f"rank {rank} ended in `{what}`")
            answer = json.loads(line)
            if "error" in answer:
                raise self.failure(f"rank {rank} failed in `{what}`:\n{answer['error']}")
            answers.append(answer)
        return answers

    def failure(self, why: str) -> TeamError:
        said = self.log.read_text(errors="replace").splitlines()[-25:] if self.log.exists() else []
        return TeamError("\n  ".join([f"team `{self.name}`: {why}", *said]))

    def end(self) -> None:
        """Asks the processes to end, and kills those that haven't ended after 5 s."""
        with contextlib.suppress(TeamError):
            self.send({"do": "end"})
        deadline = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (*self.streams.values(), *self.ranks.values()):
            with contextlib.suppress(OSError):
                stream.close()


class Stage:
    """Runs teams on a lab's hosts. A context manager that ends every team when it exits.

    Args:
        lab: An entered lab.
        folder: The folder for log files.
        patience_s: How long to wait for an answer, or for a team to start.
        keeps_memory: Whether processes keep freed memory, in large pages, as they do under
            `jaxcross launch`.
    """

    def __init__(
        self, lab: Lab, folder: Path, *, patience_s: float = 900.0, keeps_memory: bool = True
    ) -> None:
        self.lab, self.folder, self.patience_s, self._keeps_memory = (
            lab,
            folder,
            patience_s,
            keeps_memory,
        )
        self.teams: dict[str, Team] = {}
        self._ports = iter(range(FIRST_PORT, FIRST_PORT + 200))
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Self:
        # We ignore TMPDIR here, because the path of a Unix socket is limited to 107 characters.
        self._home = tempfile.TemporaryDirectory(prefix="race-", dir="/tmp")
        self._path = Path(self._home.name) / "socket"
        self._server.bind(str(self._path))
        self._server.listen()
        self._server.settimeout(0.5)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._server.close()
        self._home.cleanup()

    def end(self, kind: str | None = None) -> None:
        """Ends all teams, or those of one kind."""
        for name in [name for name in self.teams if kind in (None, name.split("/")[0])]:
            self.teams.pop(name).end()

    def start(
        self, kind: str, case: str, *, job: int | None, smoke: bool, image_size: int | None = None
    ) -> Team:
        """Starts a kind's program on the hosts, and waits until all of its ranks have said hello.

        Raises:
            TeamError: A rank didn't say hello. The message quotes the end of the team's log.
        """
        name = kind if job is None else f"{kind}/{job}"
        log = self.folder / f"{name.replace('/', '-')}.log"
        program = [
            str(HERE / f"{kind.split('-')[0]}.py"),
            "--socket",
            str(self._path),
            "--team",
            name,
            "--case",
            case,
        ]
        program += ["--smoke"] if smoke else []
        program += [] if job is None else ["--job", str(job)]
        program += [] if image_size is None else ["--image-size", str(image_size)]
        environment = self.lab.environment(_plain_environment(smoke, self._keeps_memory))
        if kind in WIRES:
            environment["JAXCROSS_WIRE"] = WIRES[kind]
        with log.open("wb") as out:
            options: dict[str, Any] = dict(
                env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
            team = Team(
                name,
                [subprocess.Popen(line, **options) for line in self._lines(kind, program)],
                log,
            )
        self.teams[name] = team
        self._await_hello(team)
        return team

    def _lines(self, kind: str, program: list[str]) -> list[list[str]]:
        if kind in LAUNCHED_BY_MPI:
            mpirun = find_mpirun()
            if mpirun is None:
                raise TeamError("no `mpirun` was found: `pip install mpich`")
            return [self.lab.wrap([mpirun.path, "-n", str(RANKS), *python_program(program)])]
        port = str(next(self._ports))
        return [
            self.lab.wrap_host(
                rank, [sys.executable, *program, "--rank", str(rank), "--port", port]
            )
            for rank in range(RANKS)
        ]

    def _await_hello(self, team: Team) -> None:
        deadline = time.monotonic() + self.patience_s
        while len(team.ranks) < RANKS:
            if any(process.poll() is not None for process in team.processes):
                raise team.failure("a process ended before its rank said hello")
            if time.monotonic() > deadline:
                raise team.failure(
                    f"only {len(team.ranks)} of {RANKS} ranks said hello in {self.patience_s:.0f} s"
                )
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            connection.settimeout(10)
            stream = connection.makefile("rw", encoding="utf-8")
            hello = json.loads(stream.readline())
            if hello.get("team") != team.name or hello["host"] != f"h{hello['rank']}":
                raise team.failure(f"a stranger said hello, or a rank on the wrong host: {hello}")
            team.ranks[hello["rank"]], team.streams[hello["rank"]] = connection, stream

    def ask(self, teams: Team | Iterable[Team], do: str, **facts: Any) -> Answers:
        """Sends a command to all ranks of some teams at once, and waits for their answers.

        Returns:
            The answers, sorted by team and then by rank.

        Raises:
            TeamError: A rank failed, or didn't answer in time.
        """
        teams = [teams] if isinstance(teams, Team) else list(teams)
        for team in teams:
            team.send({"do": do, **facts})
        return [answer for team in teams for answer in team.receive(do, self.patience_s)]


def _plain_environment(smoke: bool, keeps_memory: bool) -> dict[str, str]:
    """Returns the environment for all teams, which must not favour any of them.

    We start from the caller's environment, and remove the variables that would change the size of
    thread pools or the compiled code, or that point to stored cuts. All teams get the same MPI
    settings. Toy models are compiled without optimisation.
    """
    plain = MPI_SETTINGS | {k: v for k, v in os.environ.items() if k not in SETTINGS}
    plain |= malloc.settings(plain) if keeps_memory else {}
    return {**plain, "XLA_FLAGS": "--xla_backend_optimization_level=0"} if smoke else plain
