"""Markers for tests that need an optional package."""

from importlib.util import find_spec

import pytest

HAS_MPI4JAX = find_spec("mpi4jax") is not None  # importing it would start MPI
NEEDS_MPI4JAX = pytest.mark.skipif(not HAS_MPI4JAX, reason="mpi4jax isn't installed")
