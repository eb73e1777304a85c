"""Messages shared by several ranks: which ranks failed, where and why, in well-formed sentences."""

import re
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.errors import ExchangeError, JobError
from jaxcross.health.abort import _short
from jaxcross.jobs.runner import Runner, raise_errors
from jaxcross.runtime.collective_call import run_collectively
from jaxcross.runtime.failure_text import describe, explain, printing_ranks
from jaxcross.step.timed_trial import gather_failures
from tests.support.fakes import run_ranks

TWO_STOPS = re.compile(r"(?<!\.)\.\s*\.(?!\.)|\.[;,]|\.\s+[;,]")
ends = st.sampled_from(["", ".", ". ", ".\n", ".\n\n", " .", "...", ". ."])
says = st.tuples(st.sampled_from(["disk full", "no file `a.b`", "see (this)"]), ends).map("".join)
errors = st.tuples(says, st.lists(says, max_size=2))


def made(text: str, notes: list[str]) -> Exception:
    error = OSError(text)
    for note in notes:
        error.add_note(note)
    return error


@given(st.lists(st.none() | errors, min_size=1, max_size=4).filter(any))
def test_no_message_has_two_full_stops_in_a_row(given_by_rank: list[Any]) -> None:
    texts = ["" if each is None else describe(made(*each)) for each in given_by_rank]
    job = explain("a", 2, [f"failed\n{text}" if text else "step\ncalled `step`" for text in texts])
    assert not TWO_STOPS.search(str(job)), job
    nested = explain("b", 2, [f"failed\n{describe(job)}", "failed\nof its own."])
    assert not TWO_STOPS.search(str(nested)), nested
    for each in filter(None, given_by_rank):
        assert not TWO_STOPS.search(f"{_short(OSError, made(*each))}, in job `a`.")


def test_meetings_and_trials_join_errors_likewise() -> None:
    def work(world: Any) -> tuple[str, str]:
        def fails(control: Any) -> None:
            raise OSError(f"disk {world.rank} is full. ")

        with pytest.raises(OSError, match=r"^disk \d is full"):
            run_collectively(fails, world.control)
        return gather_failures(world.control, describe(OSError("no space.\n"))), describe(
            OSError("(a.)")
        )

    joined = "rank 0 failed: OSError: no space; rank 1 failed: OSError: no space"
    assert run_ranks(2, work) == [(joined, "OSError: (a.)")] * 2


def test_a_long_error_closes_its_brackets() -> None:
    text = describe(ValueError("f(" + "[1, 2], " * 1000 + ")"))
    assert re.fullmatch(r"ValueError: f\(.*, ?\[1, 2.* \.\.\.\]?\) \(8003 characters\)", text)


def test_jobs_that_failed_are_joined_as_sentences() -> None:
    def work(world: Any) -> None:
        def fn(job: Any) -> None:
            raise ValueError(f"no data for {job.name}. ")

        runner = Runner(world)
        runner.add("a", fn)
        runner.add("b", fn)
        with pytest.raises(JobError) as caught:
            runner.run()
        for text in (str(caught.value), *caught.value.__notes__):
            assert not TWO_STOPS.search(text), text
        with pytest.raises(
            JobError, match=r"ValueError: no data for a\. Every rank leaves the job after step 0"
        ):
            raise_errors(runner.jobs, None)

    run_ranks(2, work)


def test_an_error_without_text_is_its_class() -> None:
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_notes_on_jaxs_own_frames_are_left_out() -> None:
    def step(x: Any) -> Any:
        return x.wrong

    with pytest.raises(AttributeError) as failed:
        jax.jit(step)({"x": 1.0})
    failed.value.add_note("of the user")
    assert (
        describe(failed.value)
        == "AttributeError: 'dict' object has no attribute 'wrong' (of the user)"
    )


def test_explanations():
    error = ValueError("the loader failed")
    error.add_note("here")
    assert describe(error) == "ValueError: the loader failed (here)"
    both = explain("a", 3, ["failed\nafter step 3: X", "", "failed\nafter step 3: Y"])
    assert str(both).startswith(
        "Job `a` failed on rank 0 after step 3: X; on rank 2 after step 3: Y. Every rank leaves"
    )
    alike = explain("a", 3, ["failed\nafter step 3: X", "", "failed\nafter step 3: X"])
    assert str(alike).startswith("Job `a` failed on ranks 0, 2 after step 3: X. Every rank leaves")
    apart = explain("a", 3, ["failed\nafter step 3: ExchangeError: X"] * 2)
    assert (type(apart), str(apart)) == (ExchangeError, "Job `a`, step 4: X")
    busy = explain("a", 3, ["failed\nafter step 3: ExchangeError: X", ""])
    assert type(busy) is ExchangeError, "the other rank may have had no time to say so"
    assert str(busy) == "Job `a`, step 4: X (found on rank 0; the other ranks were busy)"
    assert isinstance(
        explain("a", 3, ["failed\nafter step 3: ExchangeError: X", "sync\nrestore"]), JobError
    )
    mixed = explain("a", 1, ["batch\nasked for batch 2 of data 1", "sync\nrestore", ""])
    assert str(mixed).startswith(
        "Job `a` does different things on different ranks after step 1: "
        "rank 0 asked for batch 2 of data 1; rank 1 restore; rank 2 was busy."
    )


def test_explains_equal_exchanges_at_different_calls():
    error = explain("a", 3, ["step\ncalled step 6\npsum", "step\ncalled step 5\npsum"])
    assert isinstance(error, ExchangeError)
    assert str(error).startswith(
        "Job `a` takes a branch with exchanges at different calls: rank 0 in step 6, rank 1 in "
        "step 5. Its predicate"
    )
    moved = explain("a", 3, ["step\ncalled step 6\npsum\ta.py:1", "step\ncalled step 5\npsum"])
    assert str(moved) == str(error), "the lines of the code aren't compared"
    unlike = explain("a", 3, ["step\ncalled step 6\npsum", "step\ncalled step 5\npmax"])
    assert str(unlike).startswith(
        "Job `a`, step 4: ranks 0 and 1 exchange different things in `a`: exchange 0 is"
    )


def test_explains_equal_exchanges_of_different_functions():
    texts = [
        f"step\ncalled step 4 by `{name}` (function {n} of the job)\npsum"
        for n, name in ((1, "f"), (2, "g"))
    ]
    error = explain("a", 3, texts)
    assert isinstance(error, ExchangeError)
    assert str(error).startswith(
        "Job `a`, step 4: the ranks of job `a` call different steps: rank 0 `f` (function 1 of the "
        "job), rank 1 `g` (function 2 of the job). Exchanges match"
    )


def test_explains_shape_changes_on_one_rank_only():
    error = explain("a", 3, ["sync\nfirst call of `step`", "step\ncalled step 4"])
    assert str(error).startswith(
        "Job `a` does different things on different ranks after step 3: rank 0 first call of "
        "`step`; rank 1 called step 4."
    )
    assert "Or did shapes or types of a step's arguments change on some ranks only" in str(error)
    assert "shapes" not in str(explain("a", 3, ["end\nended", "step\ncalled step 4"]))


def test_description_of_any_exception_is_short():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    assert describe(MuteError()) == "MuteError: (its message cannot be shown: RuntimeError)"
    text = describe(ValueError("x" * 10**6))
    assert len(text) < 5000 and text.endswith("(1000000 characters)")


@pytest.mark.parametrize(
    ("texts", "ranks"),
    [
        (["", "failed\na", "failed\na", "failed\nb"], [1, 3]),
        (["ejected\nx", "failed\na"], [1]),
        (["", "ejected\nx", "ejected\ny"], [1]),
        (["step\na", "end\nb"], [0]),
    ],
)
def test_a_cause_is_printed_by_its_first_rank(texts: list[str], ranks: list[int]) -> None:
    assert printing_ranks(texts) == ranks
