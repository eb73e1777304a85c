"""Mutation testing of jaxcross, which compares two test suites.

Run `python tests/mutation/mutate.py {coverage,run,show}`. README.md in this folder explains how to
use it and how to read its table. The rest of this text explains how it works.

**Why a tool of our own.** We looked at the two that are maintained. mutmut 3 selects tests by the
functions that they call within pytest's process, so it finds no tests for code that only ranks
under `mpirun` execute. It also forks its workers from a process in which JAX may already be running
threads. cosmic-ray takes any command with a time limit, and can resume, but it runs the same
command for every mutant (25 minutes or more here), and a timeout only terminates pytest's process
group, which `mpirun` isn't part of. Neither tool draws a sample or compares two suites.

**Why probes, rather than coverage.py.** We only need to know which tests evaluate 150 places. A
tracer watches every line, doesn't follow XLA's threads when they call back into Python, needs a
hook in the start-up of every rank, and loses what it recorded when a rank is killed. On Python 3.11
it also doubles the CPU time of the model checks (`test_model_check.py` and `test_properties.py`
take 81 s instead of 41 s, but 48 s with probes). A probe is a call that we insert at the mutant's
place in the source: `(_mutation_hit("key"), a < b)[1]`. It writes its record to the file before it
returns; `inside/probe.py` has the details.

**From a mutant to a result.** `mutants.py` finds and applies it. `suite.py` says which tests
evaluate it. `judge.py` runs these tests in a copy of the checkout (`workspace.py`), cheapest first,
until one fails. `guard.py` makes sure that no process is left behind. If all of them pass, the
other tests of the same files run as well, because a fixture, a cached function or a compiled step
may have evaluated the mutant on their behalf, in the name of the first test. Each result is
appended to `results.jsonl` immediately, and a mutant that already has a result isn't run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # instead of this folder

from tests.mutation import mutants as m  # noqa: E402
from tests.mutation import toy  # noqa: E402
from tests.mutation.judge import Judge, Outcome, Verdict  # noqa: E402
from tests.mutation.show import KILLS, save, show  # noqa: E402
from tests.mutation.suite import STAGES, Suite, commit, lines  # noqa: E402
from tests.mutation.workspace import InterruptedRunError, Workspace  # noqa: E402

SOURCES = [
    "jaxcross/interleave",
    "jaxcross/runtime",
    "jaxcross/checkpoint",
    "jaxcross/wire",
    "jaxcross/exchange/top_k.py",
    "jaxcross/program/cut.py",
    "jaxcross/program/assemble.py",
]


class Study:
    """The folder of one comparison: the mutants, what was recorded about each suite, and the
    results.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out / "work"
        self.results_file = out / "results.jsonl"
        self._drawn = out / "mutants.json"
        self._lock = threading.Lock()

    def draw(self, tree: Path, sources: Sequence[str], count: int, seed: int) -> None:
        """Draws the mutants, unless this folder already has some."""
        if self._drawn.exists():
            return
        chosen = m.sample(tree, m.in_tree(tree, sources).values(), count, seed)
        described = []
        for each in chosen:
            before, after = each.difference((tree / each.file).read_bytes())
            described.append({**dataclasses.asdict(each), "before": before, "after": after})
        self.out.mkdir(parents=True, exist_ok=True)
        self._drawn.write_text(
            json.dumps({"seed": seed, "sources": list(sources), "mutants": described}, indent=1)
        )

    def described(self) -> list[dict]:
        if not self._drawn.exists():
            raise SystemExit(f"`{self.out}` has no mutants yet: run `coverage` first")
        return json.loads(self._drawn.read_text())["mutants"]

    def in_tree(self, tree: Path) -> dict[str, m.Mutant]:
        """Returns the drawn mutants that a checkout contains, with their positions there."""
        every = m.in_tree(tree, {each["file"] for each in self.described()})
        return {
            each["key"]: every[each["key"]] for each in self.described() if each["key"] in every
        }

    def results(self) -> dict[str, dict[str, dict]]:
        """Returns the latest result of each mutant, by suite and key."""
        found: dict[str, dict[str, dict]] = {}
        for line in lines(self.results_file):
            found.setdefault(line["suite"], {})[line["mutant"]] = line
        return found

    def append(self, result: dict) -> None:
        with self._lock, self.results_file.open("a") as file:
            file.write(f"{json.dumps(result)}\n")


def coverage(study: Study, args: argparse.Namespace) -> None:
    tree = args.tree.resolve()
    study.draw(tree, args.sources or SOURCES, args.sample, args.seed)
    suite = Suite(study.out, args.suite)
    suite.define(tree, [shlex.split(stage) for stage in args.stage] or STAGES, args.tests)
    workspace = Workspace(tree, study.work / f"{args.suite}-0")
    try:
        suite.record(study.in_tree(tree).values(), workspace, args.workers)
    finally:
        workspace.close()
    covering = suite.load()
    found = study.in_tree(tree)
    covered = sum(bool(covering.of(each)[0]) for each in found.values())
    print(
        f"suite `{suite.name}` evaluates {covered} of {len(study.described())} mutants; its "
        f"checkout has {len(found)}"
    )


def run(study: Study, args: argparse.Namespace) -> None:
    suite = Suite(study.out, args.suite)
    covering = suite.load()
    if suite.commit != commit(suite.tree):
        print(
            f"`{suite.tree}` was at {suite.commit} when it was recorded, and is at "
            f"{commit(suite.tree)} now"
        )
    todo = chosen(study, args)
    found = study.in_tree(suite.tree)
    judge = Judge(suite.stages, covering, limit_s=args.limit, grace_s=args.grace)
    spaces: queue.SimpleQueue[Workspace] = queue.SimpleQueue()
    made = [
        Workspace(suite.tree, study.work / f"{args.suite}-{at}")
        for at in range(min(args.parallel, len(todo)))
    ]
    for each in made:
        spaces.put(each)

    def judged(description: dict) -> None:
        mutant = found.get(description["key"])
        workspace = spaces.get()
        began_s = time.monotonic()
        try:
            outcome = judge.judge(mutant, workspace) if mutant else Outcome(verdict=Verdict.ABSENT)
        except InterruptedRunError:
            return
        finally:
            spaces.put(workspace)
        result = {"mutant": description["key"], "suite": suite.name, **dataclasses.asdict(outcome)}
        result |= {
            "seconds": round(time.monotonic() - began_s, 1),
            "limit_s": args.limit,
            "commit": suite.commit,
        }
        result["nameless"] = covering.nameless(description["key"])
        study.append(result)
        place = f"{description['file']}:{description['line']} [{description['operator']}]"
        print(
            f"{outcome.verdict:9} {result['seconds']:6.1f} s  {place}  {outcome.killer}", flush=True
        )

    pool = ThreadPoolExecutor(max(1, len(made)))
    try:
        for future in [pool.submit(judged, each) for each in todo]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for each in made:
            each.close()
    for name in judge.untrusted():
        print(f"left out, since it fails without a mutant: {name}")


def chosen(study: Study, args: argparse.Namespace) -> list[dict]:
    """Returns the mutants that this call has to judge."""
    results = study.results()
    done = results.get(args.suite, {})
    others = results.get(args.survivors_of, {})

    def is_wanted(each: dict) -> bool:
        if args.files and not each["file"].startswith(tuple(args.files)):
            return False
        if args.survivors_of and (
            each["key"] not in others or others[each["key"]]["verdict"] in KILLS
        ):
            return False
        if each["key"] not in done:
            return True
        verdict, limit_s = done[each["key"]]["verdict"], done[each["key"]]["limit_s"]
        return verdict == args.again and (verdict != Verdict.LIMITED or limit_s < args.limit)

    return [each for each in study.described() if is_wanted(each)]


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--out",
        type=Path,
        default=ROOT / ".mutation",
        help="folder of the comparison [%(default)s]",
    )
    arguments.add_argument(
        "--smoke",
        action="store_true",
        help="try the tool on a toy package whose verdicts are known",
    )
    commands = arguments.add_subparsers(dest="command")
    one = commands.add_parser(
        "coverage", help="record which tests of a suite evaluate which mutants"
    )
    one.add_argument("--suite", required=True, help="a name, such as `new`")
    one.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout that has the suite [%(default)s]"
    )
    one.add_argument(
        "--tests",
        nargs="*",
        default=[],
        metavar="PATH",
        help="only these files and folders of tests",
    )
    one.add_argument(
        "--stage",
        action="append",
        default=[],
        help="pytest's arguments for a part; may be repeated",
    )
    one.add_argument(
        "--sources", nargs="*", metavar="PATH", help="what is mutated: files and folders"
    )
    one.add_argument("--sample", type=int, default=150, help="mutants to draw [%(default)s]")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--workers", type=int, default=3, help="of pytest-xdist [%(default)s]")
    two = commands.add_parser("run", help="run the tests that evaluate each mutant")
    two.add_argument("--suite", required=True, help="a suite that was recorded")
    two.add_argument(
        "--survivors-of", metavar="SUITE", help="only the mutants that this suite did not kill"
    )
    two.add_argument(
        "--files", nargs="*", metavar="PREFIX", help="only the mutants of these files or folders"
    )
    two.add_argument(
        "--again", choices=[*map(str, Verdict)], help="repeat the mutants with this verdict"
    )
    two.add_argument(
        "--limit",
        type=float,
        default=120,
        help="seconds per mutant in which tests start [%(default)s]",
    )
    two.add_argument(
        "--grace", type=float, default=30, help="seconds that any test may take [%(default)s]"
    )
    two.add_argument("--parallel", type=int, default=2, help="mutants at a time [%(default)s]")
    three = commands.add_parser(
        "show", help="print the table; fails if a mutant is open or killed by the old suite only"
    )
    three.add_argument("--suite", default="new")
    three.add_argument("--against", default="old")
    three.add_argument(
        "--save", action="store_true", help="keep the verdicts in tests/mutation/results.json"
    )
    return arguments


def main(arguments: Iterable[str] | None = None) -> int:
    args = parser().parse_args(None if arguments is None else [*arguments])
    if args.smoke:
        return toy.smoke(main)
    study = Study(args.out.resolve())
    if args.command == "coverage":
        coverage(study, args)
    elif args.command == "run":
        run(study, args)
    elif args.command == "show":
        if args.save:
            save(study.described(), study.results().get(args.suite, {}))
        return (
            0
            if show(Console(), study.described(), study.results(), args.suite, args.against)
            else 1
        )
    else:
        parser().print_help()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InterruptedRunError:
        sys.exit("stopped; call it again to continue")
