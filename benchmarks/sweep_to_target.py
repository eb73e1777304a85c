"""How long does a sweep take until its trials have reached their target, and how much CPU time?

    python benchmarks/sweep_to_target.py [--rate 500mbit] [--concurrent 3] [--repeats 2]
        [--ways one,crossover,ddp,ddp-k] [--json FILE] [--png FILE] [--draw] [--smoke]

The sweep has 12 trials (four learning rates, each with three values of momentum), in which a ResNet
learns handwritten digits on two hosts with one core each and a real link between them. A trial ends
once it has reached the target on held-out images, or has used up its steps. The trial that reaches
the target after the fewest steps wins. The sizes are in `rivals/digits.py`. We run the same sweep
in four ways:
  one        jaxcross, one trial after the other
  crossover  jaxcross, with `--concurrent` trials in crossover
  ddp        PyTorch DDP with gloo, one trial after the other
  ddp-k      PyTorch DDP with gloo, with `--concurrent` trials at once. Each of them runs in its own
             processes, which take the next trial as soon as one has ended.
All of them begin with the same weights, get the same batches in the same order, and use SGD with
momentum. What differs between JAX and PyTorch is whether the running variance is biased, and
rounding. If PyTorch isn't installed, its ways are left out, and a line says so.

Each repeat runs every way once, and every other repeat goes backwards. All processes are started
for each way again, so its times include imports and compilation:
  s           From the command that starts the first process to the result of the last trial.
  start_up_s  The part of it until a first step has ended.
  cpu_s       The CPU time of the processes on the hosts, from their start to their last result. The
              time in which the kernel handles packets isn't included. MPI polls while it waits,
              i.e. uses CPU time, whereas gloo sleeps.
The hosts' processes have the same settings in all ways, as in `race.py`: one thread that computes,
and memory that's kept. DDP gets buckets of a quarter of the model, because with its usual 25 MB, it
couldn't overlap the exchange of such a small model with its backward pass.

The losses, accuracies and final states of `one` and `crossover` must be bitwise identical, in all
repeats. Otherwise the benchmark fails. FILE is written after each way. `--draw` draws what FILE has
without measuring anything.
"""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import race_file
import sweep_to_target_show
from ended import ends_on_signals
from parts import words
from race_bounds import needed_bytes
from rivals import digits
from rivals.cases import RANKS
from rivals.teams import Stage, lab_or_exit
from sweep_to_target_show import WAYS
from workloads import kept, parser, write_json

from jaxcross.lab import Lab


def main() -> int:
    args = options()
    if args.draw:
        sweep_to_target_show.draw(kept(args.json, EMPTY), args.png)
        return 0
    sweep = digits.sweep_of(args.smoke)
    result: dict[str, Any] = {
        **EMPTY,
        "versions": race_file.versions_of(race_file.PACKAGES),
        "sweep": {**asdict(sweep), "held_out": digits.HELD_OUT, "trials": sweep.trials()},
        "concurrent": args.concurrent,
        "rows": [],
    }
    ways = args.ways
    if importlib.util.find_spec("torch") is None:
        result["left_out"] = {way: "PyTorch is not installed" for way in ways if "ddp" in way}
        ways = [way for way in ways if way not in result["left_out"]]
        print("\n".join(f"{way}: {why}" for way, why in result["left_out"].items()), flush=True)
    with ends_on_signals(), lab_or_exit(hosts=RANKS, rate=args.rate) as lab:
        result |= {"link": args.rate, "tcp_bits_per_s": lab.measure_rate(0.3 if args.smoke else 1)}
        for repeat in range(args.repeats):
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                row = {"way": way, "repeat": repeat, **run(lab, sweep, way, args)}
                result["rows"].append(row)
                print(sweep_to_target_show.line(row), flush=True)
                result |= sweep_to_target_show.verdict(result["rows"])
                write_json(args.json, __doc__, result)
    if args.png:
        sweep_to_target_show.draw(result, args.png)
    if result["equal_to_the_bit"] is False:
        raise SystemExit("`one` and `crossover` trained differently: compare their `trials`.")
    return 0


EMPTY: dict[str, Any] = {"sweep": {}, "concurrent": 0, "link": "", "rows": [], "left_out": {}}


def options() -> Any:
    made = parser(__doc__)
    made.add_argument(
        "--rate", default="500mbit", help="of the link, in each direction (default %(default)s)"
    )
    made.add_argument(
        "--concurrent", type=int, default=3, help="trials at once (default %(default)s)"
    )
    made.add_argument("--repeats", type=int, help="default 2, or 1 with --smoke")
    made.add_argument("--ways", type=words, default=list(WAYS), help=f"of {', '.join(WAYS)}")
    made.add_argument(
        "--patience",
        type=float,
        default=1800,
        help="seconds to wait for an answer (default %(default)s)",
    )
    made.add_argument("--png", type=Path, metavar="FILE", help="draw the minutes of each way")
    made.add_argument("--draw", action="store_true", help="draw what --json has, and end")
    args = made.parse_args()
    if unknown := [way for way in args.ways if way not in WAYS]:
        made.error(f"there is no `{unknown[0]}`; there are {', '.join(WAYS)}.")
    if args.concurrent < 1:
        made.error(f"`--concurrent` must be at least 1, got {args.concurrent}.")
    if args.draw and not (args.png and args.json):
        made.error("`--draw` needs `--json` and `--png`.")
    if args.repeats is None:
        args.repeats = 1 if args.smoke else 2
    return args


def run(lab: Lab, sweep: digits.Sweep, way: str, args: Any) -> dict[str, Any]:
    """Runs the whole sweep in one way, in new processes.

    Raises:
        RuntimeError: Fewer bytes crossed the link than the all-reduces of the trials need.
    """
    before = lab.bytes_crossed()
    at_once = min(args.concurrent, len(sweep.trials())) if way in ("crossover", "ddp-k") else 1
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        begin = time.monotonic()
        with Stage(lab, Path(folder), patience_s=args.patience) as stage:
            run_trials = _ddp if way.startswith("ddp") else _jaxcross
            found = run_trials(stage, sweep, at_once, args.smoke)
            end = time.monotonic()
    trials = found["trials"]
    for trial in trials:
        for moment in ("begin", "first_step", "end"):
            trial[f"{moment}_s"] = trial.pop(moment) - begin
    crossed = lab.bytes_crossed() - before
    needed = sum(trial["steps"] for trial in trials) * needed_bytes(
        found["parameters"], "float32", RANKS
    )
    if crossed < needed:
        raise RuntimeError(
            f"`{way}` sent {crossed / 1e6:.1f} MB over the link, its all-reduces need "
            f"{needed / 1e6:.1f} MB. Its ranks spoke another way, or did not exchange everything."
        )
    return {
        "s": end - begin,
        "start_up_s": min(trial["first_step_s"] for trial in trials),
        "wire_bytes": crossed,
        "best": min(range(len(trials)), key=lambda number: trials[number]["score"]),
        **found,
    }


def _jaxcross(stage: Stage, sweep: digits.Sweep, at_once: int, smoke: bool) -> dict[str, Any]:
    """Runs the sweep with `jaxcross.sweep`, in one process per host."""
    team = stage.start("swept", "digits", job=None, smoke=smoke)
    first, *others = stage.ask(team, "sweep", concurrent=at_once)
    if any(_outcome(each["trials"]) != _outcome(first["trials"]) for each in others):
        raise RuntimeError("The ranks do not have the same losses, accuracies and states.")
    if first["best"] != min(range(len(first["trials"])), key=lambda n: first["trials"][n]["score"]):
        raise RuntimeError(f"`jaxcross.sweep` says that trial {first['best']} is the best one.")
    return {
        **{key: first[key] for key in ("parameters", "peak_rss_bytes", "account", "trials")},
        "cpu_s": sum(each["total_cpu_s"] for each in (first, *others)),
    }


def _outcome(trials: list[dict[str, Any]]) -> list[Any]:
    return [(t["params"], t["steps"], t["score"], t["digest"], t["curve"]) for t in trials]


def _ddp(stage: Stage, sweep: digits.Sweep, at_once: int, smoke: bool) -> dict[str, Any]:
    """Runs the sweep with one process per host and concurrent trial.

    A thread per concurrent trial starts these processes, and commands one trial after the other.
    """
    parameters = sweep.trials()
    numbers, lock = iter(range(len(parameters))), threading.Lock()
    trials: list[dict[str, Any]] = [{} for _ in parameters]
    last: list[list[dict[str, Any]]] = [[] for _ in range(at_once)]

    def lane(place: int) -> None:
        with lock:  # one after the other, since a stage can't tell two teams that say hello apart
            team = stage.start("swept_ddp", "digits", job=place, smoke=smoke)
        while (number := next(numbers, None)) is not None:
            last[place] = stage.ask(team, "trial", **parameters[number])
            first = last[place][0]
            kept = ("steps", "score", "begin", "first_step", "end", "curve")
            trials[number] = {"params": parameters[number], **{key: first[key] for key in kept}}

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lane, range(at_once)))
    # If the other lanes took all trials while a lane was still starting, it has no answers.
    hosts = [answers[0] for answers in last if answers]
    return {
        "parameters": hosts[0]["parameters"],
        "peak_rss_bytes": sum(each["peak_rss_bytes"] for each in hosts),
        "cpu_s": sum(each["total_cpu_s"] for answers in last for each in answers),
        "trials": trials,
    }


if __name__ == "__main__":
    raise SystemExit(main())
