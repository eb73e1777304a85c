"""Makes the benchmarks' fixtures available to this folder's tests."""

from tests.support.benchmark_runs import lab, smoke

__all__ = ["lab", "smoke"]
