"""Tests which tests CI runs for a change: the folders above it, one case of each kind, and a tenth
of the rest.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[3] / ".ci"


@pytest.fixture(scope="module")
def parts():
    # We don't import it by name, because a module of the benchmarks has the same name.
    spec = importlib.util.spec_from_file_location("ci_parts", CI / "parts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CI)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def changed(parts, monkeypatch):
    """Pretends that these files have changed since the commit `base`."""

    def change(*files):
        monkeypatch.setattr(parts, "changed_since", {"base": files}.get)
        monkeypatch.setattr(parts, "is_reworded", lambda commit, file, help_counts: False)

    return change


def due(parts, base="base"):
    return {folder for folder in parts.folders() if parts.reasons(folder, base)}


def test_change_concerns_every_folder_above(parts, changed):
    changed("jaxcross/wire/lower.py")
    assert {"wire", "world", "jobs", "step", "sweeps", "commands", "jaxcross"} <= due(parts)
    assert not {"interleave", "report", "docs", "examples"} & due(parts)
    changed("jaxcross/sweeps/search.py")
    # The tests of trackers run sweeps, and one of the documents names them.
    assert due(parts) == {"commands", "docs", "jaxcross", "report", "sweeps"}


def test_change_concerns_tests_that_use_the_folder(parts, changed):
    """No checkpoint module imports jobs, but the checkpoint tests run jobs. The programs of ranks
    also import each other.
    """
    changed("jaxcross/jobs/runner.py")
    assert "tests/cpu/checkpoint/test_checkpoint.py" in parts.reasons("checkpoint", "base")
    assert "tests/cpu/checkpoint/test_rank_local.py" not in parts.reasons("checkpoint", "base")
    changed("tests/mpi/cases/runner_faults.py")
    assert "jobs" in due(parts)


def test_tests_without_mpi_concern_no_part_that_runs_only_those_over_mpi(parts, changed):
    every = parts.parts()

    def concerned(file):
        changed(file)
        return {name for name, part in every.items() if part.due("base")}

    both = {"integration:exchange", "exhaustive:exchange", "wheel:tests"}
    assert concerned("tests/cpu/exchange/test_table.py") == both
    over_mpi = {f"{tier}:exchange" for tier in parts.OVER_MPI}
    assert concerned("tests/mpi/exchange/test_table.py") == both | over_mpi


def test_module_at_the_top_of_the_package_is_like_a_folder(parts, changed):
    changed("jaxcross/_tracing.py")
    assert {"exchange", "tensor", "program"} <= due(parts) and "interleave" not in due(parts)


@pytest.mark.parametrize(
    ("file", "folders"),
    [
        ("tests/cpu/tensor/test_mesh.py", {"tensor"}),
        ("tests/mpi/cases/tensor_table.py", {"tensor"}),
        (
            "benchmarks/race.py",
            {"benchmarks", "checkpoint", "docs", "exchange", "health", "lab", "plan", "program"},
        ),
        ("examples/gpt.py", {"docs", "examples", "program", "step"}),
        ("CHANGELOG.md", {"docs"}),
        ("docs/howto/cluster.md", {"docs"}),
        (".ci/run", set()),
        (".ci/installs.py", {"benchmarks"}),
    ],
)
def test_what_is_not_in_the_package_has_a_row(parts, changed, file, folders):
    changed(file)
    assert due(parts) == folders


@pytest.mark.parametrize("file", ["pyproject.toml", "tests/conftest.py", "tests/support/zoo.py"])
def test_what_all_tests_use_concerns_all(parts, changed, file):
    changed(file)
    assert due(parts) == set(parts.folders())


@pytest.mark.parametrize("base", [None, "a commit that git doesn't know"])
def test_without_a_base_everything_runs(parts, changed, base):
    changed()
    assert due(parts) == set()
    assert due(parts, base) == set(parts.folders())


def test_rest_is_drawn_by_commit(parts):
    tests = [f"tests/cpu/tensor/test_mesh.py::test_it[{n}]" for n in range(2000)]
    wire, tensor = ["tests/mpi/wire/test_table.py"], ["tests/cpu/tensor/test_mesh.py"]
    run, drawn = parts.chosen([*tests, *parts.ALWAYS], wire, "a")
    assert run == list(parts.ALWAYS)
    assert 150 < len(drawn) < 250
    assert parts.chosen(tests, wire, "a") == ([], drawn)
    assert parts.chosen(tests, wire, "b")[1] != drawn
    assert parts.chosen(tests, tensor, "a") == (tests, [])


def test_every_part_says_what_it_covers(parts):
    for name, part in parts.parts().items():
        assert parts.command_of([part], None) and parts.covered(part.covers), name
    kinds = {name.partition(":")[0] for name in parts.parts()}
    assert kinds == {*parts.TIERS, "wheel", "mutants"}


def test_text_about_the_mutants_does_not_make_them_due(parts, changed):
    mutants = parts.parts()["mutants"]
    changed("tests/mutation/README.md")
    assert not mutants.due("base")
    changed("tests/mutation/inside/probe.py")
    assert mutants.due("base")


OLD = '''"""Adds."""

def add(a, b):
    """Adds two numbers."""
    return a + b  # as expected
'''


@pytest.mark.parametrize(
    ("new", "is_same"),
    [
        (
            OLD.replace("Adds two numbers", "Returns the sum").replace("as expected", "why not"),
            True,
        ),
        (OLD.replace('    """Adds two numbers."""\n', ""), True),
        (OLD.replace("def add(a, b):", "def add(\n    a,\n    b,\n):"), True),
        (OLD.replace("a + b", "a - b"), False),
        (OLD + 'print("Adds.")\n', False),
        (OLD + "print(__doc__)\n", False),
        (None, False),
    ],
    ids=["words", "no docstring", "layout", "code", "text", "uses its docstring", "deleted"],
)
def test_rewording_a_module_concerns_only_tests_that_read_its_text(
    parts, monkeypatch, tmp_path, new, is_same
):
    (tmp_path / "jaxcross/wire").mkdir(parents=True)
    if new is not None:
        (tmp_path / "jaxcross/wire/lower.py").write_text(new)
    recorded = sys.modules["recorded"]
    monkeypatch.setattr(recorded, "git", lambda *words: OLD)
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    recorded._is_reworded.cache_clear()
    assert parts.is_reworded("base", "jaxcross/wire/lower.py") == is_same
    monkeypatch.setattr(parts, "changed_since", {"base": ["jaxcross/wire/lower.py"]}.get)
    due = {name for name, part in parts.parts().items() if part.due("base")}
    assert {"integration:jaxcross", "wheel:tests"} <= due
    assert ("mpi4py:wire" in due) != is_same


def test_the_help_of_a_program_counts_as_code(parts, monkeypatch, tmp_path):
    recorded = sys.modules["recorded"]
    old = OLD + "print(__doc__)\n"
    monkeypatch.setattr(recorded, "git", lambda *words: old)
    monkeypatch.setattr(recorded, "ROOT", tmp_path)
    recorded._is_reworded.cache_clear()
    file = tmp_path / "program.py"
    file.write_text(old.replace('"""Adds."""', '"""Sums."""'))
    assert not parts.is_reworded("base", "program.py")
    assert parts.is_reworded("base", "program.py", help_counts=False)
    file.write_text(old.replace("Adds two numbers", "Returns the sum"))
    assert parts.is_reworded("base", "program.py")


def test_tests_that_one_tier_is_enough_for_exist(parts):
    for test in parts.ONCE:
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in parts.text_of(file), test


def test_pass_is_recorded_and_not_repeated(parts, monkeypatch, tmp_path, capfd):
    """Of two parts, one fails. Only that one is due again."""

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True
        )

    (tmp_path / ".ci").mkdir()
    (tmp_path / "file").write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "covered", lambda folder, file=None, tiers=(): ["file"])
    monkeypatch.setattr(sys.modules["recorded"], "ROOT", tmp_path)
    commands = {"good": ["echo", "ran"], "bad": ["false"], "also": ["true"]}
    monkeypatch.setattr(
        parts, "parts", lambda: {name: parts.Part("x", words) for name, words in commands.items()}
    )
    assert parts.more([]) == 1
    assert list(json.loads((tmp_path / parts.RECORDS).read_text())) == ["also", "good"]
    git("add", ".")
    git("commit", "--quiet", "-m", "what has passed")
    assert "ran" in capfd.readouterr().out
    assert parts.more(["good"]) == 0
    assert "nothing that it covers has changed" in capfd.readouterr().out
    (tmp_path / "parts").write_text("integration:wire")
    assert parts.record_selected(tmp_path) == 0
    assert set(json.loads((tmp_path / parts.RECORDS).read_text())) == {"also", "good"}, (
        "there's a new file"
    )
    (tmp_path / "parts").unlink()
    (tmp_path / "file").write_text("2")
    assert parts.more(["good"]) == 0
    assert "The working tree has changes" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="no part other"):
        parts.more(["other"])


def test_part_is_named_alone_or_with_its_tier(parts, monkeypatch, capfd):
    monkeypatch.setattr(
        parts,
        "parts",
        lambda: {f"a:{n}": parts.Part(parts.WHEEL, ["echo", f"ran {n}"]) for n in (1, 2)},
    )
    monkeypatch.setattr(parts, "passed", dict)
    monkeypatch.setattr(parts, "record", lambda names, commit: None)
    monkeypatch.setattr(parts, "changed_since", lambda commit: None)
    for named, ran in ((["a:1"], "ran 1\n"), (["a"], "ran 1\nran 2\n")):
        assert parts.more(named) == 0
        assert (
            "".join(
                line for line in capfd.readouterr().out.splitlines(True) if line.startswith("ran")
            )
            == ran
        )


def test_folders_are_recorded_one_by_one(parts, tmp_path):
    """A folder counts as passed even if another folder fails or can't be imported.

    A folder without tests counts as passed, too.
    """

    def git(*words):
        line = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(
            line, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / ".ci").mkdir()
    shutil.copy(CI / "recorded.py", tmp_path / ".ci")
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / ".gitignore").write_text("__pycache__")
    bodies = {
        "cpu/good": "assert True",
        "cpu/bad": "assert False",
        "null/bad": "pass",
        "null/broken": "pass",
    }
    for folder, body in bodies.items():
        (tmp_path / "tests" / folder).mkdir(parents=True)
        name = f"test_{folder.replace('/', '_')}"
        (tmp_path / "tests" / folder / f"{name}.py").write_text(f"def {name}(): {body}")
    (tmp_path / "tests/null/broken/test_import.py").write_text("import nothing_like_that")
    (tmp_path / "tests/cpu/empty").mkdir()
    (tmp_path / "tests/null/test_all.py").write_text("def test_all(): pass")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    head = git("rev-parse", "HEAD")

    def passed(*paths):
        line = [
            sys.executable,
            ".ci/recorded.py",
            "tier",
            head,
            "-n",
            "2",
            "-p",
            "no:cacheprovider",
            *paths,
        ]
        code = subprocess.run(line, cwd=tmp_path, check=False, capture_output=True).returncode
        return code, set(json.loads((tmp_path / parts.RECORDS).read_text()))

    assert passed("tests/cpu/empty/") == (0, {"tier:empty"})
    all_of_them = [
        "tests/cpu/bad/",
        "tests/null/bad/",
        "tests/null/broken/",
        "tests/cpu/good/",
        "tests/null/test_all.py",
    ]
    wanted = {"tier:empty", "tier:good", "tier:jaxcross"}
    assert passed(*all_of_them) == (1, wanted)
    (tmp_path / "tests/cpu/bad/test_cpu_bad.py").write_text("def test_it(): pass")
    assert passed("tests/cpu/bad/") == (0, wanted), "the checkout has changes"


@pytest.fixture
def pytest_runs(parts, monkeypatch, tmp_path):
    """Pretends that pytest ran. `runs(here, before)` gives its exit codes and failures, now and at
    the base.
    """
    (tmp_path / "drawn").write_text("a\nb")
    (tmp_path / "base").write_text("base")

    def drawn(here, before):
        def run(line, cwd, **options):
            code, failed = here if cwd == parts.ROOT else before
            if "pytest" in line:
                cache = Path(
                    next(str(word) for word in line if "cache_dir=" in str(word)).partition("=")[2]
                )
                (cache / "v" / "cache").mkdir(parents=True)
                (cache / "v" / "cache" / "lastfailed").write_text(
                    json.dumps(dict.fromkeys(failed, True))
                )
                return subprocess.CompletedProcess(line, code)
            return subprocess.CompletedProcess(line, 0)

        monkeypatch.setattr(parts.subprocess, "run", run)
        return parts.drawn(tmp_path)

    return drawn


def test_drawn_case_that_failed_before_is_reported_only(pytest_runs, capsys):
    assert pytest_runs((0, []), (1, [])) == 0
    assert pytest_runs((1, ["a", "b"]), (1, ["a", "b", "c"])) == 0
    assert capsys.readouterr().out.count("fails at the base, too") == 2
    assert pytest_runs((1, ["a", "b"]), (1, ["a"])) == 1
    assert "b: fails since this change" in capsys.readouterr().out


@pytest.mark.parametrize("code", [1, 2, 4, 5])
def test_drawn_cases_that_cannot_run_fail_the_run(pytest_runs, code):
    """A base that can't be installed or collected is no excuse for a failure."""
    assert pytest_runs((code, []), (0, [])) == 1
    assert pytest_runs((1, ["a"]), (code, [])) == 1


def test_open_mpi_runs_for_what_its_ranks_run_on(parts, changed):
    for file in (
        "jaxcross/wire/lower.py",
        "jaxcross/_jax_compat/__init__.py",
        ".ci/with-openmpi",
        "tests/support/zoo.py",
    ):
        changed(file)
        assert parts.concerns_open_mpi("wire", "base"), file
    changed("jaxcross/tensor/mesh.py")
    assert not parts.concerns_open_mpi("wire", "base")
