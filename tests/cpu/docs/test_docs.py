"""README and docs do what they say: code blocks run, printed results are the real ones, commands exist.

The `python` blocks of a page run in order, on one rank, or under mpirun on as many as the page's first lines say
(`<!-- ranks: 2 -->`). Pages of one number of ranks run one after another in the same processes, each with names and in
a folder of its own. A `text` block right after a `python` block is what that block prints on rank 0. Every `$` line of
a `console` block is parsed by the program that it names.
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
folder = os.path.dirname(sys.argv[1])
for page, blocks in json.load(open(sys.argv[1])).items():
    names = {{"__name__": "__main__"}}
    os.chdir(os.path.join(folder, os.path.basename(page)))
    for line, source in blocks:
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


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.info == "python"]


def code_of(page: Path) -> str:
    return "\n".join(block.text for block in python_blocks(page))


def run(pages: Sequence[Path], folder: Path, ranks: int, env: dict[str, str]) -> list[str]:
    """What each python block of the pages printed, on rank 0."""
    import json

    script, sources = folder / "driver.py", folder / "blocks.json"
    script.write_text(DRIVER)
    for page in pages:
        (folder / page.name).mkdir()
    sources.write_text(json.dumps({str(p): [(b.line, b.text) for b in python_blocks(p)] for p in pages}))
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
        pytest.fail(f"no end within {TIMEOUT_S} s\n{stdout}\n{stderr}")
    assert process.returncode == 0, f"{stdout}\n{stderr}"
    return stdout.split(MARK)[1:]


# In the plain run. Four ranks compile for a minute; the integration tests have examples/gpt.py on two.
PLAIN, LONG = {"README.md", "limits.md", "your-step.md"}, {"tensor-parallelism.md"}


def uses_jax_too_early(code: str) -> bool:
    """Where pages run one after another, only the first would fail."""
    before, start, _ = code.partition("world = jaxcross.initialize(")
    if not start:
        return "initialize(" in code
    return any("jax" in line for line in before.splitlines() if not line.startswith(("import ", "from ")))


def ranks_of(page: Path) -> int:
    found = re.search(r"<!-- ranks: (\d+) -->", page.read_text())
    return int(found[1]) if found else 1


def together() -> list[Any]:
    """Pages with code, by the tier and the number of ranks that they run on; first those that start no world."""
    marks = {"plain": [], "integration": [pytest.mark.integration], "exhaustive": [pytest.mark.exhaustive]}
    found: dict[tuple[str, int], list[Path]] = {}
    for page in sorted(filter(python_blocks, PAGES), key=lambda page: "initialize(" in code_of(page)):
        tier = "plain" if page.name in PLAIN else "exhaustive" if page.name in LONG else "integration"
        found.setdefault((tier, ranks_of(page)), []).append(page)
    return [
        pytest.param(pages, ranks, marks=marks[tier], id=f"{tier}-{ranks}") for (tier, ranks), pages in found.items()
    ]


@pytest.mark.parametrize(("pages", "ranks"), together())
def test_page_code_runs_and_prints_what_it_shows(
    pages: Sequence[Path], ranks: int, tmp_path: Path, quick_compiler: dict[str, str]
) -> None:
    """The code of a page runs and prints what the page says."""
    printed = iter(run(pages, tmp_path, ranks, quick_compiler))
    for page in pages:
        assert not uses_jax_too_early(code_of(page)), f"{page.name} uses JAX before `initialize`"
        every = blocks(page)
        for block, following in zip(every, [*every[1:], None], strict=True):
            if block.info != "python":
                continue
            output = next(printed)
            if following is not None and following.info == "text":
                shown = [line.rstrip() for line in following.text.splitlines()]
                real = [line.rstrip() for line in output.strip("\n").splitlines()]
                assert real == shown, f"{page.name}, line {following.line}: the block prints\n{output}"
    assert next(printed, None) is None


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
