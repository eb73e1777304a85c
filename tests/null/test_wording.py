"""Tests how foreign text is put into our sentences: no second full stop, no unclosed bracket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.errors import clause, first_line, shortened

PAIRS = {"(": ")", "[": "]", "{": "}"}


def balanced(text: str) -> bool:
    """Whether brackets close in the right order. Text in backticks is a name, which may contain any
    bracket.
    """
    parts = text.split("`")
    opened: list[str] = []
    for character in "".join(parts[::2]):
        if character in PAIRS:
            opened.append(PAIRS[character])
        elif character in PAIRS.values() and (not opened or opened.pop() != character):
            return False
    return len(parts) % 2 == 1 and not opened


words = st.text("ab ,\n", min_size=1, max_size=12)
texts = st.recursive(
    words | words.map(lambda word: f"`f({word}`"),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.sampled_from(sorted(PAIRS.items())).flatmap(
            lambda pair: inner.map(lambda text: pair[0] + text + pair[1])
        ),
    ),
    max_leaves=12,
)


@given(texts, st.integers(0, 60))
def test_what_is_cut_has_its_brackets_closed(text: str, longest: int) -> None:
    assert balanced(text)
    assert balanced(shortened(text, longest))
    assert balanced(first_line(text))
    assert shortened(text, len(text)) == text
    assert shortened(text, longest)[:longest].startswith(text[:longest].rstrip())


@given(st.text("ab. \n", max_size=20))
def test_a_clause_ends_without_a_full_stop(text: str) -> None:
    assert not clause(text).endswith((".", " ", "\n"))
    assert text.startswith(clause(text))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "flags were not parsed. (-----\nFor simplicity) at end",
            "flags were not parsed. (----- ...)",
        ),
        ("one (two) line\nmore", "one (two) line"),
        ("`a\nb` more", "`a ...`"),
        ("(only one", "(only one"),
        ("\n  second \n", "second"),
        ("", ""),
    ],
)
def test_first_line_shows_that_more_follows(text: str, line: str) -> None:
    assert first_line(text) == line


def test_long_text_is_marked_as_shortened() -> None:
    assert shortened("f([1, 2])", 9) == "f([1, 2])"
    assert shortened("f([1, 2])", 6) == "f([1, ...])"
    assert shortened("plain words", 5) == "plain ..."
