"""The supported versions of JAX and mpi4jax, and what to do if another one is installed. Pure.

This module imports neither JAX nor mpi4jax, so it can still give advice if they can't be imported.

There are no wheels for mpi4jax, so pip compiles it in an isolated build environment, for which it
installs the newest jaxlib, even if you have an older jaxlib installed. XLA then refuses to run the
compiled code, because it was compiled for a newer interface. To avoid that, pin jaxlib in the build
environment, using `PIP_BUILD_CONSTRAINT` with pip 25.3 or later, and `PIP_CONSTRAINT` with older
versions.
"""

from __future__ import annotations

JAX_FROM, JAX_BELOW = (0, 10), (0, 13)
"""Must match the range in pyproject.toml."""


def unsupported_jax(version: str) -> str:
    """Returns why this version of JAX can't be used and what to install; "" if it can be used."""
    first, last = f"{JAX_FROM[0]}.{JAX_FROM[1]}", f"{JAX_BELOW[0]}.{JAX_BELOW[1] - 1}"
    if JAX_FROM <= tuple(map(int, version.split(".")[:2])) < JAX_BELOW:
        return ""
    wanted = f"jax>={first},<{JAX_BELOW[0]}.{JAX_BELOW[1]}"
    return (
        f"jaxcross needs jax {first} to {last}; this is {version}. Install one of these: `pip "
        f"install '{wanted}'`."
    )


def mpi4jax_fault(error: str, jaxlib: str) -> str:
    """Returns why mpi4jax can't be imported, given the import error's text."""
    if error == "No module named 'mpi4jax'":
        return "mpi4jax is not installed."
    if "API version" in error:
        return f"mpi4jax was built against a newer jaxlib than the installed {jaxlib}: {error}"
    return f"mpi4jax cannot be used with this MPI: {error}"


def mpi4jax_remedy(jaxlib: str) -> str:
    """Returns a text with the commands that build mpi4jax for the installed MPI and jaxlib.

    The text also says how to use jaxcross without mpi4jax.
    """
    return f"""\
Build it for the MPI of your `mpicc` and the installed jaxlib, without CUDA, as it's called on the \
host:
    echo "jaxlib=={jaxlib}" > build.txt
    export PIP_CONSTRAINT=$PWD/build.txt PIP_BUILD_CONSTRAINT=$PWD/build.txt CUDA_PATH=/dev/null
    pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4jax mpi4jax
Or use the other wire, which doesn't need mpi4jax: `export JAXCROSS_WIRE=mpi4py`."""
