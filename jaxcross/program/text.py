"""A program's text, read back."""

from __future__ import annotations

import ast
import re
from typing import Any

from jaxcross.program.segments import Aval, Exchange, Program, Segment


def parse(text: str) -> Program:
    """Reads `Program.text()` back; equations are not part of it. `parse(p.text()).text() == p.text()`.

    Raises:
        ValueError: A line is not understood; says which.
    """
    head: dict[str, str] = {}
    segments: list[dict[str, Any]] = []
    values: list[Aval] = []
    axes: tuple[tuple[str, int], ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.startswith("    "):
                segments[-1]["exchanges"].append(_parse_exchange(line.strip()))
            elif line.startswith("value "):
                values.append(_parse_aval(line.split(" ", 2)[2]))
            elif line[:1].isdigit():
                left, flow, dies = line.split(" | ")
                index, kind = left.split()[:2]
                if kind not in ("compute", "collective"):
                    raise ValueError(f"unknown kind `{kind}`")
                inputs, outputs = flow.split(" -> ")
                segments.append({
                    "index": int(index), "kind": kind, "inputs": _parse_ranges(inputs),
                    "outputs": _parse_ranges(outputs), "dies": _parse_ranges(dies.removeprefix("dies ")),
                    "exchanges": [],
                })  # fmt: skip
            else:
                key, _, rest = line.partition(" ")
                head[key] = rest
                if key == "axes":
                    axes = _parse_axes(rest)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"line {number} of the program is not understood: `{line}` ({error})") from error
    missing = {"program", "axes", "inputs", "constants", "donated", "outputs"} - head.keys()
    if missing:
        raise ValueError(f"the program lacks the line(s) {', '.join(sorted(missing))}")
    return Program(
        name=head["program"], axes=axes, values=tuple(values), inputs=_parse_ranges(head["inputs"]),
        outputs=_parse_ranges(head["outputs"]), constants=int(head["constants"]),
        donated=frozenset(_parse_ranges(head["donated"])),
        segments=tuple(Segment(**{**s, "exchanges": tuple(s["exchanges"])}) for s in segments),
    )  # fmt: skip


def _parse_ranges(text: str) -> tuple[int, ...]:
    if text.strip() == "-":
        return ()
    out: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return tuple(out)


_AVAL = re.compile(r"(?P<dtype>[^\[*]+)(?P<weak>\*?)\[(?P<shape>[\d,]*)\]$")
_NAME = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,=]+"""
_AXIS = re.compile(f"({_NAME})=(\\d+)(?: |$)")
_EXCHANGE = re.compile(
    rf"(?P<op>\S+) (?P<axes>(?:(?:{_NAME})(?:,|(?= )))*) (?P<dtype>[^\[]+)\[(?P<shape>[\d, ]*)\](?P<params>.*)$"
)
_PARAM = re.compile(r" (\w+)=(.*?)(?= \w+=|$)")


def _parse_axes(text: str) -> tuple[tuple[str, int], ...]:
    found = list(_AXIS.finditer(text))
    if "".join(match[0] for match in found) != text:
        raise ValueError("no axes like `batch=2`")
    return tuple((_name(match[1]), int(match[2])) for match in found)


def _name(text: str) -> str:
    return ast.literal_eval(text) if text[0] in "'\"" else text


def _parse_aval(text: str) -> Aval:
    match = _AVAL.match(text)
    if match is None:
        raise ValueError("no type like float32[8,8]")
    shape = tuple(int(n) for n in match["shape"].split(",") if n)
    return Aval(shape=shape, dtype=match["dtype"], weak_type=bool(match["weak"]))


def _parse_exchange(text: str) -> Exchange:
    match = _EXCHANGE.match(text)
    if match is None:
        raise ValueError("no exchange like `psum batch float32[8]`")
    params = tuple((name, ast.literal_eval(value)) for name, value in _PARAM.findall(match["params"]))
    shape = tuple(int(n) for n in match["shape"].split(",") if n.strip())
    axes = tuple(map(_name, re.findall(_NAME, match["axes"])))
    return Exchange(op=match["op"], axes=axes, dtype=match["dtype"], shape=shape, params=params)
