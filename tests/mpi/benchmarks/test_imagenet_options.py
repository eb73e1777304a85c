"""benchmarks/imagenet_resnet.py: options that it refuses or adds, what it leaves behind, and the
page cache that it empties.
"""

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


def test_ranks_without_data_say_how_to_get_some(mpirun: Callable[..., Any]) -> None:
    done = mpirun(1, str(BENCHMARK), "--smoke")
    assert done.returncode != 0
    assert (
        "Ranks that were started by mpirun need --data-dir; `jaxcross data synth DIR`"
        in done.stderr
    )


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
        (
            ["--policy", "compare"],
            "`--policy` is for examples/imagenet_resnet.py: this benchmark runs both ways",
        ),
        (
            ["--checkpoints=kept"],
            "`--checkpoints` is for examples/imagenet_resnet.py: this benchmark resumes none",
        ),
        (["--checkpoint-every", "5"], "`--checkpoint-every` is for examples/imagenet_resnet.py"),
        (
            ["--epo", "2"],
            "`--epochs` is for examples/imagenet_resnet.py: this benchmark counts by `--steps`",
        ),
    ],
)
def test_meaningless_example_options_are_rejected(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    """Some of the example's options have no meaning in the benchmark."""
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
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lines: list[list[str]] = []

    def run(line: list[str], environ: dict[str, str]) -> None:
        lines.append(line)
        kept = {"question": "", "command": [], "versions": {}, "machine": {}, "ranks": 1}
        Path(line[line.index("--json") + 1]).write_text(json.dumps(kept))

    monkeypatch.setattr(launch, "find_mpirun", lambda: launch.Mpirun(path="mpirun", vendor="mpich"))
    monkeypatch.setattr(benchmark, "run", run)
    monkeypatch.setattr(sys, "argv", ["imagenet_resnet.py", "--ranks", "1", "--data-dir", "data"])
    assert benchmark.launch(*benchmark.options(), tmp_path) == {"ranks": 1}
    assert [line[:3] for line in lines] == [["mpirun", "-n", "1"]]
    assert "--emulate-link" not in lines[0]
    assert capsys.readouterr().out == "no real link: one rank has nobody to speak to\n"


RANK = "import os, signal; print('up', os.getpid(), flush=True); signal.pause()"

LAUNCHES_STAND_IN = f"""
import sys
from argparse import Namespace
from jaxcross.commands import launch

made = launch.mpirun_command
program = [sys.executable, "-c", {RANK!r}]
launch.mpirun_command = lambda **wish: made(**{{**wish, "program": program}})
"""


GPU_OPTIONS = (
    "no_lab=True, rate='1gbit', model='gpt', jobs=1, steps=1, repeats=1, batch_size=1, smoke=True, "
    "stand_in=True"
)


@pytest.mark.parametrize(
    "words",
    [
        (
            "sys.argv = ['', '--smoke', '--rate', 'none', '--images', '8']; from imagenet_resnet "
            "import main; main()"
        ),
        f"from gpu_ranks import measure; measure(Namespace({GPU_OPTIONS}), print)",
    ],
    ids=["imagenet_resnet", "gpu_ranks"],
)
def test_terminated_benchmark_leaves_nothing_behind(words: str, tmp_path: Path) -> None:
    if launch.find_mpirun() is None:
        pytest.skip("no mpirun")
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]),
        "TMPDIR": str(tmp_path),
    }
    line = [sys.executable, "-c", LAUNCHES_STAND_IN + words]
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
    return Path(f"/proc/{pid}/exe").exists()  # missing once the process has ended


def test_without_evaluation_there_is_no_accuracy(
    mpirun: Callable[..., Any], tmp_path: Path, quick_compiler: dict[str, str]
) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    out = tmp_path / "out.json"
    words = [
        "--data-dir",
        str(tmp_path / "data"),
        "--json",
        str(out),
        "--steps",
        "3",
        "--eval-steps",
        "0",
    ]
    mpirun(
        1, str(BENCHMARK), "--smoke", *words, "--job=lr=0.3,seed=5", timeout=900, env=quick_compiler
    ).check()
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
    assert [p.name for p in page_cache.files_of(tmp_path)] == [
        "imagenet2012-train.array_record-00000-of-00001"
    ]
