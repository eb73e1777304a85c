"""Commands in the README and docs exist, and links between pages resolve.

The program that a `$` line of a `console` block names parses that line. tests/mpi/docs runs the
Python blocks.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from jaxcross import cli
from tests.support import warm_python
from tests.support.pages import PAGES, ROOT, blocks

TIMEOUT_S = 240
MARK = "\x1e"
# Commands that a shell, a package manager or a cluster provides, so there's nothing of ours to
# check.
FOREIGN = {
    "pip",
    "git",
    "cd",
    "module",
    "source",
    ".",
    "export",
    "python3",
    "srun",
    "sbatch",
    "uv",
    "tc",
    "cat",
    "nvidia-smi",
    "tfds",
    "echo",
    "grep",
    "ssh",
    "ssh-keygen",
    "ssh-copy-id",
    "rsync",
    "sudo",
}


@cache
def commands() -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{block.line + n}", line.removeprefix("$ "))
        for page in PAGES
        for block in blocks(page)
        if block.info == "console"
        for n, line in enumerate(block.text.replace("\\\n", " ").splitlines(), 1)
        if line.startswith("$ ")
    ]


def test_every_command_is_a_real_one() -> None:
    """A single test, because importing the scripts that the commands name takes seconds."""
    assert commands()
    for where, command in commands():
        for part in re.split(r"&&|;|\|\|?", command):
            words = shlex.split(part, comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                check(words, where)


def check(words: Sequence[str], where: str) -> None:
    words = [words[0].removeprefix("env/bin/"), *words[1:]]
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words and words[0].startswith("-"):
            words = words[2:] if words[0] in ("--group", "--extra") else words[1:]
    if words and words[0] in ("mpirun", "srun"):
        start = next(
            (n for n, word in enumerate(words) if word.startswith(("python", "jaxcross"))),
            len(words),
        )
        words = words[start:]
    if not words:
        return
    if words[0] == "jaxcross":
        check_ours(words[1:], where)
    elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        check_script(words[1], words[2:], where)
    elif words[0] == "python" and words[1:3] == ["-m", "jaxcross.lab"]:
        check(words[words.index("--") + 1 :], where)
    else:
        known = words[0] in FOREIGN | {
            "pytest",
            "ruff",
            "pyright",
            "sphinx-build",
            "pre-commit",
            "python",
        }
        assert known or (ROOT / words[0]).exists(), f"{where}: what is `{words[0]}`?"


def check_ours(arguments: Sequence[str], where: str) -> None:
    try:
        options = cli.parser().parse_args(list(arguments))
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{where}: `jaxcross {shlex.join(arguments)}` is refused") from end
        return
    program = getattr(options, "program", None)
    if options.command == "launch" and program and program[0].endswith(".py"):
        check_script(program[0], program[1:], where)


def check_script(script: str, arguments: Sequence[str], where: str) -> None:
    if "/" not in script:  # the user's own script
        return
    assert (ROOT / script).is_file(), f"{where}: there is no {script}"
    known = help_of(script)
    for argument in arguments:
        if argument.startswith("--"):
            option = argument.split("=")[0]
            assert re.search(rf"{re.escape(option)}\b", known), f"{where}: {script} has no {option}"


# Prints each script's `--help`, all in one process, because their imports take seconds.
ASK = f"""
import contextlib, io, os, runpy, sys
for script in sys.argv[1:]:
    folder = os.path.dirname(script)
    said = io.StringIO()
    path = list(sys.path)
    sys.argv = [script, "--help"]
    sys.path.insert(0, folder)
    code = "no end"
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert code in (0, None), (script, code)
    sys.path[:] = path
    for name, module in list(sys.modules.items()):  # two folders may have a module of one name
        if str(getattr(module, "__file__", None)).startswith(folder + os.sep):
            del sys.modules[name]
    print({MARK!r} + script + chr(10) + said.getvalue(), end="")
"""


@cache
def helps() -> dict[str, str]:
    """Maps every script named by the docs to its help text."""
    named = {
        word
        for _, command in commands()
        for word in command.split()
        if re.fullmatch(r"\w+(/\w+)+\.py", word)
    }
    scripts = [str(ROOT / word) for word in sorted(named) if (ROOT / word).is_file()]
    done = subprocess.run(
        [*warm_python.COMMAND, "-c", ASK, *scripts],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(part.split("\n", 1) for part in done.stdout.split(MARK)[1:])


def help_of(script: str) -> str:
    return helps()[str(ROOT / script)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"\w+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_checker_refuses_what_does_not_exist() -> None:
    for wrong in (
        "jaxcross demo --speed 3",
        "jaxcross fly",
        "python examples/nothing.py",
        "rm -rf /",
    ):
        with pytest.raises(AssertionError):
            check(shlex.split(wrong), "here")
