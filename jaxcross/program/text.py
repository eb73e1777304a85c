"""Parses the text of a program."""

from __future__ import annotations

import ast
import re
from typing import Any

from jaxcross.errors import quoted
from jaxcross.program.ir import Aval, Exchange, Program, Segment, itemsize


def parse(text: str) -> Program:
    """Parses the output of `Program.text()`, such that `parse(p.text()).text() == p.text()`.

    The text doesn't include the program's equations, so a parsed program can't be compiled. Numbers
    and line lengths are limited, because a damaged text could otherwise make us allocate huge
    amounts of memory.

    Raises:
        ValueError: A line can't be parsed; the message quotes it.
    """
    name = ""
    found = set[str]()
    numbers: dict[str, tuple[int, ...]] = {}
    segments: list[dict[str, Any]] = []
    values: list[Aval] = []
    axes: tuple[tuple[str, int], ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if len(line) > _LONGEST_LINE:
                raise ValueError(f"at most {_LONGEST_LINE} characters, got {len(line)}")
            if line.startswith("    "):
                segments[-1]["exchanges"].append(_parse_exchange(line.strip()))
            elif line.startswith("value "):
                values.append(_parse_aval(line.split(" ", 2)[2]))
            elif line[:1].isdigit():
                segments.append(_parse_segment(line))
            else:
                key, _, rest = line.partition(" ")
                if key == "program":
                    name = rest
                elif key == "axes":
                    axes = _parse_axes(rest)
                elif key == "constants":
                    numbers[key] = (int(rest),)
                elif key in ("inputs", "donated", "outputs"):
                    numbers[key] = _parse_ranges(rest)
                elif key:
                    raise ValueError(f"unknown first word `{key}`")
                found.add(key)
        except _NOT_UNDERSTOOD as error:
            shown = line if len(line) <= 200 else f"{line[:200]}..."
            raise ValueError(
                f"Line {number} of the program cannot be parsed: `{shown}` ({error}). Pass a "
                "text that `program.text()` has returned."
            ) from error
    missing = {"program", "axes", "inputs", "constants", "donated", "outputs"} - found
    if missing:
        raise ValueError(
            "The text of the program must have a line that starts with each of "
            f"{quoted(sorted(missing))}. Pass the whole text that `program.text()` has returned."
        )
    return Program(
        name=name,
        axes=axes,
        values=tuple(values),
        inputs=numbers["inputs"],
        outputs=numbers["outputs"],
        constants=numbers["constants"][0],
        donated=frozenset(numbers["donated"]),
        segments=tuple(Segment(**{**s, "exchanges": tuple(s["exchanges"])}) for s in segments),
    )


# No real program comes close to these limits. They protect us from damaged texts: numbers and line
# lengths are checked before we allocate anything of that size.
_MOST_VALUES = 1_000_000
_LONGEST_LINE = 1_000_000
_NOT_UNDERSTOOD = (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError)


def _parse_segment(line: str) -> dict[str, Any]:
    left, flow, last_uses = line.split(" | ")
    index, kind = left.split()[:2]
    if kind not in ("compute", "collective"):
        raise ValueError(f"the kind must be `compute` or `collective`, got `{kind}`")
    inputs, outputs = flow.split(" -> ")
    return {
        "index": int(index),
        "kind": kind,
        "inputs": _parse_ranges(inputs),
        "outputs": _parse_ranges(outputs),
        "last_uses": _parse_ranges(last_uses.removeprefix("dies ")),
        "exchanges": [],
    }


def _parse_ranges(text: str) -> tuple[int, ...]:
    if text.strip() == "-":
        return ()
    out: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        start = int(first)
        stop = int(last or first) + 1
        # Compare the bounds, because `len` raises an OverflowError if a range is too long.
        if start >= stop or len(out) + stop - start > _MOST_VALUES:
            raise ValueError(
                f"expected ranges like `0-3` with at most {_MOST_VALUES} numbers, got `{part}`"
            )
        out += range(start, stop)
    return tuple(out)


_AVAL = re.compile(r"(?P<dtype>[^\[*]+)(?P<weak>\*?)\[(?P<shape>[\d,]*)\]$")
# There must be only one way for this regex to match a quoted name. Otherwise, a line with many
# quoted names could take forever to match, because all combinations would be tried.
_NAME = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,='"][^\s,=]*"""
_AXIS = re.compile(f"({_NAME})=(\\d+)(?: |$)")
_EXCHANGE = re.compile(
    rf"(?P<op>\S+) (?P<axes>(?:(?:{_NAME})(?:,|(?= )))*) "
    r"(?P<dtype>[^\[]+)\[(?P<shape>[\d, ]*)\](?P<params>.*)$"
)
_PARAM = re.compile(r" (\w+)=(.*?)(?= \w+=|$)")


def _parse_axes(text: str) -> tuple[tuple[str, int], ...]:
    found = []
    at = 0
    while at < len(text):
        match = _AXIS.match(text, at)
        if match is None:
            raise ValueError("expected axes like `batch=2`")
        found.append((_name(match[1]), int(match[2])))
        at = match.end()
    return tuple(found)


def _name(text: str) -> str:
    return ast.literal_eval(text) if text[0] in "'\"" else text


def _parse_aval(text: str) -> Aval:
    match = _AVAL.match(text)
    if match is None:
        raise ValueError("expected a type like float32[8,8]")
    shape = tuple(int(n) for n in match["shape"].split(",") if n)
    itemsize(match["dtype"])
    return Aval(shape=shape, dtype=match["dtype"], weak_type=bool(match["weak"]))


def _parse_exchange(text: str) -> Exchange:
    match = _EXCHANGE.match(text)
    if match is None:
        raise ValueError("expected an exchange like `psum batch float32[8]`")
    params = tuple(
        (name, ast.literal_eval(value)) for name, value in _PARAM.findall(match["params"])
    )
    if "".join(found[0] for found in _PARAM.finditer(match["params"])) != match["params"]:
        raise ValueError("expected parameters like ` tiled=True`")
    shape = tuple(int(n) for n in match["shape"].split(",") if n.strip())
    axes = tuple(map(_name, re.findall(_NAME, match["axes"])))
    itemsize(match["dtype"])
    return Exchange(op=match["op"], axes=axes, dtype=match["dtype"], shape=shape, params=params)
