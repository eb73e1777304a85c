"""Fixtures for tests of benchmarks."""

from tests.support.benchmark_runs import lab, smoke

__all__ = ["lab", "smoke"]
