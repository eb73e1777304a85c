"""Does every fault of one rank end in an error that names it, on every rank and soon, with no checkpoint damaged?

    python benchmarks/faults.py [--json FILE] [--smoke] [--ranks N]

Each fault is injected at every kind of point of a step of one of two jobs (`fault_rank.py`), under `jaxcross launch`.
Seconds count from the fault to the end of the command, its post-mortem included. Then the same command, without the
fault, must go on from the checkpoints that are there, to the values of a run that nothing happened to.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from workloads import parser, write_json

from jaxcross.report.event_files import read
from jaxcross.report.post_mortem import verdict

POINTS = ("compile", "compute", "exchange", "vote", "checkpoint")
DEADLINE_S = 90.0
SOON_S = 30.0
"""A rank is given up after three seconds of silence; the rest is a machine that does other things as well."""

Outcome = Literal["leaves", "ends", "stops"]
"""`leaves`: the job leaves on all ranks, the other one goes on. `ends`: every rank ends with an error that names the
faulty one. `stops`: all ranks stop after the same step, with exit code 143."""

FAULTS: dict[str, Outcome] = {
    "raise": "leaves",  # an exception
    "memory": "leaves",  # an allocation that fails
    "segv": "ends",  # a segmentation fault
    "kill": "ends",  # `kill -9`, and the kernel's own when memory is out
    "exit": "ends",  # the process ends itself
    "stop": "ends",  # it stops answering: SIGSTOP
    "block": "ends",  # C code that holds the interpreter's lock for ever
    "term": "stops",  # the batch system wants the node
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    fault: str
    point: str
    ranks: int

    @property
    def outcome(self) -> Outcome:
        # In a lane there is no job to blame: a lane that breaks ends all ranks, as it can serve no job any more.
        broken = FAULTS[self.fault] == "leaves" and self.point in ("exchange", "vote")
        return "ends" if broken else FAULTS[self.fault]

    @property
    def where(self) -> str:
        """What the post-mortem must name; a vote is of all jobs, and says which was there before or beside it."""
        return {"compile": r"job 'b', step 0", "vote": r"job '[ab]', step \d"}.get(self.point, r"job 'b', step 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a case.

    Attributes:
        code: Exit code of `jaxcross launch`.
        seconds: From the fault to the end.
        verdict: Of the post-mortem.
        problems: What is not as the table says.
        output: Of all ranks.
    """

    case: Case
    code: int
    seconds: float
    verdict: str
    problems: tuple[str, ...]
    output: str


def table(ranks: int) -> list[Case]:
    return [Case(fault=fault, point=point, ranks=ranks) for fault in FAULTS for point in POINTS]


def run_case(case: Case) -> Result:
    """Runs it to its end, which must come by itself, and once more without the fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, output = launch(case.ranks, folder, case.fault, case.point)
        ended = time.time()
        hurt = folder / "hurt"
        seconds = ended - float(hurt.read_text()) if hurt.exists() else float("nan")
        records = read(folder / "events")
        said = verdict(records)
        problems = list(check(case, code, output, said))
        if seconds > SOON_S:
            problems.append(f"it took {seconds:.0f} s, not {SOON_S:.0f} at most")
        if not hurt.exists():
            problems.append("the fault did not happen")
        problems += [f"process {r.pid} is left" for r in records if lives(r.pid)]
        problems += check_restart(case, *launch(case.ranks, folder, "none", case.point))
    return Result(case=case, code=code, seconds=seconds, verdict=said, problems=tuple(problems), output=output)


def launch(ranks: int, folder: Path, fault: str, point: str) -> tuple[int, str]:
    """Exit code and output of `fault_rank.py` under `jaxcross launch`."""
    script = Path(__file__).with_name("fault_rank.py")
    line = f"-m jaxcross.cli launch -n {ranks} --events {folder / 'events'} {script} {fault} {point} {folder}"
    process = subprocess.Popen(
        [sys.executable, *line.split()], env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 1, f"{output}\nno end within {DEADLINE_S:.0f} s"
    return process.returncode, output


def check(case: Case, code: int, output: str, said: str) -> Iterator[str]:
    """What is not as the table says. Pure."""
    victim, others = case.ranks - 1, range(case.ranks - 1)
    if case.outcome == "leaves":
        if code != 0:
            yield f"exit code {code}, not 0"
        for rank in range(case.ranks):
            if not re.search(rf"rank {rank} goes on: .*'a': 8.*Job `b` failed .*on rank {victim}\b", output):
                yield f"rank {rank} has not gone on without job b"
    elif case.outcome == "stops":
        if code != 143:
            yield f"exit code {code}, not 143"
        steps = {rank: re.search(rf"rank {rank} leaves: (\[.*?\])", output) for rank in range(case.ranks)}
        if None in steps.values() or len({m[1] for m in steps.values() if m is not None}) > 1:
            yield f"the ranks have not stopped at the same steps: {steps}"
    else:
        if code == 0:
            yield "exit code 0"
        for rank in others:
            words = re.search(rf"rank {rank} (of \d+ )?ends .*because .*rank {victim}\b.*", output)
            if words is None or not re.search(r"job '[ab]', step \d+", words[0]):
                yield f"rank {rank} does not name rank {victim}, a job and a step: {words}"
        if not re.match(rf"Rank {victim} (ended|stopped) first", said) or not re.search(case.where, said):
            yield f"the post-mortem does not name rank {victim} and {case.where}: {said}"


def lives(pid: int, patience_s: float = 5.0) -> bool:
    """Whether a process does not end within that time. What nobody has asked for its exit code has ended, too."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def check_restart(case: Case, code: int, output: str) -> Iterator[str]:
    """What is not as in a run that nothing happened to: each step adds its number, times the job's scale. Pure."""
    for rank in range(case.ranks):
        if f"rank {rank} ends: {{'a': (8, 36.0), 'b': (8, 72.0)}}" not in output:
            yield f"started again, rank {rank} does not come to the end: exit code {code}: {output[-1000:]}"
        if case.point != "compile" and f"rank {rank} resumes job b after step" not in output:
            yield f"started again, rank {rank} does not go on from a checkpoint of job b"


def main(arguments: Sequence[str] | None = None) -> int:
    line = parser(__doc__)
    line.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of each run (default: %(default)s)")
    options = line.parse_args(arguments)
    cases = table(options.ranks)
    if options.smoke:
        cases = [case for case in cases if (case.fault, case.point) in (("kill", "exchange"), ("term", "compute"))]
    results = []
    for case in cases:
        results.append(result := run_case(case))
        state = "; ".join(result.problems) or "ok"
        print(
            f"{case.fault:8}{case.point:12}{case.outcome:8}{result.code:5}{result.seconds:7.1f} s  {state}", flush=True
        )
    rows: list[dict[str, Any]] = [
        {**asdict(r.case), "outcome": r.case.outcome, "code": r.code, "seconds": round(r.seconds, 2),
         "verdict": r.verdict, "problems": list(r.problems)} for r in results
    ]  # fmt: skip
    longest = {
        outcome: max((r.seconds for r in results if r.case.outcome == outcome), default=None)
        for outcome in ("leaves", "ends", "stops")
    }
    good = sum(not r.problems for r in results)
    print(f"{good} of {len(results)} as the table says; longest {longest}")
    write_json(options.json, __doc__, {"cases": len(results), "as_expected": good, "longest_s": longest, "rows": rows})
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
