"""mpi4jax's own tests, from a folder of its source, with `jaxcross.crossover` in place of
`jax.jit`.
"""

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
    """`crossover` for the functions of the tests and examples; what JAX and others jit stays as it
    is.
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
            return inner(*args, **kwargs)  # inside of another function
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
