"""Tests hand-written programs: printing, parsing, checking, hashing. Needs no arrays."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from jaxcross.errors import InternalError
from jaxcross.program import stages
from jaxcross.program.digest import program_digest
from jaxcross.program.ir import Aval, Exchange, Program, Segment, human_bytes, without_sources
from jaxcross.program.mismatch import signature_mismatch
from jaxcross.program.text import parse
from jaxcross.program.verify import verify

MATRIX = Aval(shape=(4, 2), dtype="float32")
SUM = Exchange(op="psum", axes=("batch",), dtype="float32", shape=(4, 2), source="step.py:3 (step)")


def program(**changes: Any) -> Program:
    """Returns a program: gradient of 0 and 1 -> 2, its sum -> 3, a new 0 -> 4."""
    plain = Program(
        name="step",
        axes=(("batch", 2),),
        values=(MATRIX,) * 5,
        inputs=(0, 1),
        outputs=(4,),
        donated=frozenset({0}),
        segments=(
            Segment(index=0, kind="compute", inputs=(0, 1), outputs=(2,), last_uses=(1,)),
            Segment(
                index=1,
                kind="collective",
                inputs=(2,),
                outputs=(3,),
                last_uses=(2,),
                exchanges=(SUM,),
            ),
            Segment(index=2, kind="compute", inputs=(0, 3), outputs=(4,), last_uses=(0, 3)),
        ),
    )
    return replace(plain, **changes)


def with_segment(at: int, **changes: Any) -> Program:
    segments = list(program().segments)
    segments[at] = replace(segments[at], **changes)
    return program(segments=tuple(segments))


def test_prints_one_line_a_segment() -> None:
    assert str(program()) == (
        "program step over batch=2\n0 compute <- inputs\n1 collective psum [32 B] <- 0\n2 compute "
        "<- 1"
    )


def test_text_parses_back_to_the_same_text() -> None:
    text = program().text()
    assert parse(text).text() == text
    assert parse(text) == replace(program(), segments=parse(text).segments)
    assert verify(parse(text)).exchange_hash() == program().exchange_hash()


@pytest.mark.parametrize(
    "params",
    [
        (("perm", ((0, 1), (1, 0))),),
        (("dimension", 1), ("tiled", True)),
        (("groups", ((0, 1), (2, 3))), ("loop", "scan 5")),
        (("loop", "while ?"), ("loop", "scan 2")),
        (("reduction", "SUM"), ("ranks", (0, 1))),
    ],
)
def test_parameters_of_exchanges_survive(params: Any) -> None:
    exchange = Exchange(op="mpi.allreduce", axes=(), dtype="key<fry>", shape=(), params=params)
    text = with_segment(
        1, exchanges=(exchange, replace(SUM, axes=("a", "b"), dtype="bfloat16", shape=()))
    ).text()
    assert parse(text).text() == text
    assert parse(text).segments[1].exchanges[0] == exchange


def test_weak_and_scalar_types_survive() -> None:
    values = (
        Aval(shape=(), dtype="float32", weak_type=True),
        Aval(shape=(3,), dtype="key<fry>"),
        *[MATRIX] * 3,
    )
    assert parse(program(values=values).text()).values == values


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        (
            6,
            "0 both <- inputs | 0-1 -> 2 | dies 1",
            "Line 7 of the program cannot be parsed: `0 both",
        ),
        (
            6,
            "0 compute <- inputs",
            "Line 7 of the program cannot be parsed: `0 compute <- inputs`",
        ),
        (8, "    psum batch", "Line 9 of the program cannot be parsed: `    psum batch`"),
        (10, "value 0 float32", "Line 11 of the program cannot be parsed: `value 0 float32`"),
        (2, "", "The text of the program must have a line that starts with each of `inputs`."),
    ],
)
def test_parse_names_the_line_it_does_not_understand(line: int, wrong: str, message: str) -> None:
    lines = program().text().splitlines()
    lines[line] = wrong
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse("\n".join(lines))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_segment(0, index=1), "segment 1 is at position 0"),
        (with_segment(0, index=10**11), "segment 100000000000 is at position 0"),
        (with_segment(0, inputs=(0, 3)), "value 3 is read before it is defined"),
        (with_segment(2, inputs=(1, 3)), "value 1 is read after its last use"),
        (with_segment(2, outputs=(3,)), "value 3 is defined twice"),
        (with_segment(2, outputs=(9,)), "value 9 has no type"),
        (with_segment(2, last_uses=(0, 3, 1)), "value 1 is freed twice, or before it is defined"),
        (with_segment(2, last_uses=(0, 3, 4)), "value 4 is freed, but the step returns it"),
        (
            replace(with_segment(2, last_uses=(0, 3, 4)), donated=frozenset({4})),
            "value 4 is freed, but the step returns it",
        ),
        (with_segment(1, last_uses=(2, 0)), "value 0 is freed where it is not read"),
        (with_segment(0, exchanges=(SUM,)), "compute segment 0 contains an exchange"),
        (with_segment(1, exchanges=()), "collective segment 1 contains no exchange"),
        (program(outputs=(7,)), "result 7 is never defined"),
        (with_segment(2, last_uses=(0,)), "values [3] are never freed"),
    ],
)
def test_verify_says_what_is_wrong(broken: Program, message: str) -> None:
    with pytest.raises(InternalError) as error:
        verify(broken)
    assert str(error.value).startswith(f"program `step` is not well formed: {message}")


def test_verify_marks_the_invalid_segment_in_context() -> None:
    """The error shows the segment's neighbours as well."""
    with pytest.raises(InternalError) as error:
        verify(with_segment(1, inputs=(4,)))
    assert str(error.value).splitlines()[1:] == [
        "    0 compute <- inputs",
        "--> 1 collective psum [32 B] <- 2",
        "    2 compute <- 1",
    ]


def test_signature_holds_exchanges_and_nothing_local() -> None:
    assert program().exchange_signature() == (
        "axes batch=2\npsum batch float32[4, 2]\nexchanges of each segment: 1"
    )
    other = with_segment(0, outputs=(2,), last_uses=(1,))
    assert (
        replace(other, name="other", donated=frozenset()).exchange_hash()
        == program().exchange_hash()
    )
    for change in (
        {"dtype": "int32"},
        {"shape": (8,)},
        {"op": "pmax"},
        {"axes": ("b",)},
        {"params": (("x", 1),)},
    ):
        assert (
            with_segment(1, exchanges=(replace(SUM, **change),)).exchange_hash()
            != program().exchange_hash()
        )
    assert program_digest(
        with_segment(1, exchanges=(replace(SUM, source="elsewhere"),))
    ) == program_digest(program())
    assert 0 <= program().exchange_hash() < 2**62


def test_digest_sees_structure_types_and_donation() -> None:
    programs = (
        program(),
        program(donated=frozenset()),
        program(values=(MATRIX,) * 6),
        with_segment(2, last_uses=(3,)),
    )
    assert len({program_digest(p) for p in programs}) == 4


def test_mismatch_of_widths_names_the_64_bit_types() -> None:
    """If only the widths of the elements differ, the message mentions `jax_enable_x64`."""
    mine = program().exchange_signature()
    theirs = with_segment(1, exchanges=(replace(SUM, dtype="float64"),)).exchange_signature()
    message = signature_mismatch("step", [mine, theirs])
    assert message.startswith(
        "ranks 0 and 1 exchange elements of different widths in `step`: exchange 1 is\n"
    )
    assert (
        "rank 0: psum batch float32[4, 2]" in message
        and "rank 1: psum batch float64[4, 2]" in message
    )
    assert "`JAX_ENABLE_X64`" in message and "branch" not in message


def test_mismatch_names_both_ranks_and_the_first_line() -> None:
    mine = program().exchange_signature()
    theirs = with_segment(1, exchanges=(replace(SUM, shape=(8,)),)).exchange_signature()
    message = signature_mismatch("step", [mine, mine, theirs])
    assert message.startswith("ranks 0 and 2 exchange different things in `step`: exchange 1 is\n")
    assert (
        "rank 0: psum batch float32[4, 2]" in message and "rank 2: psum batch float32[8]" in message
    )
    assert "step.py" not in message
    more = with_segment(1, exchanges=(SUM, replace(SUM, op="pmax"))).exchange_signature()
    assert (
        "exchange 2 is\n    rank 0: (no further exchange)\n    rank 1: pmax"
        in signature_mismatch("step", [mine, more])
    )
    parted = more.replace("segment: 2", "segment: 1, 1")
    message = signature_mismatch("step", [more, parted])
    assert message.startswith(
        "ranks 0 and 1 divide the exchanges of `step` into segments differently. The numbers of "
        "exchanges in each segment are\n"
    )
    assert "\n    rank 0: 2\n    rank 1: 1, 1\n" in message
    with pytest.raises(ValueError, match="signatures of `step` are equal"):
        signature_mismatch("step", [mine, mine])


def test_mismatch_names_the_lines_of_the_code() -> None:
    """The ranks' files may lie in different folders, so lines are shown, but not compared."""
    moved = replace(SUM, source="/elsewhere/step.py:3 (step)")
    unknown = replace(SUM, source="")
    texts = [
        with_segment(1, exchanges=exchanges).exchange_signature(sources=True)
        for exchanges in ((SUM, SUM), (moved, unknown), (moved, replace(moved, shape=(8,))), (SUM,))
    ]
    assert without_sources(texts)[0] == with_segment(1, exchanges=(SUM, SUM)).exchange_signature()
    with pytest.raises(ValueError, match="are equal"):
        signature_mismatch("step", texts[:2])
    assert (
        "exchange 2 is\n"
        "    rank 0: psum batch float32[4, 2], at step.py:3 (step)\n"
        "    rank 2: psum batch float32[8], at /elsewhere/step.py:3 (step)\n"
        "All ranks"
    ) in signature_mismatch("step", texts)
    assert (
        "exchange 2 is\n    rank 0: psum batch float32[4, 2]\n    rank 1: (no further exchange)\n"
    ) in signature_mismatch("step", [texts[1], texts[3]])


def test_a_parsed_program_cannot_be_compiled() -> None:
    with pytest.raises(
        ValueError, match="^Program `step` cannot be compiled, because it was parsed from text"
    ):
        stages.compile(parse(program().text()))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (26_214_400, "26.2 MB"), (3e9, "3.0 GB")],
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    "name", ["my axis", "a=b", "a,b", "it's", 'say "a"', "two\nlines", "=", "ünïcode", "[0]", "\\"]
)
def test_any_axis_name_survives(name: str) -> None:
    exchange = replace(SUM, axes=(name, "plain"), params=(("tiled", True),))
    wanted = replace(with_segment(1, exchanges=(exchange,)), axes=((name, 2), ("plain", 3)))
    found = parse(wanted.text())
    assert found.axes == wanted.axes and found.segments[1].exchanges == (exchange,)
    assert found.text() == wanted.text() and found.exchange_hash() == wanted.exchange_hash()


def test_axes_that_are_not_understood() -> None:
    text = program().text().replace("axes batch=2", "axes batch=two")
    with pytest.raises(
        ValueError,
        match="^Line 2 of the program cannot be parsed: `axes batch=two` \\(expected axes like",
    ):
        parse(text)
