"""Does every fault of one rank soon end in an error on every rank that names it?

    python benchmarks/faults.py [--json FILE] [--smoke] [--ranks N]

There are two jobs, started by `jaxcross launch`. We inject each fault at every kind of point in a
step of one of them (see `fault_rank.py`). The seconds are measured from the fault to the end of the
command, including its post-mortem. If the fault terminates all ranks, `told_s` is the time from the
fault until each of the other ranks has written its final event.

Then we run the same command again, without the fault. It must resume from the checkpoints, so the
fault must not have damaged them, and it must reach the same values as an undisturbed run. If the
fault only ended one job, or stopped all ranks in an orderly way, the command must resume from
exactly that step.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from workloads import parser, write_json

from jaxcross.report.event_files import read_event_files
from jaxcross.report.post_mortem import first_to_end

POINTS = ("compile", "compute", "exchange", "vote", "checkpoint")
DEADLINE_S = 180.0
SILENCE_S, WATCHDOG_S = 3.0, 40.0  # for each run, if it has the machine to itself
PROMISED_S = {
    "raise": 1.0,
    "memory": 1.0,
    "segv": 3.0,
    "kill": 3.0,
    "exit": 3.0,
    "stop": SILENCE_S + 1,
    "block": SILENCE_S + 1,
}
"""Seconds until all other ranks have named the faulty one: see docs/reference/faults.md."""
LOADED_S = 20.0
"""Extra seconds for a machine that is also doing other work.

The watchdog would still take longer. So if only the watchdog reports a fault, we notice.
"""

Outcome = Literal["leaves", "ends", "stops"]
"""What a fault leads to.

`leaves`: the job leaves on all ranks, and the other job continues. `ends`: every rank ends with an
error that names the faulty rank. `stops`: all ranks stop after the same step, with exit code 143.
"""

FAULTS: dict[str, Outcome] = {
    "raise": "leaves",  # an exception
    "memory": "leaves",  # a failing allocation
    "segv": "ends",  # a segmentation fault
    "kill": "ends",  # `kill -9`, or the kernel's OOM killer
    "exit": "ends",  # the process exits
    "stop": "ends",  # SIGSTOP: the process no longer responds
    "block": "ends",  # C code that holds the GIL forever
    "term": "stops",  # the batch system wants the node back
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        slack: Factor by which everything may take longer than on an otherwise idle machine.
    """

    fault: str
    point: str
    ranks: int
    slack: float = 1.0

    @property
    def outcome(self) -> Outcome:
        # An error in a lane can't be attributed to a job. The lane can't serve any job after it, so
        # all ranks end.
        broken = FAULTS[self.fault] == "leaves" and self.point in ("exchange", "vote")
        return "ends" if broken else FAULTS[self.fault]

    @property
    def where(self) -> str:
        """Pattern for where the faulty rank was, according to the post-mortem.

        A vote covers all jobs, so the post-mortem says which job was active at the time.
        """
        return {
            "compile": r"job 'b', step 0 \(compile\)",
            "compute": r"job 'b', step 3, segment 0 \(compute\)",
            "exchange": r"job 'b', step 3, segment 1 \(exchange\)",
            "carried": r"job 'b', step 3, segment 1 \(exchange\)",
            "vote": r"in vote, (after|alongside) job '[ab]'(,| after) step \d",
            "checkpoint": r"job 'b', step 3 \(checkpoint\)",
        }[self.point]

    @property
    def named(self) -> str:
        """Pattern for what each other rank names along with the faulty rank.

        If the fault is in an exchange, the other ranks wait in the same exchange, so they name it.
        """
        return self.where if self.point in ("exchange", "carried") else r"job '[ab]', step \d"

    @property
    def limit_s(self) -> float:
        """The limit for `told_s` if all ranks end, otherwise for the whole run.

        In the second case, no rank should have waited for the watchdog.
        """
        return self.slack * (
            PROMISED_S[self.fault] + LOADED_S if self.outcome == "ends" else WATCHDOG_S
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a case.

    Attributes:
        code: Exit code of `jaxcross launch`.
        seconds: From the fault to the end.
        told_s: From the fault to the last rank's final event, if all ranks end.
        verdict: The verdict of the post-mortem.
        problems: Deviations from the table.
        output: The output of all ranks.
    """

    case: Case
    code: int
    seconds: float
    told_s: float | None
    verdict: str
    problems: tuple[str, ...]
    output: str


def table(ranks: int) -> list[Case]:
    return [Case(fault=fault, point=point, ranks=ranks) for fault in FAULTS for point in POINTS]


def run_case(case: Case) -> Result:
    """Runs a case, which must end without our help, and then once more without the fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, output = launch(case, folder, case.fault)
        ended_s = time.time()
        hurt = folder / "hurt"
        hurt_s = float(hurt.read_text()) if hurt.exists() else float("nan")
        records = read_event_files(folder / "events")
        said = first_to_end(records)
        problems = list(check(case, code, output, said))
        told_s = None
        if case.outcome == "ends":
            others = [record for record in records if record.rank != case.ranks - 1]
            told_s = max(record.last_s for record in others) - hurt_s
            problems += [
                f"rank {record.rank} has left no last words"
                for record in others
                if not record.exit_kind
            ]
        took_s = ended_s - hurt_s if told_s is None else told_s
        if took_s > case.limit_s:
            problems.append(f"it took {took_s:.0f} s, not {case.limit_s:.0f} at most")
        if not hurt.exists():
            problems.append("the fault did not happen")
        problems += [f"process {r.pid} is left" for r in records if lives(r.pid)]
        problems += check_restart(case, *launch(case, folder, "none"), steps_left(output))
    return Result(
        case=case,
        code=code,
        seconds=ended_s - hurt_s,
        told_s=told_s,
        verdict=said,
        problems=tuple(problems),
        output=output,
    )


def launch(case: Case, folder: Path, fault: str) -> tuple[int, str]:
    """Returns exit code and output of `fault_rank.py` under `jaxcross launch`."""
    line = f"-m jaxcross.cli launch -n {case.ranks} --events {folder / 'events'}"
    program_line = [*line.split(), *program(folder, fault, case.point, case.slack)]
    process = subprocess.Popen(
        [sys.executable, *program_line],
        text=True,
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=case.slack * DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 1, f"{output}\nno end within {case.slack * DEADLINE_S:.0f} s"
    return process.returncode, output


def program(folder: Path, fault: str, point: str, slack: float = 1.0) -> list[str]:
    """Returns the command that each rank runs."""
    script = Path(__file__).with_name("fault_rank.py")
    return [str(script), fault, point, str(folder), str(slack * SILENCE_S), str(slack * WATCHDOG_S)]


def check(case: Case, code: int, output: str, said: str) -> Iterator[str]:
    """Yields the deviations from the table. Pure."""
    victim, others = case.ranks - 1, range(case.ranks - 1)
    if case.outcome == "leaves":
        if code != 0:
            yield f"exit code {code}, not 0"
        for rank in range(case.ranks):
            if not re.search(
                rf"rank {rank} continues: .*'a': 8.*Job `b` failed .*on rank {victim}\b", output
            ):
                yield f"rank {rank} has not gone on without job b"
    elif case.outcome == "stops":
        if code != 143:
            yield f"exit code {code}, not 143"
        steps = {
            rank: re.search(rf"rank {rank} leaves: (\{{.*?\}})", output)
            for rank in range(case.ranks)
        }
        if None in steps.values() or len({m[1] for m in steps.values() if m is not None}) > 1:
            yield f"the ranks have not stopped at the same steps: {steps}"
        elif set(steps_left(output).values()) == {8}:
            yield "all jobs were through: nothing was left to save"
    else:
        if code == 0:
            yield "exit code 0"
        for rank in others:
            notice = re.search(rf"rank {rank} (of \d+ )?ends .*because .*rank {victim}\b.*", output)
            if notice is None or not re.search(case.named, notice[0]):
                yield (
                    f"rank {rank} does not name rank {victim} and {case.named}: "
                    f"{notice and notice[0]}"
                )
        # The post-mortem starts with the faulty rank's activity, followed by what the other ranks
        # were doing at that time.
        own = re.split(r"\. Ranks? [\d, ]+ (?:waited|ended) ", said)[0]
        if not re.match(rf"Rank {victim} (ended|stopped) first", own) or not re.search(
            case.where, own
        ):
            yield f"the post-mortem does not name rank {victim} and {case.where}: {said}"


def lives(pid: int, patience_s: float = 5.0) -> bool:
    """Returns whether a process is still alive after `patience_s` seconds.

    A zombie, whose exit code nobody has collected yet, counts as ended.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def steps_left(output: str) -> dict[str, int]:
    """Returns each job's step at the end, if the ranks ended together. Pure."""
    found = re.search(r"rank 0 (?:leaves|continues): (\{.*?\})", output)
    return {} if found is None else ast.literal_eval(found[1])


def check_restart(case: Case, code: int, output: str, left: Mapping[str, int]) -> Iterator[str]:
    """Yields deviations from an undisturbed run. Pure.

    Each step adds its number, times the job's scale.
    """
    for rank in range(case.ranks):
        if f"rank {rank} ends: {{'a': (8, 36.0), 'b': (8, 72.0)}}" not in output:
            yield (
                f"after the restart, rank {rank} does not finish: exit code {code}: "
                f"{output[-1000:]}"
            )
        begun = {
            job: int(step)
            for job, step in re.findall(rf"rank {rank} begins job (\w) after step (\d+)", output)
        }
        if left and begun != left:
            yield (
                f"after the restart, rank {rank} begins after {begun}, but the jobs were left at "
                f"{left}"
            )
        if not left and case.point != "compile" and not begun.get("b"):
            yield f"after the restart, rank {rank} does not resume from a checkpoint of job b"


def main(arguments: Sequence[str] | None = None) -> int:
    line = parser(__doc__)
    line.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="ranks of each run (default: %(default)s)"
    )
    options = line.parse_args(arguments)
    cases = table(options.ranks)
    if options.smoke:
        cases = [
            case
            for case in cases
            if (case.fault, case.point) in (("kill", "exchange"), ("term", "compute"))
        ]
    results = []
    for case in cases:
        results.append(result := run_case(case))
        state = "; ".join(result.problems) or "ok"
        print(
            f"{case.fault:8}{case.point:12}{case.outcome:8}{result.code:5}{result.seconds:7.1f} s  "
            f"{state}",
            flush=True,
        )
    rows: list[dict[str, Any]] = [
        {
            **asdict(r.case),
            "outcome": r.case.outcome,
            "code": r.code,
            "seconds": round(r.seconds, 2),
            "told_s": None if r.told_s is None else round(r.told_s, 2),
            "limit_s": r.case.limit_s,
            "verdict": r.verdict,
            "problems": list(r.problems),
        }
        for r in results
    ]
    longest = {
        outcome: max((r.seconds for r in results if r.case.outcome == outcome), default=None)
        for outcome in ("leaves", "ends", "stops")
    }
    notified = {
        fault: max(
            (r.told_s for r in results if r.case.fault == fault and r.told_s is not None),
            default=None,
        )
        for fault in FAULTS
    }
    good = sum(not r.problems for r in results)
    print(
        f"{good} of {len(results)} as the table says; longest {longest}; all others notified after "
        f"{notified}"
    )
    write_json(
        options.json,
        __doc__,
        {
            "cases": len(results),
            "as_expected": good,
            "longest_s": longest,
            "told_s": notified,
            "promised_s": PROMISED_S,
            "rows": rows,
        },
    )
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
