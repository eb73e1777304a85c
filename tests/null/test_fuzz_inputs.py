"""Tests that text from elsewhere is either read, or refused with a `ValueError` that says why."""

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxcross._link import Link
from jaxcross.commands.launch import Mpirun, mpirun_command, printed
from jaxcross.errors import InternalError
from jaxcross.lab import Lab
from jaxcross.program.ir import Aval, Exchange, Program, Segment
from jaxcross.program.text import parse
from jaxcross.program.verify import verify
from jaxcross.report import Report
from jaxcross.world import xla_pool
from jaxcross.world.launch_env import read_launch
from tests.support.examples import scaled

ODD = st.sampled_from(
    [
        "-1",
        "0",
        "1",
        "7",
        "99999999999999999999",
        "0-99999999999",
        "3-1",
        "1e400",
        "nan",
        "²",
        "٣",
        "'",
        '"',
        "\\",
        "(" * 300,
        "[" * 300,
        "'a'," * 40,
        "\x00",
        "\x85",
        "\u2028",
        "-",
        "|",
        "->",
        "dies",
        "psum",
        "float32[]",
        "key<fry>",
        "object",
        " x=1",
        " x=",
        "=",
        ",",
        "__import__('os')",
        "{**1}",
        "{[]}",
        "1" * 5000,
    ]
)
TEXTS = st.text(max_size=40) | ODD | st.lists(ODD, max_size=4).map(" ".join)

PROGRAM = Program(
    name="step",
    axes=(("batch", 2), ("my axis", 3)),
    values=(Aval(shape=(4, 2), dtype="float32"),) * 5,
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
            exchanges=(
                Exchange(
                    op="psum",
                    axes=("batch", "my axis"),
                    dtype="float32",
                    shape=(4, 2),
                    params=(("tiled", True),),
                ),
            ),
        ),
        Segment(index=2, kind="compute", inputs=(0, 3), outputs=(4,), last_uses=(0, 3)),
    ),
)


def attempt(read):
    """Returns the result and an empty text, or None and the reason for the refusal."""
    try:
        return read(), ""
    except ValueError as error:
        return None, str(error)


@st.composite
def damaged_programs(draw):
    """Draws a program's text with missing, doubled or replaced lines, words or characters."""
    lines = PROGRAM.text().splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        words = lines[at].split(" ")
        word = draw(st.integers(0, len(words) - 1))
        how = draw(st.sampled_from(("word", "drop", "double", "cut", "insert")))
        if how == "word":
            words[word] = draw(TEXTS)
            lines[at] = " ".join(words)
        elif how == "drop":
            lines[at] = " ".join(words[:word] + words[word + 1 :])
        elif how == "double":
            lines.insert(at, lines[at])
        elif how == "cut":
            lines[at] = lines[at][: draw(st.integers(0, 40))]
        else:
            place = draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:place] + draw(TEXTS) + lines[at][place:]
    return "\n".join(lines)


@settings(max_examples=scaled(250), deadline=None)
@given(damaged_programs() | TEXTS)
@example(PROGRAM.text().replace("inputs 0-1", "inputs 0-99999999999"))
@example(PROGRAM.text().replace("psum batch", "psum " + "'a'," * 60 + " batch"))
@example(PROGRAM.text().replace("tiled=True", f"tiled={'(' * 5000}"))
@example(PROGRAM.text().replace("tiled=True", "tiled={[]: 1}"))
@example(PROGRAM.text().replace("float32[4,2]", "no_such_type[4,2]"))
def test_damaged_program_is_rejected_valid_or_detected(text):
    """A damaged program is refused by `parse`, still well-formed, or found invalid by `verify`."""
    program, why = attempt(lambda: parse(text))
    if program is None:
        assert (
            "of the program cannot be parsed" in why or "The text of the program must have" in why
        )
        return
    try:
        verify(program)
    except InternalError:
        return
    again = parse(program.text())
    assert again.text() == program.text()
    assert again == replace(program, segments=again.segments)


@given(TEXTS)
def test_a_link_is_a_rate_or_refused(text):
    link, why = attempt(lambda: Link.parse(text))
    assert (link is not None) + (text == "none") + bool(why) == 1
    assert link is None or link.seconds(10**6) >= 0


@given(TEXTS, TEXTS)
def test_a_lab_is_well_described_or_refused(rate, latency):
    lab, why = attempt(lambda: Lab(rate=rate, latency=latency))
    assert lab is not None or "is not a rate" in why or "is not a latency" in why


@given(st.text(max_size=30) | st.sampled_from(["²", "٣", "-1", " 4", "4 ", ""]))
def test_a_launchers_variables_never_break_the_start(text):
    environ = {"PMI_SIZE": text, "NPROC": text}
    launch = read_launch(environ)
    assert launch is None or launch.size == int(text)
    assert xla_pool.effective(environ, 7) == (7 if launch is None else launch.size)


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=20),
        min_size=1,
        max_size=6,
    )
)
def test_any_arguments_reach_the_ranks_as_they_are(program):
    mpirun = Mpirun(path="mpirun", vendor="mpich")
    line, extra = mpirun_command(
        mpirun=mpirun, ranks=2, program=program, root=False, cores=2, environ={}
    )
    assert line[3:] == program
    words = shlex.split(printed(line, extra))
    assert words[len(extra) :] == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def report_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.json"
    Report.build(
        [], jobs=[], rank=0, size=1, start_ns=0, end_ns=1, policy="p", placement="cpu"
    ).to_json(path)
    return path.read_text()


@settings(max_examples=scaled(60), deadline=None)
@given(data=st.data())
def test_a_damaged_report_is_refused(data, report_text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    content = json.loads(report_text)
    key = data.draw(st.sampled_from(sorted(content)))
    if data.draw(st.booleans()):
        content[key] = data.draw(JSON)
    else:
        del content[key]
    path.write_text(
        data.draw(
            st.sampled_from([json.dumps(content), "[" * 100_000, json.dumps(content)[:-3], ""])
        )
    )
    report, why = attempt(lambda: Report.load(path))
    assert report is not None or "is not a report of jaxcross" in why
