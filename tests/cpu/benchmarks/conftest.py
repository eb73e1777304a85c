"""Fixtures for the benchmark tests."""

from tests.support.benchmark_runs import lab, smoke

__all__ = ["lab", "smoke"]
