"""Who is fastest on the same jobs, cores and real slow link: jaxcross, or the ways in which people
do it today?

    python benchmarks/race.py [--cases two,mixed,three,one] [--rates network,balanced,compute]
    [--json FILE] [--png DIR]

All rivals (see `rivals/`) take turns in one run, on two hosts with one core each:
  fused, fused-k            `jax.jit` with one mpi4jax call per leaf: one job after the other, or,
                            with `-k`, all k jobs at once, each in its own processes
  gloo, gloo-k              JAX's own `shard_map` and `jax.distributed` with gloo, in the same two
                            ways
  ddp, ddp-k, ddp-bf16(-k)  PyTorch DDP with gloo; if PyTorch isn't installed, these are left out
                            and a line says so
  sequential, crossover     jaxcross: one job after the other, or in crossover
  uncut, wait-free          jaxcross with a single job: uncut, or with its backward pass cut where
                            gradients become ready
`crossover` has variants. With `-mpi4py`, it exchanges host buffers with mpi4py, whereas all others
exchange with mpi4jax. With `-bf16`, gradients are sent as bfloat16. With `-cut`, the backward pass
of each job is cut into four pieces. `-shares` is for jobs of different sizes: the backward pass of
the largest job is cut into four pieces, and this job gets four times the share of each other job.

A rate can be given as a number (`500mbit`) or as a name. Named rates are found by calibration:
network-bound (sum m = 2 sum c), balanced (sum m = sum c) and compute-bound (sum m = sum c / 2),
where c and m are the seconds per step that a job computes and exchanges. The rows of the result
have these numbers:
  T                  The wall time from the command to the last rank's answer, divided by the number
                     of steps of all jobs. It doesn't include starting, compiling and the first
                     steps, which get their memory from the kernel. It does include filling the
                     pipeline.
  steady             The period of a round according to jaxcross's report.
  bound              max(sum c, sum m, max(c + m)) / k for k jobs. For rivals in which a job's
                     computation and exchange can overlap, the term max(c + m) is left out.
  with tax           The bound with sum c + sum tax in place of sum c. The tax is the CPU time that
                     an exchange on the row's wire takes from the core that computes: that of its
                     thread, plus the kernel's time for packets.
  slow_down          How long a step takes alongside exchanges over how long it takes alone,
                     including all effects of caches.
  hidden_share       (c + m - T) / min(c, m), clipped to 0..1. `hidden_share_from_trace` is the same
                     share according to jaxcross's trace.
  cpu_s, wire_bytes  These are per job-step, summed over all ranks.
  peak_rss_bytes     The memory of the host that uses more.
m and tax are measured before every repeat. c is measured before and after every run, by the
processes that run. Rivals of the same framework compute the same step, so a row's c is pooled over
all rivals of its framework in the repeat. `own_c_s` is the c of the row's own processes alone.

Each row has the number of its run, which is an index into `runs`. `--resume` measures rivals that
have no row yet, in an additional run. It calibrates the rates again, and runs jaxcross again as
well so that there's something to compare the new rows with.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import in_order
from race_bounds import RATES, Cost, bits_a_second, bound_s, hidden_share, taxed_bound_s
from race_file import earlier, out_file, out_folder, write
from race_measure import Calibration, Entrants, pooled_c
from race_show import REFERENCES, draw, show
from rivals.cases import CASES, RIVALS, Rival, Spec, rivals_of
from rivals.teams import Stage, TeamError, lab_or_exit

from jaxcross.lab import Lab

REFERENCE = "500mbit"
NEEDED = ("crossed",)
"""The teams that every case needs, because they measure m."""
Sample = dict[str, Any]


def main() -> int:
    args = options()
    result = {**earlier(args), "question": (__doc__ or "").splitlines()[0]}
    for case in args.cases:
        for rivals, rates in lacking(case, args, result).items():
            with (
                tempfile.TemporaryDirectory(prefix="race-") as folder,
                lab_or_exit(hosts=2, rate=REFERENCE) as lab,
                Stage(lab, Path(folder), patience_s=args.patience) as stage,
            ):
                entrants = Entrants(stage, case, args.smoke, list(rivals), apart=args.apart)
                race(stage, entrants, rates, args, result)
        if args.png:
            draw(case, result, args.png / f"race-{case}.png")
    return 0


def lacking(
    case: str, args: argparse.Namespace, result: dict[str, Any]
) -> dict[tuple[Rival, ...], list[str]]:
    """Groups the rates at which something remains to be measured by the rivals that must run there.

    With `--resume`, jaxcross has to run again along with the rivals that have no row yet, because
    we only compare rows of the same run. So a group consists of the rivals without a row and, if
    the case already has rows, of the jaxcross rivals that they are compared with.
    """
    done = {(row["rate"], row["rival"]) for row in result["rows"] if row["case"] == case}
    found: dict[tuple[Rival, ...], list[str]] = {}
    for rate in args.rates:
        if rivals := {
            r.name: r.wire for r in rivals_of(case, args.rivals) if (rate, r.name) not in done
        }:
            against = (
                {name for wire in rivals.values() for name in REFERENCES[wire]} if done else set()
            )
            found.setdefault(tuple(rivals_of(case, {*rivals, *against})), []).append(rate)
    return found


def race(
    stage: Stage,
    entrants: Entrants,
    rates: list[str],
    args: argparse.Namespace,
    result: dict[str, Any],
) -> None:
    """Runs a case at all of its rates with the same processes.

    The result file is written after each rate, so an interrupted race loses one rate at most.
    """
    case = entrants.case
    for kind in dict.fromkeys((*NEEDED, *(rival.team for rival in entrants.rivals))):
        if (
            (kind not in args.apart or missing(kind))
            and not stands(entrants, kind, result)
            and kind in NEEDED
        ):
            raise SystemExit(f"nothing can be calibrated: {result['left_out'][f'{case}/{kind}']}")
    rates = [rate for rate in rates if any_lacks(entrants, rate, result)]
    reference = None
    if set(rates) & set(RATES):
        entrants.measure(times=args.times, tax=False)  # compiles, and gets memory
        reference = entrants.calibrated(args.times)
    for rate in rates:
        if not any_lacks(entrants, rate, result):
            continue
        lab, found = stage.lab, []
        if reference is not None and rate in RATES:
            found = find_rate(entrants, RATES[rate], reference, args.times)
        else:
            lab.set_rate(rate)
        there, back = lab.measure_rate(0.3 if args.smoke else 1.0)
        entrants.stage.ask(entrants.teams["crossed"], "forget_cuts")
        samples, measured = alternate(entrants, rate, args, result)
        if not samples:
            print(f"{case} at {rate}: no rival finished a repeat", flush=True)
            continue
        calibration = Calibration.of(entrants.jobs, measured, lab.rate or "")
        facts = {
            "case": case,
            "rate": rate,
            "link": lab.rate,
            "tcp_bits_per_s": [there, back],
            "jobs": len(entrants.jobs),
            "run": len(result["runs"]) - 1,
            "steps": args.steps,
            "start_up": entrants.start_up,
            "found": found,
            "calibration": [{"model": spec.model, **raw} for spec, raw in calibration.raw.items()],
        }
        rows = [
            row_of(RIVALS[name], samples[name], calibration, facts)
            for name in RIVALS
            if name in samples
        ]
        for row in rows:
            if row["rival"] == "wait-free":
                facts["wait_free"] = entrants.wait_free(calibration, row["c_s"])
        result["links"].append(facts)
        result["rows"] += rows
        show(facts, rows)
        write(args.json, result)


def any_lacks(entrants: Entrants, rate: str, result: dict[str, Any]) -> bool:
    """Returns whether any remaining rival still lacks a row at this rate. If not, prints a line.

    A rival that failed is no longer among the remaining ones. If those that remain are only the
    references of a failed rival, there's nothing left to measure.
    """
    done = {
        row["rival"]
        for row in result["rows"]
        if (row["case"], row["rate"]) == (entrants.case, rate)
    }
    if found := any(rival.name not in done for rival in entrants.rivals):
        return found
    print(f"{entrants.case} at {rate}: no rival is left that lacks a row", flush=True)
    return False


def find_rate(
    entrants: Entrants, factor: float, at: Calibration, times: int
) -> list[dict[str, Any]]:
    """Sets the link to the rate at which sum m = factor * sum c, and returns the rates it tried.

    The rate can't be computed directly: part of m doesn't depend on the rate, and c drifts, because
    on a shared machine the same step may be faster or slower a minute later. So we try a rate,
    calibrate again, and correct it. After three tries, or once a rate is within 5%, we take the
    closest one.
    """
    tries: list[dict[str, Any]] = []
    while True:
        entrants.stage.lab.set_rate(entrants.rate(factor, at))
        at = entrants.calibrated(times)
        tries.append(
            {
                "link": entrants.stage.lab.rate,
                "ratio": at.ratio,
                "c_s": at.compute_s,
                "m_s": at.exchange_s,
            }
        )
        print(
            f"{entrants.case} at {tries[-1]['link']}: sum m is {at.ratio:.2f} of sum c, wanted "
            f"{factor}",
            flush=True,
        )
        off = [abs(each["ratio"] / factor - 1) for each in tries]
        if off[-1] <= 0.05 or len(tries) == 3:
            entrants.stage.lab.set_rate(tries[off.index(min(off))]["link"])
            return tries


def alternate(
    entrants: Entrants, rate: str, args: argparse.Namespace, result: dict[str, Any]
) -> tuple[dict[str, list[Sample]], list[dict[Spec, dict[str, Any]]]]:
    """Runs all repeats, in each of which every rival runs once. Measures c, m and tax before each.

    If a rival fails, we leave it out from then on, along with all rivals that use the same
    processes.

    Returns:
        Each rival's samples, and the measurements of each repeat.
    """
    samples: dict[str, list[Sample]] = {}
    measured = []
    for repeat in range(args.repeats):
        if not entrants.rivals:
            break
        measured.append(entrants.measure(times=args.times))
        # Each repeat starts with a different rival, and every other one runs backwards, so that no
        # rival always comes first or always follows the same one.
        order = in_order(entrants.rivals, repeat)
        turns = []
        for rival in order if repeat % 2 == 0 else order[::-1]:
            if rival not in entrants.rivals or not stands(entrants, rival.team, result):
                continue
            begin = time.perf_counter()
            try:
                sample = entrants.turn(rival, args.steps)
            except TeamError as error:
                if rival.team in NEEDED:
                    raise
                leave_out(entrants, rival.team, str(error), result)
                continue
            samples.setdefault(rival.name, []).append(sample)
            turns.append((rival.framework, sample))
            print(
                (
                    f"{entrants.case} {rate} ({entrants.stage.lab.rate}) repeat {repeat}: "
                    f"{rival.name} {sample['s_per_job_step']:.3f} s a job-step, "
                    f"{time.perf_counter() - begin:.0f} s"
                ),
                flush=True,
            )
        share_compute(entrants.jobs, turns)
    return samples, measured


def share_compute(jobs: Sequence[Spec], turns: Sequence[tuple[str, Sample]]) -> None:
    """Pools c over all rivals of a framework within a repeat, because they run the same step."""
    for framework in dict(turns):
        alike = [sample for name, sample in turns if name == framework]
        for sample in alike:
            sample["c_s"] = pooled_c(jobs, alike)


def leave_out(entrants: Entrants, kind: str, reason: str, result: dict[str, Any]) -> None:
    """Ends a kind of team and drops its rivals, so that the case continues without them."""
    print(f"{kind} is left out: {reason}", flush=True)
    result["left_out"][f"{entrants.case}/{kind}"] = reason
    entrants.end(kind)
    entrants.rivals = [rival for rival in entrants.rivals if rival.team != kind]


def stands(entrants: Entrants, kind: str, result: dict[str, Any]) -> bool:
    """Makes sure that a kind's processes are running, and returns whether they are.

    They are started if they never ran, or if they were ended to make room for another kind.
    """
    if kind in entrants.teams:
        return True
    entrants.make_room(kind)
    if (reason := start(entrants, kind)) is not None:
        leave_out(entrants, kind, reason, result)
        return False
    result["left_out"].pop(f"{entrants.case}/{kind}", None)
    return True


def missing(kind: str) -> str | None:
    """Returns why a kind can't run on this machine at all, or None if nothing speaks against it."""
    return (
        "PyTorch is not installed"
        if kind == "ddp" and importlib.util.find_spec("torch") is None
        else None
    )


def start(entrants: Entrants, kind: str) -> str | None:
    """Starts a kind's processes and compiles their steps. Returns the reason if that fails."""
    if (reason := missing(kind)) is not None:
        return reason
    try:
        begin = time.perf_counter()
        entrants.start(kind)
        idle = sum(entrants.start_up[each]["idle_rss_bytes"] for each in entrants.teams)
        print(
            f"{entrants.case}: {kind} is ready after {time.perf_counter() - begin:.0f} s; "
            f"all that wait hold {idle / 1e9:.1f} GB",
            flush=True,
        )
    except TeamError as error:
        return str(error)
    return None


def row_of(
    rival: Rival, samples: list[Sample], calibration: Calibration, facts: dict[str, Any]
) -> dict[str, Any]:
    """Returns one line of the table: the medians over the repeats.

    Each repeat is compared with the bound that follows from the c of the same repeat.
    """
    judged = [{**sample, **judge(rival, sample, calibration)} for sample in samples]
    seconds = [sample["s_per_job_step"] for sample in samples]
    return {
        "case": facts["case"],
        "rate": facts["rate"],
        "rate_bits_per_s": bits_a_second(facts["link"]),
        "rival": rival.name,
        "run": facts["run"],
        "spread": [min(seconds), max(seconds)],
        **{
            key: statistics.median(s[key] for s in judged)
            for key, value in judged[0].items()
            if isinstance(value, float | int)
        },
        **{
            key: [statistics.median(each) for each in zip(*(s[key] for s in samples), strict=True)]
            for key in ("c_s", "own_c_s")
        },
        "m_s": calibration.exchange_s[rival.wire],
        "tax_s": calibration.tax_s[rival.wire],
        "slow_down": calibration.slow_down(rival.wire),
        "raw": samples,
    }


def judge(rival: Rival, sample: Sample, calibration: Calibration) -> dict[str, float]:
    """Compares the time of one repeat with the bounds."""
    costs: list[Cost] = calibration.costs(rival.wire, sample["c_s"])
    chain, took = not rival.overlaps_itself, sample["s_per_job_step"]
    bounds = {
        "efficiency": bound_s(costs, chain=chain),
        "efficiency_with_tax": taxed_bound_s(costs, chain=chain),
    }
    found = {
        "bound_s": bounds["efficiency"],
        "bound_with_tax_s": bounds["efficiency_with_tax"],
        **{name: bound / took for name, bound in bounds.items()},
        "over_own_compute": took / statistics.fmean(sample["c_s"]),
        "hidden_share": hidden_share(costs, took),
    }
    if (steady := sample.get("steady_s_per_job_step")) is not None:
        found |= {f"steady_{name}": bound / steady for name, bound in bounds.items()}
    return found


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cases", default="two,mixed,three,one", help="default %(default)s")
    made.add_argument(
        "--rates", default="network,balanced,compute", help="or 500mbit (default %(default)s)"
    )
    made.add_argument(
        "--rivals", default="", metavar="A,B", help=f"of {', '.join(RIVALS)} (default: all)"
    )
    made.add_argument(
        "--steps", type=int, default=8, help="steps per job and repeat (default %(default)s)"
    )
    made.add_argument("--repeats", type=int, help="default 3, or 1 with --smoke")
    made.add_argument(
        "--times",
        type=int,
        default=5,
        help="steps and exchanges per calibration (default %(default)s)",
    )
    made.add_argument(
        "--apart",
        default="",
        metavar="A,B",
        help="kinds of processes (gloo, ddp, ...) of which only one runs at a time, if memory "
        "isn't enough for all; each is restarted when it's needed",
    )
    made.add_argument(
        "--patience",
        type=float,
        default=900,
        help="seconds to wait for an answer (default %(default)s)",
    )
    made.add_argument(
        "--json",
        type=out_file,
        metavar="FILE",
        help="rows and raw numbers; written after every rate",
    )
    made.add_argument("--png", type=out_folder, metavar="DIR", help="write one picture per case")
    made.add_argument(
        "--resume", action="store_true", help="keep FILE's rows, and run the rivals that have none"
    )
    made.add_argument(
        "--smoke",
        action="store_true",
        help="toy models, one case and one rate, to see that it runs",
    )
    args = made.parse_args()
    args.cases = args.cases.split(",")
    args.rates = args.rates.split(",")
    args.rivals = set(args.rivals.split(",")) if args.rivals else None
    args.apart = tuple(args.apart.split(",")) if args.apart else ()
    if args.smoke:
        args.cases, args.rates = (
            args.cases[:1],
            ["balanced"] if "balanced" in args.rates else args.rates[:1],
        )
        args.steps, args.times = 4, 2
    if args.repeats is None:
        args.repeats = 1 if args.smoke else 3
    kinds = {rival.team for rival in RIVALS.values()} - {*NEEDED}
    for given, known in ((args.cases, CASES), (args.rivals or (), RIVALS), (args.apart, kinds)):
        if unknown := [name for name in given if name not in known]:
            made.error(f"there is no `{unknown[0]}`; there are {', '.join(known)}.")
    try:
        for rate in {*args.rates} - {*RATES}:
            Lab(rate=rate)
    except ValueError as error:
        made.error(f"`--rates` takes {', '.join(RATES)}, or a rate of the link: {error}")
    if args.steps < 4:
        made.error(
            f"`--steps {args.steps}`: fewer than 4 measure how a pipeline fills, not how it runs."
        )
    return args


if __name__ == "__main__":
    raise SystemExit(main())
