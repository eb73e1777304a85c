"""Runs mpi4jax's own tests, from its source folder, with `jaxcross.crossover` for `jax.jit`."""

import functools
import sys
from pathlib import Path

import jax
import pytest

import jaxcross

world = jaxcross.initialize(stall_timeout_s=60)
folder = Path(sys.argv[1])
plain = jax.jit
calls: list[str] = []


def jit(function=None, **options):
    """Uses `crossover` for functions of the tests and examples, and `jax.jit` for those of JAX and
    others.
    """
    if not Path(sys._getframe(1).f_code.co_filename).is_relative_to(folder):
        return (
            plain(function, **options)
            if function is not None
            else functools.partial(plain, **options)
        )
    inner, step = plain(function, **options), jaxcross.crossover(function, axes="ranks", **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            return inner(*args, **kwargs)  # inside another function
        calls.append(function.__name__)
        return step(*args, **kwargs)

    return call


jax.jit = jit
names = [folder / "tests" / "collective_ops", folder / "tests" / "test_jax_transforms.py"]
code = pytest.main(
    ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", *map(str, names)]
)
assert len(calls) >= 40, calls
if code == 0:
    print("suite passed", flush=True)
sys.exit(code)
