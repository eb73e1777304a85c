"""README and docs do what they say: code blocks run, printed results are the real ones, commands exist.

The `python` blocks of a page run in order in one process, on one rank, or under mpirun on as many as the page's first
lines say (`<!-- ranks: 2 -->`). A `text` block right after a `python` block is what that block prints on rank 0. Every
`$` line of a `console` block is parsed by the program that it names.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jaxcross import cli
from jaxcross.commands.launch import find_mpirun, mpirun_command
from jaxcross.world import xla_pool

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TIMEOUT_S = 240
MARK = "\x1e"
# Words that a shell, a package manager or a cluster provides: nothing of ours to check.
FOREIGN = {
    "pip", "git", "cd", "module", "source", ".", "export", "python3", "srun", "sbatch", "uv", "tc", "cat", "nvidia-smi",
    "tfds", "echo",
}  # fmt: skip

DRIVER = f"""
import json, os, sys
blocks = json.load(open(sys.argv[1]))
names = {{"__name__": "__main__"}}
for page, line, source in blocks:
    sys.stdout.write({MARK!r})
    exec(compile("\\n" * line + source, page, "exec"), names)
    sys.stdout.flush()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its language and options, the number of the line before its first, its text."""

    info: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    found, fence = [], re.compile(r"^(`{3,})(.*)$")
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        match = fence.match(lines[number])
        number += 1
        if match is None:
            continue
        start = number
        while lines[number] != match[1]:
            number += 1
        found.append(Block(info=match[2].strip(), line=start, text="\n".join(lines[start:number])))
        number += 1
    return found


def run(page: Path, folder: Path, ranks: int, env: dict[str, str]) -> list[str]:
    """What each python block of the page printed, on rank 0."""
    import json

    script, sources = folder / "driver.py", folder / "blocks.json"
    script.write_text(DRIVER)
    chosen = [(str(page), b.line, b.text) for b in blocks(page) if b.info == "python"]
    sources.write_text(json.dumps(chosen))
    line: Sequence[str] = [sys.executable, str(script), str(sources)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    if ranks > 1:
        mpirun = find_mpirun()
        if mpirun is None:
            pytest.skip("no mpirun")
        quiet = f"import os, runpy, sys; sys.argv = {[str(script), str(sources)]!r}; "
        quiet += "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')); "
        quiet += "sys.stdout = sys.stdout if rank == '0' else open(os.devnull, 'w'); "
        quiet += "runpy.run_path(sys.argv[0], run_name='__main__')"
        line, extra = mpirun_command(
            mpirun=mpirun, ranks=ranks, program=[sys.executable, "-c", quiet], root=os.geteuid() == 0,
            cores=xla_pool.cores(), environ=environ,
        )  # fmt: skip
        environ = {**environ, **extra}
    process = subprocess.Popen(
        line, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        stdout, stderr = process.communicate()
        pytest.fail(f"{page.name}: no end within {TIMEOUT_S} s\n{stdout}\n{stderr}")
    assert process.returncode == 0, f"{page.name}\n{stdout}\n{stderr}"
    return stdout.split(MARK)[1:]


# Four ranks compile for a minute; the usual run has examples/gpt.py on two.
LONG = {"tensor.md", "tensor-parallelism.md"}


def with_python() -> list[Any]:
    pages = [page for page in PAGES if any(block.info == "python" for block in blocks(page))]
    return [pytest.param(p, marks=pytest.mark.exhaustive if p.name in LONG else [], id=p.name) for p in pages]


@pytest.mark.mostly_integration("README.md", "your-step.md", "limits.md")
@pytest.mark.parametrize("page", with_python())
def test_page_code_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, quick_compiler: dict[str, str]) -> None:
    """The code of a page runs and prints what the page says."""
    ranks = re.search(r"<!-- ranks: (\d+) -->", page.read_text())
    printed = run(page, tmp_path, int(ranks[1]) if ranks else 1, quick_compiler)
    every = blocks(page)
    code = [n for n, block in enumerate(every) if block.info == "python"]
    assert len(printed) == len(code)
    for output, n in zip(printed, code, strict=True):
        if n + 1 < len(every) and every[n + 1].info == "text":
            shown = [line.rstrip() for line in every[n + 1].text.splitlines()]
            real = [line.rstrip() for line in output.strip("\n").splitlines()]
            assert real == shown, f"{page.name}, line {every[n + 1].line}: the block prints\n{output}"


def commands() -> list[tuple[str, str]]:
    lines = [
        (f"{page.name}:{block.line + n}", line)
        for page in PAGES
        for block in blocks(page)
        if block.info == "console"
        for n, line in enumerate(block.text.replace("\\\n", " ").splitlines(), 1)
    ]
    return [(where, line[2:]) for where, line in lines if line.startswith("$ ")]


@pytest.mark.parametrize(("where", "command"), commands(), ids=lambda value: value[:60])
def test_a_command_is_a_real_one(where: str, command: str) -> None:
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
        start = next((n for n, word in enumerate(words) if word.startswith(("python", "jaxcross"))), len(words))
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
        known = words[0] in FOREIGN | {"pytest", "ruff", "pyright", "sphinx-build", "pre-commit", "python"}
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
    if "/" not in script:  # the user's own
        return
    assert (ROOT / script).is_file(), f"{where}: there is no {script}"
    known = help_of(script)
    for argument in arguments:
        if argument.startswith("--"):
            option = argument.split("=")[0]
            assert re.search(rf"{re.escape(option)}\b", known), f"{where}: {script} has no {option}"


# What each script answers to `--help`, all in one process: what they import takes seconds.
ASK = f"""
import contextlib, io, os, runpy, sys
for script in sys.argv[1:]:
    folder, said, path, sys.argv = os.path.dirname(script), io.StringIO(), list(sys.path), [script, "--help"]
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
    """Script -> its help, of all that the pages name."""
    named = {word for _, command in commands() for word in command.split() if re.fullmatch(r"\w+(/\w+)+\.py", word)}
    scripts = [str(ROOT / word) for word in sorted(named) if (ROOT / word).is_file()]
    done = subprocess.run(
        [sys.executable, "-c", ASK, *scripts], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
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
    for wrong in ("jaxcross demo --speed 3", "jaxcross fly", "python examples/nothing.py", "rm -rf /"):
        with pytest.raises(AssertionError):
            check(shlex.split(wrong), "here")
    assert isinstance(cli.parser(), argparse.ArgumentParser)
