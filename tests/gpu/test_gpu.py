"""On an accelerator, cut steps match the CPU's results, hand arrays over, and share the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcross.commands.launch import find_mpirun, mpirun_command

CASE = Path(__file__).with_name("case.py")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def environment() -> dict[str, str]:
    """Settings for several processes on one device, including pytest's own, and for sums that don't
    depend on timing.
    """
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    return {**os.environ, **memory, "XLA_FLAGS": flags}


def run(line: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "name", ["step", "placement", "dependent", "small_work", "constants", "crossover", "selection"]
)
def test_one_rank(name: str) -> None:
    assert f"rank 0: {name} holds" in run([sys.executable, str(CASE), name], environment())


def test_two_ranks_share_one_accelerator() -> None:
    mpirun = find_mpirun()
    if mpirun is None:
        pytest.skip("no mpirun")
    env = environment() | {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    }
    line, extra = mpirun_command(
        mpirun=mpirun,
        ranks=2,
        program=[sys.executable, "-m", "mpi4py", str(CASE), "ranks"],
        root=os.geteuid() == 0,
        cores=len(os.sched_getaffinity(0)),
        environ=env,
    )
    output = run(line, {**env, **extra})
    assert all(f"rank {rank}: ranks holds" in output for rank in range(2))


def test_the_benchmark_runs_and_reads_the_profile(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    run([sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--json", str(out)], environment())
    result = json.loads(out.read_text())
    assert result["device"]["platform"] != "cpu"
    assert result["device"]["stand_in"] is False
    assert result["ranks"]["equal_to_the_bit"] is True
    for case in ("plain_jit", "1_jobs", "2_jobs", "3_jobs"):
        row = result["profile"][case]
        assert row["overlap"]["kernels_s"] > 0, row
        assert 0 <= row["idleness"]["idle_share"] < 1
    # A cut step copies its gradients to the host and back. The profile must contain the copies in
    # both directions, and the benchmark must recognise them as such.
    assert result["profile"]["2_jobs"]["overlap"]["to_host_s"] > 0
    assert result["profile"]["2_jobs"]["overlap"]["to_device_s"] > 0
