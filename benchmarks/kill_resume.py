"""Does training that is killed at random moments and resumed end in the same state bit for bit?

    python benchmarks/kill_resume.py [--trials N] [--ranks N ...] [--seed N] [--json FILE]
        [--resume] [--smoke]

In each trial, we disturb one rank a few times, in one of two ways:
  kill       SIGKILL, at a random step, fsync or deletion, or at a random moment while a checkpoint
             is being written
  interrupt  SIGINT, at a step; all ranks then stop in an orderly way, so interrupts are counted
             separately
After a kill, the launcher terminates the other ranks. We restart the whole run until it completes.
Then we compare its states, steps, losses, best states and metrics files with those of a run that is
never disturbed and saves no checkpoints. FILE is written after each trial. With `--resume`, the
trials that FILE already has are skipped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workloads import kept, parser, write_json

from jaxcross.commands.launch import find_mpirun, mpirun_command
from jaxcross.world import xla_pool

WORKER = Path(__file__).with_name("kill_resume_worker.py")
KILLS = 4  # at most, per trial


def start(folder: Path, ranks: int, kill: dict[str, Any] | None) -> int:
    """Runs the worker on `ranks` ranks until it or the launcher ends. Returns the exit code."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / f"compiled-{ranks}")}
    cache |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environ = {**os.environ, **cache, "KILL": json.dumps(kill or {})}
    line, extra = [sys.executable, str(WORKER), str(folder)], {}
    if ranks > 1:
        mpirun = find_mpirun()
        if mpirun is None:
            raise SystemExit("no `mpirun`: `--ranks 1` needs none")
        line, extra = mpirun_command(
            mpirun=mpirun,
            ranks=ranks,
            program=line,
            root=os.geteuid() == 0,
            cores=xla_pool.cores(),
            environ=environ,
        )
    with (folder / "log.txt").open("a") as log:
        log.write(f"--- {environ['KILL']}\n")
        log.flush()
        return subprocess.run(
            line, env={**extra, **environ}, timeout=300, stdout=log, stderr=log, check=False
        ).returncode


def finals(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"final-{rank}.json").read_text()) for rank in range(ranks)]


def logged(folder: Path) -> dict[str, list[Any]]:
    """Returns the lines of all jobs' metrics, sorted and without the time."""
    found = {
        path.name: map(json.loads, path.read_text().splitlines())
        for path in (folder / "metrics").glob("*.jsonl")
    }
    return {
        name: sorted(sorted((line | {"time": 0}).items()) for line in lines)
        for name, lines in found.items()
    }


def best_evaluation(folder: Path, job: str) -> int:
    """Returns the first step with the best score."""
    lines = map(json.loads, (folder / "metrics" / f"{job}.jsonl").read_text().splitlines())
    return -max((line["eval/score"], -line["step"]) for line in lines if "eval/score" in line)[1]


def a_kill(rng: random.Random, ranks: int) -> dict[str, Any]:
    at = rng.choice(["step", "step", "sync", "sync", "write", "delete", "interrupt"])
    most = {"step": 60, "sync": 90, "write": 9, "delete": 8, "interrupt": 60}[at]
    delay_s = 0.0 if at in ("sync", "step", "interrupt") else rng.uniform(0, 0.06)
    return {
        "rank": rng.randrange(ranks),
        "at": at,
        "count": rng.randint(1, most),
        "delay_s": delay_s,
    }


def trial(folder: Path, ranks: int, seed: int, expected: list[Any]) -> dict[str, Any]:
    """Kills and restarts a run until it completes."""
    rng = random.Random(seed)
    kills = [a_kill(rng, ranks) for _ in range(rng.randint(1, KILLS))]
    folder.mkdir()
    died = []
    for kill in [*kills, None]:
        code = start(folder, ranks, kill)
        if code == 0:
            break
        if kill is None:
            raise SystemExit(f"a run that nobody killed failed: see {folder / 'log.txt'}")
        died.append(kill)
    same = logged(folder) == logged(folder.parent / f"never-{ranks}")
    for mine, theirs in zip(finals(folder, ranks), expected, strict=True):
        for job, end in mine.items():
            same &= all(end[key] == theirs[job][key] for key in ("digest", "step", "how"))
            same &= all(
                theirs[job]["digests"][step] == digest for step, digest in end["digests"].items()
            )
            best_step, best = end["best"]
            same &= (best_step, best) == (
                best_evaluation(folder, job),
                theirs[job]["digests"][str(best_step)],
            )
            same &= all(
                theirs[job]["history"][step] == loss for step, loss in end["history"].items()
            )
    return {"ranks": ranks, "seed": seed, "kills": died, "equal": same}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trials", type=int, default=25, help="for each number of ranks")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--seed", type=int, default=0, help="of the first trial")
    options.add_argument(
        "--resume", action="store_true", help="add the trials that FILE does not hold yet"
    )
    args = options.parse_args()
    rows: list[dict[str, Any]] = kept(args.json if args.resume else None, {"rows": []})["rows"]
    done = {(row["ranks"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as text:
        work = Path(text)
        for ranks in args.ranks:
            seeds = range(args.seed, args.seed + (1 if args.smoke else args.trials))
            wanted = [seed for seed in seeds if (ranks, seed) not in done]
            expected = never_killed(work / f"never-{ranks}", ranks) if wanted else []
            for seed in wanted:
                rows.append(trial(work / f"{ranks}-{seed}", ranks, seed, expected))
                print(json.dumps(rows[-1]), flush=True)
                write_json(args.json, __doc__, counted(rows))
    result = counted(rows)
    print(
        (
            "{survived} of {trials} trials, killed {kills} times and interrupted {interrupts} "
            "times in all, ended in the same bits"
        ).format(**result)
    )
    if result["survived"] < result["trials"]:
        raise SystemExit(1)


def never_killed(folder: Path, ranks: int) -> list[Any]:
    """Returns the final results of each rank in a run that is never killed."""
    folder.mkdir()
    if start(folder, ranks, {"rank": -1, "at": "reference"}):
        raise SystemExit((folder / "log.txt").read_text())
    return finals(folder, ranks)


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows, with the number of trials, kills and interrupts."""
    ways = [kill["at"] for row in rows for kill in row["kills"]]
    interrupts = ways.count("interrupt")
    survived = sum(row["equal"] for row in rows)
    return {
        "trials": len(rows),
        "survived": survived,
        "kills": len(ways) - interrupts,
        "interrupts": interrupts,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
