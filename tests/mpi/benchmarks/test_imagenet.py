"""benchmarks/imagenet_resnet.py at toy size: started by itself and by mpirun; the page cache that it empties."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxcross.commands import launch
from jaxcross.data import synthesise

pytestmark = pytest.mark.integration


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BENCHMARK = BENCHMARKS / "imagenet_resnet.py"


def check(result: dict[str, Any]) -> None:
    assert result["question"].startswith("How many images a second")
    assert result["throughput"]["equal_to_the_bit"] is True
    for cache in ("cold", "warm"):
        for policy in ("sequential", "crossover"):
            (run,) = result["throughput"][cache][policy]["runs"]
            assert list(run["images_per_s_by_job"]) == ["job0 lr=0.1,seed=0", "job1 lr=0.2,seed=1"]
            assert all(rate > 0 for rate in run["images_per_s_by_job"].values())
            assert set(run["input_wait_s"]) == set(run["images_per_s_by_job"])
            assert {job["steps"] for job in run["account"]["jobs"]} == {result["steps"]}
    sequential, crossover = (result["accuracy"][policy] for policy in ("sequential", "crossover"))
    # The same bits mean the same accuracies at the same steps, however long they took.
    for name, job in sequential["jobs"].items():
        curve, other = job["step_s_accuracy"], crossover["jobs"][name]["step_s_accuracy"]
        assert [(step, accuracy) for step, _, accuracy in curve] == [(step, accuracy) for step, _, accuracy in other]
        assert curve[-1][2] >= result["accuracy"]["goal"] or curve[-1][0] == result["accuracy"]["steps_at_most"]


@pytest.mark.exhaustive
def test_by_itself(tmp_path: Path, quick_compiler: dict[str, str]) -> None:
    out = tmp_path / "out.json"
    line = [sys.executable, str(BENCHMARK), "--smoke", "--accuracy", "0.5", "--json", str(out)]
    subprocess.run(line, check=True, timeout=900, env={**os.environ, **quick_compiler})
    result = json.loads(out.read_text())
    check(result)
    assert result["data"] == "synthetic"
    assert result["command"] == ["python", "imagenet_resnet.py", *line[2:]]
    assert result["accuracy"]["crossover"]["s"] > 0
    link = result["throughput"]["link"]
    assert link.startswith("real link 500mbit") or ("emulated" in link and "speedup" not in result)


def test_by_mpirun_with_a_data_set(mpirun: Callable[..., Any], tmp_path: Path, quick_compiler: dict[str, str]) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    options: dict[str, Any] = {
        "--data-dir": tmp_path / "data", "--json": tmp_path / "out.json", "--steps": 6, "--accuracy": 1.1,
        "--accuracy-steps": 4, "--evaluate-every": 2, "--link": "emulate:500mbit",
    }  # fmt: skip
    words = ["--smoke", *(str(word) for pair in options.items() for word in pair)]
    done = mpirun(2, str(BENCHMARK), *words, timeout=900, env=quick_compiler).check()
    result = json.loads((tmp_path / "out.json").read_text())
    check(result)
    assert "speedup" not in result
    assert result["accuracy"]["crossover"]["s"] is None
    assert result["accuracy"]["crossover"]["reason"].startswith("not reached by job0 lr=0.1,seed=0, job1")
    assert "page cache" in done.stdout


def test_ranks_without_data_say_how_to_get_some(mpirun: Callable[..., Any]) -> None:
    done = mpirun(1, str(BENCHMARK), "--smoke")
    assert done.returncode != 0
    assert "Ranks that were started by mpirun need --data-dir; `jaxcross data synth DIR`" in done.stderr


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_imagenet", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "compare"], "`--policy` is for examples/imagenet_resnet.py: this benchmark runs both ways"),
        (["--checkpoints=kept"], "`--checkpoints` is for examples/imagenet_resnet.py: this benchmark resumes none"),
        (["--checkpoint-every", "5"], "`--checkpoint-every` is for examples/imagenet_resnet.py"),
        (["--epo", "2"], "`--epochs` is for examples/imagenet_resnet.py: this benchmark counts by `--steps`"),
    ],
)
def test_meaningless_example_options_are_rejected(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str],
    message: str,
) -> None:  # fmt: skip
    """Options of the example that mean nothing here are refused."""
    monkeypatch.setattr(sys, "argv", ["imagenet_resnet.py", *words])
    with pytest.raises(SystemExit):
        benchmark.options()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--job", "lr=0.3,seed=5"], ["--job=lr=0.3,seed=5"], []])
def test_jobs_are_added_where_none_is_given(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["imagenet_resnet.py", "--cut", "auto", *words])
    _, rest = benchmark.options()
    assert rest == ["--steps", "20", "--cut", "auto", *(words or benchmark.JOBS)]


def test_one_rank_has_no_link(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines: list[list[str]] = []

    def run(line: list[str], environ: dict[str, str]) -> None:
        lines.append(line)
        told = {"question": "", "command": [], "versions": {}, "machine": {}, "ranks": 1}
        Path(line[line.index("--json") + 1]).write_text(json.dumps(told))

    monkeypatch.setattr(launch, "find_mpirun", lambda: launch.Mpirun(path="mpirun", vendor="mpich"))
    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(sys, "argv", ["imagenet_resnet.py", "--ranks", "1", "--data-dir", "data"])
    assert benchmark.launch(*benchmark.options(), tmp_path) == {"ranks": 1}
    assert [line[:3] for line in lines] == [["mpirun", "-n", "1"]]
    assert "--link" not in lines[0]
    assert capsys.readouterr().out == "no real link: one rank has nobody to speak to\n"


RANK = "import os, signal; print('up', os.getpid(), flush=True); signal.pause()"

TOLD = f"""
import sys
from argparse import Namespace
from jaxcross.commands import launch

made = launch.mpirun_command
launch.mpirun_command = lambda **wish: made(**{{**wish, "program": [sys.executable, "-c", {RANK!r}]}})
"""


GPU_OPTIONS = (
    "no_lab=True, rate='1gbit', model='gpt', jobs=1, steps=1, repeats=1, batch_size=1, smoke=True, stand_in=True"
)


@pytest.mark.parametrize(
    "words",
    [
        "sys.argv = ['', '--smoke', '--rate', 'none', '--images', '8']; from imagenet_resnet import main; main()",
        f"from gpu_ranks import measure; measure(Namespace({GPU_OPTIONS}), print)",
    ],
    ids=["imagenet_resnet", "gpu_ranks"],
)
def test_terminated_benchmark_leaves_nothing_behind(words: str, tmp_path: Path) -> None:
    """A benchmark that is terminated leaves nothing behind."""
    if launch.find_mpirun() is None:
        pytest.skip("no mpirun")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]), "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-c", TOLD + words]
    up: list[int] = []
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ) as benchmark:
        assert benchmark.stdout is not None
        try:
            while len(up) < 2:
                said = benchmark.stdout.readline().split()
                assert said, "it ended early"
                up += [int(said[1])] if said[0] == "up" else []
            assert any(tmp_path.iterdir())
            benchmark.terminate()
            assert benchmark.wait(timeout=240) == 128 + signal.SIGTERM
            assert not any(tmp_path.iterdir())
            assert not [pid for pid in up if alive(pid)]
        finally:
            benchmark.kill()
            for pid in filter(alive, up):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()  # which nobody has once it has ended


def test_without_evaluation_there_is_no_accuracy(
    mpirun: Callable[..., Any], tmp_path: Path, quick_compiler: dict[str, str]
) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    out = tmp_path / "out.json"
    words = ["--data-dir", str(tmp_path / "data"), "--json", str(out), "--steps", "3", "--eval-steps", "0"]
    mpirun(1, str(BENCHMARK), "--smoke", *words, "--job=lr=0.3,seed=5", timeout=900, env=quick_compiler).check()
    result = json.loads(out.read_text())
    assert result["jobs"] == ["lr=0.3,seed=5"]
    assert "accuracy" not in result


@pytest.fixture
def page_cache() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module("page_cache")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_page_cache_of_files_is_dropped_and_filled(page_cache: ModuleType, tmp_path: Path) -> None:
    """The page cache of named files is emptied and filled."""
    ours, theirs = tmp_path / "a.array_record-0", tmp_path / "b.array_record-0"
    for path in (ours, theirs):
        path.write_bytes(os.urandom(1 << 20))
    page_cache.fill([ours, theirs])
    assert page_cache.resident_share([ours, theirs]) == 1.0
    page_cache.drop([ours])
    if page_cache.resident_share([ours]) != 0.0:
        pytest.skip("this file system keeps its files in memory")
    assert page_cache.resident_share([theirs]) == 1.0
    page_cache.fill([ours])
    assert page_cache.resident_share([ours]) == 1.0


def test_only_record_files_are_named(page_cache: ModuleType, tmp_path: Path) -> None:
    for name in ("imagenet2012-train.array_record-00000-of-00001", "dataset_info.json"):
        (tmp_path / name).touch()
    assert [p.name for p in page_cache.files_of(tmp_path)] == ["imagenet2012-train.array_record-00000-of-00001"]
