"""Tests a plan as data and as a table."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.interleave.policy import RoundRobin, Weighted
from jaxcross.plan.plan import MAX_FILE_BYTES, Plan, PlannedGroup, PlannedJob


def _job(name: str, **changes: Any) -> PlannedJob:
    numbers = {
        "pieces": 4,
        "share": 2.5,
        "alone_s": 0.1,
        "step_s": 0.125,
        "compute_s": 0.06,
        "exchange_s": 0.05,
    }
    return PlannedJob(name=name, **{**numbers, **changes})


PAIR = PlannedGroup(
    jobs=(_job("a"), _job("b", share=1.0, estimated=True)),
    ranks=4,
    turns="weighted",
    period_s=0.25,
    bound_s=0.2,
    lost_s={"order": 0.05},
    memory_bytes=10**9,
    why="because",
)
SINGLE = PlannedGroup(jobs=(_job("c", pieces=1, share=1.0, step_s=0.1),), ranks=2, lost_s={})
PLAN = Plan(groups=(PAIR, SINGLE), memory_bytes=80 * 10**9, notes=("Be careful.",))


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    assert Plan.load(PLAN.to_json(tmp_path / "plan.json")) == PLAN


def test_a_plan_is_read_from_toml(tmp_path: Path) -> None:
    """Fields that may be None are missing from the file, because TOML can't express None."""
    (tmp_path / "plan.toml").write_text(
        "format = 1\n[[groups]]\nranks = 2\n[[groups.jobs]]\nname = 'c'\npieces = 1\nshare = "
        "1\nalone_s = 0.1\n"
        "step_s = 0.1\ncompute_s = 0.06\nexchange_s = 0.05\n"
    )
    assert Plan.load(tmp_path / "plan.toml") == Plan(groups=(SINGLE,))


def test_a_group_has_its_policy() -> None:
    assert PLAN.group_of("b").policy == Weighted((2.5, 1.0))
    assert PLAN.group_of("c").policy == RoundRobin()
    with pytest.raises(ValueError, match="no job `d`"):
        PLAN.group_of("d")


def test_progress_is_a_mean_over_ranks() -> None:
    assert (PAIR.progress, SINGLE.progress) == (pytest.approx(1.6), 1.0)
    assert PLAN.progress == pytest.approx((4 * 1.6 + 2) / 6)
    assert PLAN.ranks == 6


def test_the_table_shows_each_job() -> None:
    text = str(PLAN)
    assert "3 jobs in 2 groups on 6 ranks, 80.0 GB of memory on each" in text
    (row,) = (line for line in text.splitlines() if " b " in line)
    facts = ["0", "b", "", "", "share 1.00", "~4", "0.80", "", "100 ms", "125 ms"]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == facts
    assert "│ 1.60 │" in text, "the gain stands once a group"
    assert "1.40 times as many steps as one job after the other" in text
    assert "Group 0: because." in text and "Be careful." in text and "~: pieces estimated" in text


@pytest.mark.parametrize("columns", ["40", "60", "80"])
def test_each_row_of_a_narrow_table_has_its_group(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = str(PLAN).splitlines()
    assert max(map(len, lines)) <= int(columns)
    heads = [n for n, line in enumerate(lines) if line.startswith("group job")]
    assert heads
    for head in heads:
        assert [line.split()[:2] for line in lines[head + 1 : head + 4]] == [
            ["0", "a"],
            ["0", "b"],
            ["1", "c"],
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 1"),
        ({"groups": {}}, "expected `array`, got `object` at `groups`"),
        ({"groups": [1]}, r"expected `object`, got `int` at `groups\[0\]`"),
        ({"groups": [{}]}, r"object missing required field `jobs` at `groups\[0\]`"),
        ({"memory_bytes": True}, "expected `int . null`, got `bool` at `memory_bytes`"),
        ({"memory_bytes": 10**400}, "`memory_bytes` of the plan must be from 0 to"),
        ({"notes": [1]}, r"expected `str`, got `int` at `notes\[0\]`"),
        ({"groups": [PLAN.as_data()["groups"][1]] * 2}, "two jobs of the plan have the name `c`"),
    ],
)
def test_another_content_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps({**PLAN.as_data(), **change}))
    with pytest.raises(ValueError, match=rf"`.*p\.json` is not a plan of jaxcross: .*{message}"):
        Plan.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "x" * 201}, "1 to 200 printable characters"),
        ({"name": "a\nb"}, "1 to 200 printable characters"),
        ({"share": 0}, "must be positive"),
        ({"step_s": float("nan")}, "must be positive"),
        ({"compute_s": -1.0}, "not negative"),
        ({"exchange_s": float("inf")}, "finite"),
    ],
)
def test_a_job_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(**{"name": "a", **change})


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": 0},
        {"jobs": ()},
        {"turns": "random"},
        {"lost_s": {"weather": 1.0}},
        {"period_s": float("nan")},
    ],
)
def test_a_group_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="group"):
        PlannedGroup(**{"jobs": (_job("a"),), "ranks": 1, "lost_s": {}, **change})


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ValueError, match="more than 100000000 bytes"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{", '{"format": 1}', "\udcff"])
def test_a_text_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="not a plan"):
        Plan.load(tmp_path / "p.json")


LEAF = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5)
JSON = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)


@given(st.data())
def test_random_content_is_refused_or_read(data: st.DataObject) -> None:
    """The only error is ValueError, wherever in the file the content is replaced."""
    whole = PLAN.as_data()
    place: Any = data.draw(
        st.sampled_from([whole, whole["groups"][0], whole["groups"][0]["jobs"][0]])
    )
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    try:
        plan = Plan.from_data(whole)
    except ValueError:
        return
    assert Plan.from_data(plan.as_data()) == plan
