"""For all tests: what needs an accelerator is skipped without one; a test that hangs says where."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import quick_compiler as quick_compiler_options
from tests.support import warm_python

TESTS = Path(__file__).parent


# No time limit per example, since a slow machine is no failure. `--hypothesis-profile full` tries
# more examples.
settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist
        keep_bytecode(config)
    # Children of a test (mpirun and its ranks) print their stacks on a crash, too.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Tests compare what processes print, and a slow machine prints more progress than a fast one.
    os.environ["JAXCROSS_PROGRESS"] = "0"
    # Tables are printed as for a file: pytest-xdist gives its workers the size of a terminal.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # Ranks are more than cores here. MPICH waits by polling; so it sleeps for a moment after each
    # poll, instead of only offering the core to others: a fifth of the CPU time of two ranks that
    # train eight small trials.
    os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    os.environ.pop(
        "PYTHONUNBUFFERED", None
    )  # a line is one write where Python buffers; else ranks' lines get mixed
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__ or 2)
    # Started in the background of a script: children would inherit it and be deaf to what tests
    # send.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # Last, since its forks inherit all of this.
    if not hasattr(config, "workerinput") and not os.environ.get("JAXCROSS_TESTS_COLD"):
        warm = warm_python.serving()
        warm.__enter__()
        config.add_cleanup(lambda: warm.__exit__(None, None, None))


def keep_bytecode(config: pytest.Config) -> None:
    """Keeps compiled Python in pytest's cache where Python was told to keep none
    (`PYTHONDONTWRITEBYTECODE`).

    Else every worker and every rank compiles JAX's source again: 1.6 s of CPU time instead of 0.7 s
    to import it.
    """
    if not sys.dont_write_bytecode:
        return
    if config.pluginmanager.hasplugin("cacheprovider"):
        folder = str(config.cache.mkdir("bytecode"))
    else:
        folder = tempfile.mkdtemp(prefix="jaxcross-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    unknown: dict[str, set[str]] = {}  # ids of `mostly_...` by test
    for item in items:
        for mark in ("exhaustive", "integration"):
            if (mostly := item.get_closest_marker(f"mostly_{mark}")) is None:
                continue
            case = item.callspec.id  # type: ignore[attr-defined]
            unknown.setdefault(item.nodeid.partition("[")[0], set(mostly.args)).discard(case)
            if case not in mostly.args and item.get_closest_marker("exhaustive") is None:
                item.add_marker(mark)
    wrong = {name: ids for name, ids in unknown.items() if ids}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(
            f"`mostly_integration` or `mostly_exhaustive` name cases that do not exist: {wrong}"
        )
    without = pytest.mark.skip(reason="no accelerator")
    for item in items:
        in_folder = item.path.is_relative_to(TESTS / "gpu")
        if in_folder:
            item.add_marker("gpu")
        if (in_folder or item.get_closest_marker("gpu")) and not _accelerator():
            item.add_marker(without)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lets a worker of pytest-xdist end soon, by collecting garbage before it reports that its
    tests are over.

    After that report, execnet gives a worker 5 s to end, and then interrupts it with SIGINT. Within
    this time, pytest collects garbage twice. At the end of a plain run a worker has a million
    objects, and this took 8 s on a slow day.
    """
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()  # later collections pass over everything that is still alive


def _accelerator() -> bool:
    """Counted without starting JAX: tests choose how it starts."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


@pytest.fixture(scope="session")
def quick_compiler() -> dict[str, str]:
    """Environment in which XLA compiles faster and worse, for processes that are only to be seen
    running.
    """
    return {"XLA_FLAGS": quick_compiler_options.FLAGS}


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """XLA compiles faster and worse in this process, too, for tests of values that do not depend on
    how it compiles.

    What a test compares bit for bit with another executable is compiled as users have it. The
    caches are cleared, so that a test compiles the same whichever ran before it.
    """
    import jax
    from jax._src import compiler

    # `jax_disable_most_optimizations` needs no patch, but jaxlib 0.10 still emits loops through
    # MLIR then. CPU seconds of tensor/test_layers.py with 0.10: 27 with the option, 17 with the
    # patch, 38 with neither; with 0.12: 28, 28, 33.
    as_users_have_it = compiler.get_compile_options

    def quick(
        *args: Any, env_options_overrides: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        overrides = {**quick_compiler_options.OPTIONS, **(env_options_overrides or {})}
        return as_users_have_it(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def on_four_devices(quick_compiler: dict[str, str]) -> Callable[..., str]:
    """Runs a script, which may import `tests.support`, where JAX has four CPU devices: what it
    printed.
    """

    def call(script: str, *words: str, timeout: float = 240) -> str:
        env = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {quick_compiler['XLA_FLAGS']}",
            "PYTHONPATH": str(TESTS.parent),
        }
        done = subprocess.run(
            [*warm_python.COMMAND, "-c", script, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call
