"""Tests that jaxcross works without the packages of an extra.

Whatever needs such a package names the extra to install.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ("tensorflow_datasets", "array_record", "grain", "cv2", "fsspec", "matplotlib", "aiohttp")


def run(code: str, *without: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that can't import certain modules."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({without!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False
    )


@pytest.mark.integration
def test_steps_jobs_and_reports_need_no_extra() -> None:
    """Without any extra, every public name except `jaxcross.data` is available."""
    code = (
        "import jaxcross; [getattr(jaxcross, name) for name in jaxcross.__all__ if name != 'data']"
    )
    done = run(code, *MODULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "missing", "advice"),
    [
        (
            "import jaxcross.data",
            ("grain", "cv2"),
            (
                "`jaxcross.data` needs `grain`, `cv2`, which are not installed here. Remedy: `pip "
                "install 'jaxcross[data]'`."
            ),
        ),
        (
            "from jaxcross.report.gantt import draw_gantt; draw_gantt(None, None)",
            ("matplotlib",),
            (
                "a picture of a run needs `matplotlib`, which is not installed here. Remedy: `pip "
                "install 'jaxcross[plot]'`."
            ),
        ),
    ],
    ids=["data", "plot"],
)
def test_a_missing_extra_is_named(code: str, missing: tuple[str, ...], advice: str) -> None:
    done = run(code, *missing)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"jaxcross.errors.MissingExtraError: {advice}"


@pytest.mark.mostly_integration(
    "tensorflow_datasets-command1-all", "grain-command0-data", "grain-command1-all"
)
@pytest.mark.parametrize(("command", "extra"), [(["data", "info", "."], "data"), (["demo"], "all")])
@pytest.mark.parametrize("missing", ["tensorflow_datasets", "grain"])
def test_a_command_names_its_extra_in_one_line(
    command: list[str], extra: str, missing: str
) -> None:
    done = run(f"from jaxcross.cli import main; raise SystemExit(main({command!r}))", missing)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"jaxcross {command[0]}")
    assert line.endswith(
        f"needs `{missing}`, which is not installed here. Remedy: `pip install "
        f"'jaxcross[{extra}]'`."
    )


def test_python_m_jaxcross_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxcross", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("jaxcross 0.")
