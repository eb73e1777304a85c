"""gpu.py without an accelerator: how it reads a profile, and that it runs on a stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from jaxcross.commands.launch import find_mpirun, mpirun_command

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
CASE = ROOT / "tests" / "gpu" / "case.py"
US = 1000


def imported(name: str) -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def profile() -> Iterator[ModuleType]:
    yield from imported("gpu_profile")


@pytest.fixture(scope="module")
def target() -> Iterator[ModuleType]:
    yield from imported("gpu_target")


def plane(name: str, lines: dict[str, list[tuple[str, int, int, str]]]) -> str:
    """Returns one profiler plane from events of (name, start us, end us, executable)."""
    names = sorted({event[0] for events in lines.values() for event in events})
    text = "".join(
        f'event_metadata {{ key: {n} value {{ id: {n} name: "{x}" }} }}\n'
        for n, x in enumerate(names, 1)
    )
    text += 'stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }\n'
    for number, (line, events) in enumerate(lines.items()):
        made = ""
        for event, start, end, module in events:
            stat = f'stats {{ metadata_id: 1 str_value: "{module}" }}' if module else ""
            place = f"offset_ps: {start * 10**6} duration_ps: {(end - start) * 10**6}"
            made += f"events {{ metadata_id: {names.index(event) + 1} {place} {stat} }}\n"
        text += f'lines {{ id: {number} name: "{line}" timestamp_ns: 0\n{made} }}\n'
    return f'planes {{ name: "{name}"\n{text} }}\n'


def space(device: dict[str, list[tuple[str, int, int, str]]], *marks: tuple[int, int]) -> Any:
    """Returns a profile with clock marks of (microseconds in the profile, host nanoseconds)."""
    python = [(f"jaxcross-clock {host}", at, at, "") for at, host in marks]
    return ProfileData.from_text_proto(
        plane("/host:CPU", {"python": python}) + plane("/device:GPU:0", device)
    )


STREAMS = {
    "Stream #13(Compute)": [
        ("fusion", 10, 20, "jit_job_0_0"),
        ("gemm", 22, 30, "jit_job_0_0"),
        ("fusion", 34, 60, "jit_job_1_0"),
        ("Memset", 60, 61, ""),
    ],
    "Stream #14(MemcpyD2H)": [("MemcpyD2H", 28, 44, "")],
    "Stream #15(MemcpyH2D)": [("MemcpyH2D", 55, 70, "")],
    "XLA Modules": [("jit_job_0_0", 0, 100, "")],
}


def test_copies_beside_kernels(profile: ModuleType) -> None:
    recording = profile.read(space(STREAMS, (0, 0)))
    assert recording.window == (10 * US, 60 * US)
    assert profile.overlap(recording) == {
        "kernels_s": pytest.approx(44e-6),
        "to_host_s": pytest.approx(16e-6),
        "to_host_beside_kernels_s": pytest.approx(12e-6),  # from 28 to 30 and from 34 to 44
        "to_device_s": pytest.approx(15e-6),
        "to_device_beside_kernels_s": pytest.approx(5e-6),
    }


def test_idle_time_is_split_by_cause(profile: ModuleType) -> None:
    recording = profile.read(space(STREAMS, (0, 0)))
    shares = profile.idleness(recording, [(33 * US, 90 * US)])
    assert shares["idle_share"] == pytest.approx(6 / 50)
    assert shares["idle_inside_segments_share"] == pytest.approx(2 / 50)
    assert shares["idle_between_ready_segments_share"] == pytest.approx(
        1 / 50
    )  # 33 to 34: nothing was ready before that
    assert shares["met"] is False
    assert profile.idleness(recording, [(10 * US, 20 * US)])["met"] is True
    unready = profile.idleness(recording)
    assert unready["idle_between_ready_segments_share"] == 0 and unready["met"] is None


def test_the_quickest_mark_tells_the_clock(profile: ModuleType) -> None:
    data = space(
        STREAMS, (1, 5_000_000), (5, 5_000_000 + 5 * US)
    )  # the first one started a microsecond late
    assert profile.clock_shift_ns(data) == 5_000_000
    assert profile.read(data).window == (5_000_000 + 10 * US, 5_000_000 + 60 * US)


def test_a_profile_without_marks_is_refused(profile: ModuleType) -> None:
    with pytest.raises(ValueError, match="the profile has no mark"):
        profile.read(space(STREAMS))


def test_nothing_is_invented_on_a_cpu(profile: ModuleType) -> None:
    assert profile.record(lambda: jnp.ones(8) + 1) is None


def test_profile_marks_use_the_host_clock(profile: ModuleType, tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        before = time.monotonic_ns()
        profile._mark()
        profile._mark()
        after = time.monotonic_ns()
    (path,) = tmp_path.rglob("*.xplane.pb")
    data = ProfileData.from_file(str(path))
    shift = profile.clock_shift_ns(data)
    marks = [
        e
        for p in data.planes
        for line in p.lines
        for e in line.events
        if e.name.startswith(profile.MARK)
    ]
    assert len(marks) == 2
    assert before <= min(m.start_ns for m in marks) + shift
    assert max(m.start_ns for m in marks) + shift <= after


def run(
    *words: str, env: dict[str, str], check: bool = True, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*launcher, sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0 or not check, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.integration
def test_one_rank_on_a_stand_in(smoke: Callable[..., Any]) -> None:
    result = smoke("gpu.py", "--stand-in", "--cases", "split,transfers,profile")
    assert result["question"].startswith("What do cut steps, hand-overs and crossover cost")
    assert result["device"]["stand_in"] is True
    assert set(result["split"]["s_per_step"]) == {"jit", "whole", "auto", "copied"}
    for direction in ("to_host", "to_device"):
        row = result["transfers"][direction]["1000000"]
        assert row["bytes"] == 1_000_000
        assert row["best"] in row["s"]
        assert result["transfers"][direction]["leaves"]["arrays"] == 6
    for case in ("plain_jit", "1_jobs", "2_jobs", "3_jobs"):
        row = result["profile"][case]
        assert row["overlap"] is None and row["idleness"] is None
        assert row["reason"] == "the profile has no stream of an accelerator: this is a CPU"
    assert len(result["profile"]["3_jobs"]["account"]["jobs"]) == 3


@pytest.mark.exhaustive
def test_memory_on_a_stand_in(smoke: Callable[..., Any]) -> None:
    rows = smoke("gpu.py", "--stand-in", "--cases", "memory")["memory"]
    assert [row["jobs"] for row in rows] == [1, 2]
    assert 0 < rows[0]["booked_bytes"] < rows[1]["booked_bytes"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [(), ("--no-lab",)], ids=["lab", "no lab"])
def test_two_ranks_on_a_stand_in(smoke: Callable[..., Any], flags: tuple[str, ...]) -> None:
    ranks = smoke("gpu.py", "--stand-in", "--cases", "ranks", *flags)["ranks"]
    assert ranks["equal_to_the_bit"] is True
    assert ranks["ranks"] == ranks["jobs"] == 2
    assert not [key for key in ranks if "speedup" in key]
    if ranks["link"].startswith("emulated"):
        assert ranks["no_real_link"] and "processes" not in ranks["s_per_job_step"]
        ranks = ranks["without_link"]
        assert ranks["equal_to_the_bit"] is True
    else:
        assert not flags and ranks["bytes_crossed"] > 0
    assert len(ranks["s_per_job_step"]["processes"]["raw"]) == 2


@pytest.mark.integration
def test_no_accelerator_is_said_at_once(tmp_path: Path) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is one")
    done = run(str(BENCHMARKS / "gpu.py"), "--smoke", env={}, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("This machine has no accelerator. `--stand-in` runs")


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        "placement",
        "dependent",
        "small_work",
        "constants",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("step", "selection", "crossover")
        ),
    ],
)
def test_what_a_gpu_would_run(name: str, quick_compiler: dict[str, str]) -> None:
    assert f"rank 0: {name} holds" in run(str(CASE), name, "--stand-in", env=quick_compiler).stdout


@pytest.mark.exhaustive
def test_what_two_ranks_would_run(quick_compiler: dict[str, str]) -> None:
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("no mpirun")
    line, extra = mpirun_command(
        mpirun=mpirun,
        ranks=2,
        program=["-m", "mpi4py", str(CASE), "ranks", "--stand-in"],
        root=os.geteuid() == 0,
        cores=len(os.sched_getaffinity(0)),
        environ=os.environ,
    )
    at = line.index("-m")
    output = run(*line[at:], launcher=line[:at], env={**extra, **quick_compiler}).stdout
    assert all(f"rank {rank}: ranks holds" in output for rank in range(2))


def test_target_config_of_a_gpu(
    target: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The GPU's description is saved under a plain name before JAX is asked to compile for it."""
    card = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(target, "prepare", lambda stand_in: None)
    monkeypatch.setattr(target, "accelerator", lambda stand_in: card)
    text = 'platform_name: "CUDA"\n'
    monkeypatch.setattr(target, "target_config", lambda devices: text)
    asked: list[dict[str, str]] = []

    def describe(**options: str) -> SimpleNamespace:
        asked.append(options | {"saved": (tmp_path / "nvidia_h100_80gb_hbm3.txtpb").read_text()})
        return SimpleNamespace(devices=[card])

    monkeypatch.setattr(target.topologies, "get_topology_desc", describe)
    monkeypatch.setattr(sys, "argv", ["gpu_target.py", str(tmp_path)])
    target.main()
    assert asked == [
        {"platform": "cuda", "topology": "1x1x1", "target_config": text, "saved": text}
    ]
    assert capsys.readouterr().out.endswith(
        "compiles without a device for: NVIDIA H100 80GB HBM3\n"
    )


@pytest.mark.parametrize(("flags", "code"), [([], 1), (["--stand-in"], 0)])
def test_no_target_config_on_a_cpu(
    flags: list[str],
    code: int,
    target: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(target, "prepare", lambda stand_in: None)  # this process initialised JAX
    monkeypatch.setattr(target, "accelerator", lambda stand_in: jax.devices()[0])
    monkeypatch.setattr(sys, "argv", ["gpu_target.py", *flags, str(tmp_path)])
    with pytest.raises(SystemExit, match=str(code)):
        target.main()
    assert "XLA has no target configuration for the device kind `cpu`" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_first_parts_on_a_gpu_get_their_full_time() -> None:
    """The crossover comes first, and the first parts' limits leave time for the installation."""
    script = (BENCHMARKS / "gpu_first.sh").read_text()
    limits = {
        name: int(most)
        for name, most in re.findall(r"^    part (\w+) (\d+) ", script, re.MULTILINE)
    }
    assert list(limits)[:4] == ["ranks_resnet50", "target_config", "doctor", "tests"]
    [limit] = re.findall(r"^LIMIT=\$\{LIMIT:-(\d+)\}$", script, re.MULTILINE)
    assert sum(list(limits.values())[:4]) + 60 <= int(limit)


@pytest.mark.exhaustive
def test_the_first_minutes_on_a_gpu(tmp_path: Path) -> None:
    """Runs the GPU machine's script on the stand-in: every part ends and leaves its numbers."""
    script = BENCHMARKS / "gpu_first.sh"
    done = subprocess.run(
        ["bash", str(script), "rehearse", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    parts = dict(line.split(": ", 1) for line in (tmp_path / "parts.txt").read_text().splitlines())
    assert all(ended.startswith("status 0, ") for ended in parts.values()), parts
    assert list(parts) == re.findall(r"^    part (\w+) ", script.read_text(), re.MULTILINE)
    assert list(parts)[:2] == ["ranks_resnet50", "target_config"]
    crossover = json.loads((tmp_path / "gpu_ranks_resnet50.json").read_text())["ranks"]
    assert (
        crossover["s_per_job_step"].keys() >= {"sequential", "crossover"} and crossover["jobs"] == 2
    )
    assert "XLA has no target configuration" in (tmp_path / "target_config.log").read_text()
    for name in parts.keys() - {"doctor", "tests"}:
        assert json.loads((tmp_path / f"gpu_{name}.json").read_text())["question"], name


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rivals", "jit,fast"], "no such rivals: fast; there are jit, whole, auto, copied"),
        (["--rivals", "whole"], "`--rivals` must have `jit`"),
        (["--cases", "splt"], "no such cases: splt; there are ranks, memory, split"),
    ],
)
def test_misspelt_names_end_before_anything_runs(
    words: list[str],
    reason: str,
    profile: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del profile  # `profile` puts the benchmarks on the path
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--stand-in", *words])
    with pytest.raises(SystemExit, match="2"):
        import_module("gpu").main()
    assert reason in capsys.readouterr().err
