"""Tests what the page and the README say about a sweep, and which of its ways count as equal."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import pages.sweep as page  # pyright: ignore[reportMissingImports]
import sweep_to_target_show as show  # pyright: ignore[reportMissingImports]
import tables  # pyright: ignore[reportMissingImports]
from rivals import digits  # pyright: ignore[reportMissingImports]

SLOW, FAST = {"rate": 0.1, "momentum": 0.0}, {"rate": 0.1, "momentum": 0.9}


def row(way: str, repeat: int, minutes: float, *, best: int = 1, loss: float = 0.5) -> Any:
    same = {"score": 0.0, "digest": "d", "curve": [[8, loss, 0.98]]}
    trials = [
        {"params": params, "steps": steps, **same} for params, steps in ((SLOW, 40), (FAST, 16))
    ]
    seconds = {"s": 60 * minutes, "start_up_s": 30.0, "cpu_s": 120 * minutes}
    return {"way": way, "repeat": repeat, "best": best, "trials": trials, **seconds}


def result(rows: list[Any], **left_out: str) -> dict[str, Any]:
    sweep = {"trials": [SLOW, FAST], "target": 0.95}
    facts = {"sweep": sweep, "concurrent": 3, "rows": rows, "left_out": left_out}
    return {**facts, **show.verdict(rows)}


ALL = [
    *(row("one", n, minutes) for n, minutes in enumerate((6, 5))),
    *(row("crossover", n, minutes) for n, minutes in enumerate((3, 4))),
    *(row("ddp", n, 4) for n in range(2)),
    *(row("ddp-k", n, 3.5) for n in range(2)),
]


def test_ratios_compare_runs_of_the_same_repeat() -> None:
    assert show.ratios(ALL, "one", "crossover") == [2.0, 1.25]
    assert show.ratios(ALL[:3], "one", "crossover") == [2.0]


def test_verdict_compares_all_runs_of_both_ways() -> None:
    assert show.verdict(ALL)["equal_to_the_bit"] is True
    assert show.verdict([*ALL, row("crossover", 2, 3, loss=0.5000001)])["equal_to_the_bit"] is False
    assert show.verdict(ALL[:2])["equal_to_the_bit"] is None, "there's nothing to compare it with"


def test_verdict_names_every_winner_of_a_way() -> None:
    assert show.verdict(ALL)["same_winner"]
    found = show.verdict([*ALL, row("ddp", 2, 4, best=0)])
    assert found["winners"]["ddp"] == [FAST, SLOW] and not found["same_winner"]


def test_table_has_a_line_per_way() -> None:
    head, one, crossover, ddp, left_out = page.table(
        lambda _: result(ALL[:6], **{"ddp-k": "PyTorch is not installed"}), ""
    )
    assert crossover == (
        "`crossover`: jaxcross, 3 trials in crossover",
        "3.5 (3.0 to 4.0)",
        "0.5",
        "1.62 (1.25 to 2.00)",
        "7.0 (6.0 to 8.0)",
        "rate 0.1, momentum 0.9 (16 steps)",
    )
    assert one[3] == "1.00" and ddp[1] == "4.0"
    assert left_out[1] == "PyTorch is not installed"
    assert {len(each) for each in (head, one, crossover, ddp, left_out)} == {6}


def test_readme_line_says_who_won() -> None:
    said = page.line(lambda _: result(ALL))
    assert "takes **3.5 minutes in crossover**, and 5.5 minutes one trial after the other" in said
    assert "The same trial wins in all four ways" in said
    other = [*ALL[:6], *(row("ddp-k", n, 3.5, best=0) for n in range(2))]
    assert "with DDP, another one wins" in page.line(lambda _: result(other))
    assert "PyTorch" not in page.line(lambda _: result(ALL[:4]))


def test_line_replaces_what_its_marks_enclose() -> None:
    begin, end = "<!-- line sweep-to-target -->\n", "<!-- end -->\n"
    filled = tables.filled(f"Before.\n\n{begin}- old\n  text\n{end}- next\n", lambda _: result(ALL))
    assert filled.startswith(f"Before.\n\n{begin}- A sweep of 2 trials")
    assert filled.endswith(f"(docs/results/speed.md#a-whole-sweep).\n{end}- next\n")
    assert "old" not in filled
    assert max(map(len, filled.splitlines())) <= tables.WIDTH
    assert tables.filled(filled, lambda _: result(ALL)) == filled


def test_line_without_a_stored_result_is_left_out() -> None:
    def read(_: str) -> dict[str, Any]:
        raise FileNotFoundError

    begin, end = "<!-- line sweep-to-target -->\n", "<!-- end -->\n"
    assert tables.filled(f"{begin}- old\n{end}- next\n", read) == f"{begin}{end}- next\n"


@pytest.mark.parametrize("smoke", [True, False])
def test_trials_are_ranked_by_steps_then_accuracy(smoke: bool) -> None:
    sweep = digits.sweep_of(smoke)
    assert sweep.score(8, 0.9) < sweep.score(16, 1.0) < sweep.score(16, 0.99)
    assert len(sweep.trials()) == (4 if smoke else 12)
    assert sweep.limit % sweep.every == 0, "otherwise, the last steps aren't evaluated"
