"""Records which tests of a suite evaluate which mutants.

The suite is run once for this, with a probe at each mutant.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.mutation import mutants as m
from tests.mutation.workspace import INSIDE, Workspace

STAGES = (("-m", "not exhaustive and not integration"), ("-m", "integration and not exhaustive"))
"""Pytest's arguments for each part of a suite. A mutant is tried on the first part, then on the
next.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """A recorded test: its part of the suite, and its duration including `setup_s` for fixtures."""

    stage: int
    duration_s: float
    setup_s: float


class Suite:
    """A suite's name, its checkout, and what was recorded about it in a folder below `out`."""

    def __init__(self, out: Path, name: str) -> None:
        self.name = name
        self._folder = out / name
        self._settings = self._folder / "suite.json"
        settings = json.loads(self._settings.read_text()) if self._settings.exists() else {}
        self._take(settings)

    def _take(self, settings: dict) -> None:
        self.tree = Path(settings.get("tree", "."))
        self.stages: list[list[str]] = settings.get("stages", [])
        self.paths: list[str] = settings.get("paths", [])
        self.commit: str = settings.get("commit", "")

    def define(self, tree: Path, stages: Sequence[Sequence[str]], paths: Sequence[str]) -> None:
        """Defines the suite. Raises SystemExit if a different one was recorded under this name."""
        settings = {
            "tree": str(tree),
            "stages": [list(stage) for stage in stages],
            "paths": list(paths),
            "commit": commit(tree),
        }
        if self._settings.exists() and json.loads(self._settings.read_text()) != settings:
            raise SystemExit(
                f"`{self._settings}` records a different checkout, commit or selection of tests "
                f"for the suite `{self.name}`. Remove `{self._folder}` to record it again, along "
                "with its lines in the results"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._settings.write_text(json.dumps(settings, indent=1))
        self._take(settings)

    def _paths(self, stage: int) -> tuple[Path, Path]:
        return self._folder / f"stage{stage}.tests.jsonl", self._folder / f"stage{stage}.hits"

    def record(self, mutants: Iterable[m.Mutant], workspace: Workspace, workers: int) -> None:
        """Runs all parts of the suite that aren't recorded yet, with probes at the mutants."""
        todo = [stage for stage in range(len(self.stages)) if not self._paths(stage)[0].exists()]
        files = with_probes(workspace.folder, mutants)
        for stage in todo:
            tests, hits = self._paths(stage)
            partial = tests.with_suffix(".partial")
            for old in (partial, hits):
                old.unlink(missing_ok=True)
            probe = (INSIDE / "probe.py").read_text().replace('FILE = ""', f"FILE = {str(hits)!r}")
            originals = {file: workspace.read(file) for file in files}
            for file, source in files.items():
                workspace.write(f"{file.partition('/')[0]}/_mutation_probe.py", probe.encode())
                workspace.write(file, source)
            options = [
                "-p",
                "mutation_record",
                f"--mutation-log={partial}",
                "-p",
                "no:cacheprovider",
                "-n",
                str(workers),
            ]
            print(
                f"suite `{self.name}`, part {stage + 1} of {len(self.stages)}: pytest "
                f"{self.stages[stage]}",
                flush=True,
            )
            code = workspace.pytest(
                [*self.stages[stage], *self.paths, *options, "--hypothesis-seed=0"]
            )
            for file, source in originals.items():
                workspace.write(file, source)
            if code not in (0, 1, 5):
                raise SystemExit(
                    f"pytest ended with exit code {code}; its output is in `{workspace.output}`"
                )
            partial.touch()
            failed = {line["test"] for line in lines(partial) if line.get("outcome") == "failed"}
            print(
                f"{len(_tests(partial, stage))} tests, of which {len(failed)} failed",
                *sorted(failed),
                sep="\n  ",
            )
            partial.rename(tests)

    def load(self) -> Covering:
        """Returns what was recorded."""
        if not self.stages:
            raise SystemExit(
                f"the suite `{self.name}` is not recorded: run `coverage --suite {self.name}` first"
            )
        tests: dict[str, Test] = {}
        hits: defaultdict[str, set[str]] = defaultdict(set)
        for stage in range(len(self.stages)):
            log, recorded = self._paths(stage)
            if not log.exists():
                raise SystemExit(
                    f"part {stage + 1} of the suite `{self.name}` is not recorded: run `coverage` "
                    "first"
                )
            tests |= _tests(log, stage)
            for line in recorded.read_text().splitlines() if recorded.exists() else ():
                key, _, name = line.partition("\t")
                hits[key].add(name.rpartition(" (")[0] or name)
        return Covering(self.tree, tests, hits)


class Covering:
    """Decides which tests to run for a mutant."""

    def __init__(self, tree: Path, tests: dict[str, Test], hits: dict[str, set[str]]) -> None:
        self.tests = tests
        self._tree = tree
        self._hits = hits
        self._by_file: defaultdict[str, set[str]] = defaultdict(set)
        self._setup_s: defaultdict[str, float] = defaultdict(float)
        for name, test in tests.items():
            file = name.partition("::")[0]
            self._by_file[file].add(name)
            self._setup_s[file] = max(self._setup_s[file], test.setup_s)

    def longest_s(self, name: str) -> float:
        """Returns the duration of a test or file if it also has to set up its file's shared
        fixtures.
        """
        test = self.tests.get(name)
        return (test.duration_s if test else 0) + self._setup_s[name.partition("::")[0]]

    def of(self, mutant: m.Mutant) -> tuple[list[str], list[str]]:
        """Returns the tests that evaluate the mutant, and the other tests of their files, both in
        the order in which to run them.

        If a mutant is evaluated on import, we count it as covered by every test that enters a
        function of its file, or of a file that imports its file. If a mutant was evaluated while
        pytest collected a test file, all tests of that file count.
        """
        keys = [mutant.key]
        if mutant.on_import:
            keys = [m.entry(file) for file in m.readers(self._tree, mutant.file)]
        names = set().union(*(self._hits.get(key, ()) for key in keys))
        files = [
            file
            for file in self._by_file
            if any("::" not in name and name.endswith(f"/{file}") for name in names)
        ]
        direct = (names & self.tests.keys()).union(*(self._by_file[file] for file in files))
        mates = set().union(*(self._by_file[name.partition("::")[0]] for name in direct)) - direct

        # We run the cheapest tests first. The tests of the mutant's own folder kill most mutants,
        # so we treat them as ten times cheaper than they are.
        folder = PurePosixPath(mutant.file).parent.name

        def cost(name: str) -> tuple[int, float, str]:
            test = self.tests[name]
            near = folder in PurePosixPath(name.partition("::")[0]).parts
            return test.stage, test.duration_s * (0.1 if near else 1), name

        return sorted(direct, key=cost), sorted(mates, key=cost)

    def nameless(self, key: str) -> bool:
        """Whether the place was evaluated by a process without a test's name in its environment."""
        return "" in self._hits.get(key, ())


def with_probes(tree: Path, mutants: Iterable[m.Mutant]) -> dict[str, bytes]:
    """Returns the new source of each file that gets probes."""
    by_file: defaultdict[str, list[m.Mutant]] = defaultdict(list)
    entries: set[str] = set()
    for each in mutants:
        by_file[each.file].append(each)
        if each.on_import:
            entries |= m.readers(tree, each.file)
    return {
        file: m.with_probes(
            (tree / file).read_bytes(), file, by_file[file], functions=file in entries
        )
        for file in sorted({*by_file, *entries})
    }


def commit(tree: Path) -> str:
    """Returns the last commit that changed the package or its tests, plus `+` if files differ from
    it.
    """
    paths = ["--", "jaxcross", "tests", "benchmarks", "examples", "pyproject.toml"]

    def git(*arguments: str) -> str:
        line = ["git", "-C", os.fspath(tree), *arguments, *paths]
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()

    return f"{git('log', '-1', '--format=%H')[:12]}{'+' if git('status', '--porcelain') else ''}"


def lines(path: Path) -> list[dict]:
    """Returns the parsed lines of a JSON-lines file, ignoring an incomplete last line."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def _tests(log: Path, stage: int) -> dict[str, Test]:
    reports = [line for line in lines(log) if "test" in line]
    skipped = {line["test"] for line in reports if line["outcome"] == "skipped"}
    seconds: defaultdict[str, float] = defaultdict(float)
    setup: defaultdict[str, float] = defaultdict(float)
    for line in reports:
        seconds[line["test"]] += line["duration_s"]
        if line["when"] == "setup":
            setup[line["test"]] = line["duration_s"]
    return {
        name: Test(stage=stage, duration_s=took, setup_s=setup[name])
        for name, took in seconds.items()
        if name not in skipped
    }
