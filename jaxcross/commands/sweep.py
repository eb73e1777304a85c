"""`jaxcross sweep train.py --set lr=0.1,0.2 --metric loss --mode min -n 2`: trains with every
combination of values, a few at a time.

The script must define a function `train(job, lr, ...)`, which gets called once for each combination
of values. To pick up an interrupted sweep where it left off, start it again with the same folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

from jaxcross.commands import launch
from jaxcross.errors import clause, quoted

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `sweep` to the command line."""
    parser = subparsers.add_parser(
        "sweep", help="train with many choices of parameters", description=__doc__
    )
    parser.add_argument("script", type=Path, help="a script that defines `train(job, ...)`")
    parser.add_argument(
        "--set",
        dest="values",
        action="append",
        metavar="NAME=A,B,...",
        required=True,
        help="the values of a parameter, as Python or JSON writes them; again for each parameter",
    )
    parser.add_argument(
        "--metric", required=True, help="what trials log and are compared by, as `accuracy`"
    )
    parser.add_argument(
        "--mode",
        choices=("max", "min"),
        required=True,
        help="whether a large or a small value of the metric is better",
    )
    parser.add_argument(
        "--concurrent", type=int, default=2, help="trials at a time (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, help="draw so many of the combinations at random")
    parser.add_argument("--seed", type=int, default=0, help="of that (default: %(default)s)")
    parser.add_argument(
        "--prune",
        choices=("median", "halving", "hyperband"),
        help="end trials that fall behind; needs Optuna",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("sweep"),
        help="where the sweep is kept (default: %(default)s)",
    )
    launch.add_options(parser)
    launch.add_output_options(parser)
    launch.add_restart_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Starts ranks like `jaxcross launch`. Returns their exit code, or 2 for a wrong command."""
    try:
        grid = parsed(args.values)
        _check_numbers(args)
        check_script(args.script, list(grid))
    except ValueError as error:
        print(f"jaxcross sweep: {error}", file=sys.stderr)
        return 2
    options = {
        name: getattr(args, name)
        for name in ("metric", "mode", "concurrent", "trials", "seed", "prune")
    }
    task = json.dumps({"grid": grid, "folder": str(args.folder), **options})
    args.module = ["jaxcross.sweeps.sweep_rank", str(args.script), task]
    args.program = []
    return launch.run(args)


def _check_numbers(args: argparse.Namespace) -> None:
    """Checks the numeric options before starting any ranks."""
    for name, least in (("concurrent", 1), ("trials", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"`--{name}` must be at least {least}, got {value}.")


def parsed(texts: list[str]) -> dict[str, list[Any]]:
    """Parses options like `--set lr=0.1,0.2 --set width=32` into a grid of values. Pure.

    Raises:
        ValueError: An option doesn't have this form, or names a parameter that was already given.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(
                f"`--set {text}` must be a name, an equals sign, and values, as `--set lr=0.1,0.2`."
            )
        if name in grid:
            raise ValueError(
                f"`--set {name}=...` is given twice. Give all values at once, as `--set "
                f"{name}=1,2`."
            )
        parts = split(values)
        if not all(parts):
            raise ValueError(f"`--set {text}` has an empty value. Write an empty text as `''`.")
        grid[name] = [_value(part) for part in parts]
    return grid


def split(text: str) -> list[str]:
    """Splits a text at its commas, ignoring those inside brackets or quotes. Pure."""
    parts = [""]
    open_ = []
    quote = ""
    for character in text:
        if character == "," and not open_ and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _PAIRS:
            open_.append(_PAIRS[character])
        elif open_ and character == open_[-1]:
            open_.pop()
    return [part.strip() for part in parts]


def _value(text: str) -> Any:
    """Parses a value in Python or JSON notation. If it's neither, returns the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = text
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        pass
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(
            f"`--set`: the value `{text}` can't be sent to the ranks. Use numbers, texts, lists "
            "and dicts."
        ) from None


def check_script(script: Path, names: list[str]) -> None:
    """Checks that a script defines a function `train` with these parameters.

    This only parses the script and doesn't run it, so it can't always tell. When in doubt, it
    doesn't raise.

    Raises:
        ValueError: The script has no such function, or can't be read.
    """
    try:
        tree = ast.parse(script.read_text(), filename=str(script))
    except OSError as error:
        raise ValueError(
            f"`{script}` cannot be read: {clause(error.strerror or str(error))}. Name the script "
            "that defines `train`."
        ) from None
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"`{script}` is not a Python script: {error}. Correct it, or name the script that "
            "defines `train`."
        ) from None
    defined = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    bound = {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    imported = {
        alias.asname or alias.name
        for each in ast.walk(tree)
        if isinstance(each, ast.Import | ast.ImportFrom)
        for alias in each.names
    }
    if "train" not in {*defined, *bound, *imported}:
        names_there = quoted(defined) or "none"
        raise ValueError(
            f"`{script}` has no function `train`. Define `def train(job, {', '.join(names)}): ...` "
            f"at its top level; its functions are: {names_there}."
        )
    train = defined.get("train")
    if train is None or train.decorator_list:
        return  # can't tell the parameters from the source; the ranks will check
    positional = [each.arg for each in (*train.args.posonlyargs, *train.args.args)][1:]
    keywords = [each.arg for each in train.args.kwonlyargs]
    unknown = [name for name in names if name not in (*positional, *keywords)]
    if unknown and train.args.kwarg is None:
        known = quoted((*positional, *keywords)) or "none"
        raise ValueError(
            f"`train` in `{script}` has no parameter `{unknown[0]}`. Its parameters are: {known}."
        )
    needed = positional[: len(positional) - len(train.args.defaults)]
    needed += [
        name
        for name, default in zip(keywords, train.args.kw_defaults, strict=True)
        if default is None
    ]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ValueError(
            f"`train` in `{script}` needs `{missing[0]}`, which has no default. Add `--set "
            f"{missing[0]}=...`."
        )
