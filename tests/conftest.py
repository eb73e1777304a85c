"""Skips tests that need a missing accelerator, and prints the stacks of tests that hang."""

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


# There's no time limit per example, because a slow machine isn't a failure.
# `--hypothesis-profile full` tries more examples.
settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in a pytest-xdist worker
        keep_bytecode(config)
    # A test's child processes (mpirun and its ranks) print their stacks on a crash, too.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Tests compare what processes print, and a slow machine prints more progress than a fast one.
    os.environ["JAXCROSS_PROGRESS"] = "0"
    # Print tables as for a file. Otherwise their width depends on pytest-xdist, which passes the
    # terminal's size on to its workers.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    # MPICH waits by polling, which is wasteful here because there are more ranks than cores. With
    # this setting, it sleeps briefly after each poll instead of only yielding the core. Two ranks
    # that train eight small trials then need only a fifth of the CPU time.
    os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    os.environ.pop(
        "PYTHONUNBUFFERED", None
    )  # buffered, a line is a single write; otherwise the ranks' lines get mixed up
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__ or 2)
    # If a script starts pytest in the background, the shell makes pytest ignore these signals.
    # Child processes would inherit that, and ignore the signals that our tests send to them.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    # Last, because the server's forks inherit everything above.
    if not hasattr(config, "workerinput") and not os.environ.get("JAXCROSS_TESTS_COLD"):
        warm = warm_python.serving()
        warm.__enter__()
        config.add_cleanup(lambda: warm.__exit__(None, None, None))


def keep_bytecode(config: pytest.Config) -> None:
    """Keeps bytecode in pytest's cache if `PYTHONDONTWRITEBYTECODE` is set.

    Without bytecode, every pytest worker and every rank would compile JAX's source again, so each
    import of JAX would take 1.6 s of CPU time instead of 0.7 s.
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


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    unknown: dict[str, set[str]] = {}  # test -> ids in `mostly_...` that no case has had yet
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
    """Collects garbage before a pytest-xdist worker reports that its tests have ended.

    Once a worker has reported that its tests have ended, execnet gives it 5 s to exit and then
    interrupts it with SIGINT. pytest collects garbage twice in that time. At the end of a plain
    run, a worker has a million objects, and on a busy machine the two collections once took 8 s. If
    we collect before the report, they have little left to do.
    """
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()  # later collections skip everything that is still alive


def _accelerator() -> bool:
    """Looks for device files rather than asking JAX, because tests choose how JAX starts."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


@pytest.fixture(scope="session")
def quick_compiler() -> dict[str, str]:
    """Environment for child processes in which XLA compiles faster but optimizes less."""
    return {"XLA_FLAGS": quick_compiler_options.FLAGS}


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Makes XLA compile faster but optimize less in this process, too.

    Use this fixture only if a test's expected values don't depend on the compiler's options. If a
    test compares the results of two executables bit for bit, both must be compiled with the options
    that users have. The fixture clears JAX's caches, so that it doesn't matter which test ran
    before.
    """
    import jax
    from jax._src import compiler

    # JAX's own option `jax_disable_most_optimizations` would work without a patch, but jaxlib 0.10
    # then still emits loops through MLIR, which is slow. tensor/test_layers.py takes 27 s of CPU
    # time with the option, 17 s with the patch, and 38 s with neither. With jaxlib 0.12, it takes
    # 28, 28 and 33 s.
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
    """Runs a script in a process whose JAX has four CPU devices, and returns what it printed.

    The script may import `tests.support`.
    """

    def call(script: str, *arguments: str, timeout: float = 240) -> str:
        env = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {quick_compiler['XLA_FLAGS']}",
            "PYTHONPATH": str(TESTS.parent),
        }
        done = subprocess.run(
            [*warm_python.COMMAND, "-c", script, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call
