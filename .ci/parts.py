"""Chooses the tests that `.ci/run` runs for a change, and those that `.ci/more` still has to run.

    python .ci/parts.py select FOLDER     # for .ci/run: writes what to run to FOLDER, and says why
    python .ci/parts.py drawn FOLDER      # runs the drawn cases; failures that also occur at the
                                          base are only reported
    python .ci/parts.py record FOLDER     # writes down that what `.ci/run` selected has passed
    python .ci/parts.py more [PART ...]   # for .ci/more: runs the parts that haven't passed since
                                          their folders changed
    python .ci/parts.py show              # which parts have passed, and at which commit

A *part* is the tests of one folder in one tier, such as `integration:wire`. A part covers the
folder of the package, all folders that the folder imports directly or indirectly, the folders that
the tests name, and the tests themselves. So if you change `wire`, you affect the parts of `wire`,
`world`, `jobs` and everything else above it. The import graph comes from grimp, which
`lint-imports` also uses.

Both scripts record in `.ci/passed.json` at which commit each part has passed. Commit that file,
because a later run on another machine starts from it. A change is whatever differs from the base:
`CI_BASE` if it's set, otherwise the commit at which this branch left `origin/main`. On main itself
there's no such base, so each part is compared with the commit at which it passed. A Python file in
which only comments, docstrings or the layout have changed affects just the parts that read such
texts: those of the documents, of the whole package, and of the wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grimp
from recorded import (
    NOTHING_FAILED,
    PACKAGE,
    RECORDS,
    changed_since,
    git,
    is_at,
    is_reworded,
    passed,
    record,
)
from rich.console import Console
from rich.table import Table

from jaxcross._lazy import homes_of

ROOT = Path(__file__).parents[1]
RECORDED = ".ci/recorded.py"
MUTANTS = "mutants"
WHEEL = "wheel"
WHEEL_TESTS = "wheel:tests"
IN_THE_WHEEL = (PACKAGE, "LICENSE", "README.md", "deploy", "examples")
RUNS_ON = ("null", "cpu", "mpi")
READ_TEXTS = ("docs", PACKAGE, WHEEL, WHEEL_TESTS)  # rewording a docstring may break their tests

# If one of these changes, every part is affected.
ALL = (
    ".ci/with-openmpi",
    "jaxcross/__init__.py",
    "jaxcross/_lazy.py",
    "jaxcross/testing.py",
    "pyproject.toml",
    "tests/__init__.py",
    "tests/conftest.py",
    "tests/mpi/conftest.py",
    "tests/support",
)
# Paths outside the package -> the test folders that are affected if they change.
ROWS = {
    ".ci/installs.py": ("benchmarks",),
    ".ci/train.py": ("benchmarks",),
    "CHANGELOG.md": ("docs",),
    "README.md": ("docs",),
    "benchmarks": (
        "benchmarks",
        "checkpoint",
        "docs",
        "exchange",
        "health",
        "lab",
        "plan",
        "program",
    ),
    "deploy": ("commands", "deploy"),
    "docs": ("docs",),
    "examples": ("docs", "examples", "program", "step"),
    "tests/model": ("interleave",),
    "tests/mutation": ("jaxcross",),
}
# The tests over Open MPI, which also use the newest Python and JAX, run only for changes in these
# folders or in the code that their ranks run.
ON_OPEN_MPI = ("wire", "world", "health", "server", "lab", "commands")
UNDER_OPEN_MPI = (*ALL, "jaxcross/_jax_compat", "tests/mpi/cases")

# One integration case of each kind, run for every change.
ALWAYS = (
    "tests/cpu/benchmarks/test_benchmarks.py::test_wire_call",
    "tests/mpi/checkpoint/test_checkpoint.py::test_residuals_of_two_ranks_are_refused_on_three",
    "tests/mpi/commands/test_relaunch.py::test_exception_of_the_user_is_not_repeated",
    "tests/mpi/data/test_data.py::test_one_decode_in_crossover",
    "tests/mpi/docs/test_pages.py::test_page_code_runs_and_prints_what_it_shows[integration-1]",
    "tests/mpi/examples/test_examples.py::test_parameter_servers[staleness0]",
    "tests/mpi/exchange/test_local_steps.py::test_steps_between_two_exchanges_count",
    "tests/mpi/health/test_faults.py::test_faults_at_points",
    "tests/mpi/jobs/test_runner.py::test_jobs_over_mpi[2]",
    "tests/mpi/program/test_zoo.py::test_mpi4jax_steps_are_cut_in_program_order",
    "tests/mpi/runtime/test_chaos.py::test_jobs_whose_threads_are_late",
    "tests/mpi/server/test_server.py::test_parameters_stay_on_their_devices",
    "tests/mpi/step/test_step.py::test_several_devices_a_rank",
    "tests/mpi/sweeps/test_sweep_command.py::test_command_sweeps_a_script",
)

FULL = ("--hypothesis-profile", "full")
OPEN_MPI = [
    "-p",
    "no:cacheprovider",
    "-m",
    "not exhaustive",
    "-n",
    "4",
]  # its environment may be a temporary one
# These take half an hour and don't depend on the wire, so we run them only in the exhaustive tier.
ONCE = (
    "tests/mpi/benchmarks/test_imagenet.py::test_by_itself",
    "tests/mpi/benchmarks/test_plan.py",
    "tests/mpi/benchmarks/test_race.py::test_memory",
    "tests/mpi/benchmarks/test_race.py::test_race",
    "tests/mpi/checkpoint/test_checkpoint.py::test_many_killed_runs_resume",
)
# Tier -> the Python that runs it, and pytest's arguments.
TIERS = {
    "integration": (["uv", "run", "python"], ["-m", "not exhaustive", *FULL, "-n", "4"]),
    # pytest prints the stacks of a test that takes too long, but some of these tests compute for
    # minutes without hanging. Printing isn't harmless either, because `faulthandler` reads the
    # frames of a running thread. We suspect that this crashed a worker in `plan/test_rates.py`.
    "exhaustive": (
        ["uv", "run", "python"],
        ["-m", "exhaustive", *FULL, "-n", "3", "-o", "faulthandler_timeout=0"],
    ),
    "mpi4py": (
        ["uv", "run", "python"],
        ["-m", "", "-n", "4", *(f"--deselect={test}" for test in ONCE)],
    ),
    "openmpi": ([".ci/with-openmpi"], OPEN_MPI),
    "openmpi-mpi4py": ([".ci/with-openmpi"], OPEN_MPI),
}
# Tiers that run tests/mpi again, each with these environment variables set.
OVER_MPI = {
    "mpi4py": {"JAXCROSS_WIRE": "mpi4py"},
    # Forked processes share the salt of `hash`, so only processes started from scratch iterate over
    # sets in different orders.
    "openmpi": {"JAXCROSS_TESTS_COLD": "1"},
    "openmpi-mpi4py": {"JAXCROSS_WIRE": "mpi4py"},
}

console = Console(soft_wrap=True, highlight=False)


def folder_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


@cache
def imported() -> Mapping[str, set[str]]:
    """Maps each folder of the package to itself and all folders that it imports, even via
    others.
    """
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        names = found.setdefault(folder_of(module), {folder_of(module)})
        names |= {folder_of(other) for other in graph.find_modules_directly_imported_by(module)}
    return closed(found)


def closed(found: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns the transitive closure of a relation."""
    while True:
        more = {
            name: set().union(*(found[other] for other in others)) for name, others in found.items()
        }
        if more == found:
            return more
        found = more


@cache
def folders() -> tuple[str, ...]:
    """Returns the folders that have tests.

    `PACKAGE` stands for the files directly in `tests/null`, which test the whole package.
    """
    found = {
        path.parent.name
        for tier in RUNS_ON
        for path in (ROOT / "tests" / tier).glob("*/__init__.py")
    }
    return (*sorted(found), PACKAGE)


def paths_of(folder: str, tiers: Sequence[str] = RUNS_ON) -> list[str]:
    if folder == PACKAGE:
        return [
            str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/null").glob("test_*.py"))
        ]
    return [
        f"tests/{tier}/{folder}/" for tier in tiers if (ROOT / "tests" / tier / folder).is_dir()
    ]


def files_of(folder: str, tiers: Sequence[str] = RUNS_ON) -> tuple[str, ...]:
    return tuple(
        str(file.relative_to(ROOT))
        for path in paths_of(folder, tiers)
        for file in _python_files(ROOT / path)
    )


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@cache
def covered(folder: str, file: str | None = None, tiers: Sequence[str] = RUNS_ON) -> list[str]:
    """Returns the paths that affect a folder's tests, or one of its test files.

    If one of these paths changes, the tests have to run again. The paths are the tests themselves,
    the folder of the package that they test, and everything that it imports directly or indirectly.
    In addition, we include the folders that the tests and their programs name; for instance, some
    tests of `checkpoint` run jobs. `tiers` limits the tests to some of `tests/null`, `tests/cpu`
    and `tests/mpi`.
    """
    if folder == MUTANTS:
        # This part compares two suites, so changed tests don't make it due by themselves: if you
        # move or delete tests, run it with the commit before that. The tool's README and its kept
        # results don't count either.
        tool = sorted((ROOT / "tests/mutation").rglob("*.py"))
        return [*(str(file.relative_to(ROOT)) for file in tool), ".ci/mutants"]
    if folder == WHEEL:
        return [
            *IN_THE_WHEEL,
            "CHANGELOG.md",
            ".ci/installs.py",
            ".ci/train.py",
            ".ci/wheel.py",
            *ALL,
        ]
    if folder == WHEEL_TESTS:
        return [*covered(WHEEL), "benchmarks", "docs", "tests"]
    tests = files_of(folder, tiers) if file is None else (file, f"{Path(file).parent}/conftest.py")
    cases = programs_of(tests)
    names = imported().get(folder, set()) | named([*tests, *cases])
    package = [PACKAGE] if folder == PACKAGE else map(path_of, names)
    rows = [path for path, concerned in ROWS.items() if folder in concerned]
    return [
        *sorted(package),
        *rows,
        *(paths_of(folder, tiers) if file is None else tests),
        *cases,
        *ALL,
    ]


def path_of(name: str) -> str:
    return f"{PACKAGE}/{name}" if (ROOT / PACKAGE / name).is_dir() else f"{PACKAGE}/{name}.py"


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text() if (ROOT / file).exists() else ""


def named(files: Iterable[str]) -> set[str]:
    """Returns the folders of the package that files name, in imports or in embedded programs."""
    text = "".join(map(text_of, files))
    words = set(re.findall(rf"{PACKAGE}\.(\w+)", text))
    for names in re.findall(rf"from {PACKAGE} import \(?([^)\n]*)", text):
        words |= set(re.findall(r"\w+", names))
    homes = {name: home.split(".")[1] for name, home in homes_of(PACKAGE).items()}
    return {homes.get(word, word) for word in words} & set(imported())


@cache
def programs() -> dict[str, set[str]]:
    """Maps each program in `tests/mpi/cases` to itself and all programs that it imports."""
    files = {
        path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "tests/mpi/cases").glob("*.py")
    }
    words = {
        name: set(re.findall(r"\w+", text_of(file))) & set(files) | {name}
        for name, file in files.items()
    }
    return {
        files[name]: {files[other] for other in others} for name, others in closed(words).items()
    }


def programs_of(tests: Iterable[str]) -> list[str]:
    """Returns the programs that tests over MPI name, and those that these programs import."""
    text = "".join(text_of(file) for file in tests if file.startswith("tests/mpi/"))
    return sorted(
        set().union(*(used for file, used in programs().items() if Path(file).name in text))
    )


def why(
    paths: Sequence[str],
    files: Sequence[str] | None,
    counts: Callable[[str], bool] = lambda file: True,
) -> str:
    """Returns the reason to run tests that cover `paths` if `files` have changed.

    The reason is empty if there's none. Changed files for which `counts` returns False are ignored.
    """
    if files is None:
        return "nothing to compare with"
    hits = [
        file
        for file in files
        if any(file == path or file.startswith(f"{path.rstrip('/')}/") for path in paths)
    ]
    # `counts` may be slow, so ask only until the answer is known.
    first = next(filter(counts, hits), None)
    if first is None:
        return ""
    return f"{first}{f' and {len(hits) - 1} more' if len(hits) > 1 else ''}"


def counts_for(folder: str, commit: str | None) -> Callable[[str], bool]:
    """Returns a function that tells whether a file, changed since a commit, affects a folder."""
    if folder in READ_TEXTS or commit is None:
        return lambda file: True
    help_counts = folder != MUTANTS  # no test reads the help of the mutation tool's programs
    return lambda file: not is_reworded(commit, file, help_counts=help_counts)


def find_base() -> str | None:
    """Returns the commit to compare with, or None if each part is compared with its own commit."""
    if named := os.environ.get("CI_BASE"):
        return named
    left = git("merge-base", "HEAD", "origin/main")
    if left is None or (left == git("rev-parse", "HEAD") and not changed_since("HEAD")):
        return None
    return left


def collected(*arguments: str) -> list[str]:
    """Returns the ids of the tests that pytest would run."""
    line = ["uv", "run", "pytest", "--collect-only", "-q", "-n", "0", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in NOTHING_FAILED:
        sys.exit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def is_drawn(test: str, commit: str) -> bool:
    """Returns whether a test belongs to the tenth of the tests that this commit runs."""
    return int(hashlib.sha256(f"{commit} {test}".encode()).hexdigest(), 16) % 10 == 0


def chosen(tests: Iterable[str], files: Iterable[str], commit: str) -> tuple[list[str], list[str]]:
    """Returns the integration tests of affected test files, and the others that a commit draws."""
    concerned = set(files)
    run, drawn = [], []
    for test in tests:
        if test in ALWAYS or test.partition("::")[0] in concerned:
            run.append(test)
        elif is_drawn(test, commit):
            drawn.append(test)
    return run, drawn


def reasons(folder: str, base: str | None) -> dict[str, str]:
    """Returns the files of a folder's tests that a change affects, and why."""
    files = changed_since(base)
    counts = counts_for(folder, base)
    if not why(covered(folder), files, counts):
        return {}
    every = {file: why(covered(folder, file), files, counts) for file in files_of(folder)}
    return {file: reason for file, reason in every.items() if reason}


def select(out: Path) -> int:
    base, records = find_base(), passed()
    due = {
        folder: reasons(folder, base or records.get(f"integration:{folder}"))
        for folder in folders()
    }
    due = {folder: files for folder, files in due.items() if files}
    on_open_mpi = [
        f for f in ON_OPEN_MPI if concerns_open_mpi(f, base or records.get(f"openmpi:{f}"))
    ]
    tests = collected("-m", "(integration or hypothesis) and not exhaustive")
    integration = set(collected("-m", "integration and not exhaustive"))
    files = [file for files in due.values() for file in files]
    run, drawn = chosen(tests, files, git("rev-parse", "HEAD") or "")
    drawn = [test for test in drawn if test in integration]
    missing = set(ALWAYS) - set(run)
    if missing:
        sys.exit(f".ci/parts.py names tests that don't exist: {sorted(missing)}")
    table = Table(
        "Tests of",
        "files",
        "because of",
        title=f"Compared with {base or 'the commits at which they passed'}",
    )
    for folder, files in due.items():
        table.add_row(
            folder, f"{len(files)} of {len(files_of(folder))}", next(iter(files.values()))
        )
    console.print(table)
    left = [folder for folder in folders() if folder not in due]
    console.print(
        f"Left to .ci/more: the integration tests of {', '.join(left) or 'no folder'}; all "
        "exhaustive tests."
    )
    console.print(
        f"{len(run)} tests run, one of each kind included, and {len(drawn)} others are drawn by "
        "the commit."
    )
    console.print(
        f"Open MPI: {'because of ' + ', '.join(on_open_mpi) if on_open_mpi else 'not needed'}."
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "integration").write_text("\n".join(run))
    (out / "drawn").write_text("\n".join(drawn))
    (out / "base").write_text(base or "")
    (out / "openmpi").write_text(" ".join(on_open_mpi))
    (out / "parts").write_text("\n".join(f"integration:{folder}" for folder in due))
    return 0


def concerns_open_mpi(folder: str, base: str | None) -> bool:
    """Returns whether the folder itself has changed.

    A change in what the folder imports only makes its integration tests due.
    """
    paths = (f"{PACKAGE}/{folder}", f"tests/mpi/{folder}", *UNDER_OPEN_MPI)
    return bool(why(paths, changed_since(base), counts_for(folder, base)))


def drawn(out: Path) -> int:
    """Runs the drawn cases. A case that also fails at the base doesn't fail the run."""
    tests = (out / "drawn").read_text().split("\n")
    failed = failures(ROOT, tests, out)
    if failed is None:
        return 1
    if not failed:
        return 0
    base = (out / "base").read_text()
    if not base:
        console.print(f"{len(failed)} drawn cases failed, and there's no base to run them at.")
        return 1
    tree = out / "tree"
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", tree, base], cwd=ROOT, check=True
    )
    try:
        before = failures(tree, failed, out) or []
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)
    for test in failed:
        console.print(
            f"{test}: fails {'at the base, too' if test in before else 'since this change'}"
        )
    return int(not set(failed) <= set(before))


def failures(tree: Path, tests: Sequence[str], out: Path) -> list[str] | None:
    """Returns the tests that fail in a checkout, or None if pytest couldn't run them."""
    if not any(tests):  # without arguments, pytest would run everything
        return []
    with tempfile.TemporaryDirectory(dir=out) as folder:
        names = Path(folder, "tests")
        names.write_text("\n".join(tests))
        line = [
            "uv",
            "run",
            "pytest",
            *TIERS["integration"][1],
            "-o",
            f"cache_dir={folder}/cache",
            f"@{names}",
        ]
        code = subprocess.run(line, cwd=tree, check=False).returncode
        last = Path(folder, "cache", "v", "cache", "lastfailed")
        failed = list(json.loads(last.read_text())) if last.exists() else []
    return None if code not in (0, 1) or (code and not failed) else failed


@dataclass(frozen=True)
class Part:
    """One unit of work that passes, and is recorded, on its own.

    Attributes:
        covers: The folder whose changes make this part due; see `covered`.
        command: The command that runs it; empty for tests.
        tier: The tier of its tests. All due parts of a tier run together.
        paths: Its tests.
    """

    covers: str
    command: Sequence[str] = ()
    tier: str = ""
    paths: Sequence[str] = ()

    def due(self, commit: str | None) -> str:
        """Returns why this part must run if it passed at `commit`, or "" if it needn't."""
        paths = covered(self.covers, tiers=runs_on(self.tier))
        return why(paths, changed_since(commit), counts_for(self.covers, commit))


def runs_on(tier: str) -> Sequence[str]:
    return ("mpi",) if tier in OVER_MPI else RUNS_ON


def parts() -> dict[str, Part]:
    found = {}
    for tier in TIERS:
        for folder in folders():
            if tier in OVER_MPI and folder == PACKAGE:
                continue
            if paths := paths_of(folder, runs_on(tier)):
                found[f"{tier}:{folder}"] = Part(folder, tier=tier, paths=paths)
    wheel = ["uv", "run", "python", ".ci/wheel.py"]
    return {
        **found,
        "wheel:release": Part(WHEEL, [*wheel, "release"]),
        "wheel:tests": Part(WHEEL_TESTS, [*wheel, "tests"]),
        "mutants": Part(MUTANTS, [".ci/mutants"]),
    }


def command_of(run: Sequence[Part], commit: str | None) -> list[str]:
    """Returns the command that runs one part, or several parts of one tier.

    While the command runs the parts of a tier, it records each part that has passed, at `commit`.
    If `commit` is None, it records nothing.
    """
    (first, *_) = run
    if not first.tier:
        return [*first.command]
    python, arguments = TIERS[first.tier]
    return [
        *python,
        RECORDED,
        first.tier,
        commit or "-",
        *arguments,
        *(path for part in run for path in part.paths),
    ]


def more(named: Sequence[str]) -> int:
    every = parts()
    unknown = set(named) - {*every, *(name.partition(":")[0] for name in every)}
    if unknown:
        sys.exit(
            f"There's no part {', '.join(sorted(unknown))}. `python .ci/parts.py show` lists them."
        )
    due: dict[str, list[str]] = {}  # parts that run together
    for name, part in every.items():
        if named and name not in named and name.partition(":")[0] not in named:
            continue
        if reason := part.due(passed().get(name)):
            console.print(f"{name}: {reason}")
            due.setdefault(part.tier or name, []).append(name)
        else:
            console.print(
                f"{name}: passed at {passed()[name][:10]}, and nothing that it covers has changed"
            )
    bad: list[str] = []
    for run, names in due.items():
        head = git("rev-parse", "HEAD")
        console.print(f"\n== {run}", style="bold")
        if not is_at(head):
            console.print(
                "The working tree has changes, so a pass won't be recorded.", style="yellow"
            )
            head = None
        command = command_of([every[name] for name in names], head)
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **OVER_MPI.get(run, {})}, check=False
        ).returncode
        if code == 0 and is_at(head):
            record(names, head)
        elif code != 0:
            bad += [name for name in names if head is None or passed().get(name) != head]
    console.print(f"failed: {', '.join(bad)}" if bad else "All of these parts have passed.")
    return int(bool(bad))


def record_selected(out: Path) -> int:
    """Records the parts that `.ci/run` selected and ran.

    If the working tree has uncommitted changes, nothing is recorded.
    """
    head = git("rev-parse", "HEAD")
    names = (out / "parts").read_text().split()
    if names and is_at(head):
        record(names, head)
        console.print(f"{RECORDS} now says that these parts have passed: {', '.join(names)}")
    return 0


def show() -> int:
    table = Table("Part", "Passed at", "Due because of")
    for name, part in parts().items():
        commit = passed().get(name)
        table.add_row(name, (commit or "-")[:10], part.due(commit))
    console.print(table)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    with_folder = {"select": select, "drawn": drawn, "record": record_selected}
    for name in with_folder:
        commands.add_parser(name).add_argument("folder", type=Path)
    commands.add_parser("more").add_argument("parts", nargs="*")
    commands.add_parser("show")
    args = parser.parse_args()
    if args.command in with_folder:
        return with_folder[args.command](args.folder)
    return more(args.parts) if args.command == "more" else show()


if __name__ == "__main__":
    sys.exit(main())
