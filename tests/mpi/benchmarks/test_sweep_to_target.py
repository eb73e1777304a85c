"""A whole sweep at toy size over a real link: the same trials in every way."""

import importlib.util

import pytest


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lab")
def test_sweep_to_target(smoke, tmp_path):
    result = smoke("sweep_to_target.py", "--png", str(tmp_path / "sweep.png"))
    assert result["question"].startswith("How long does a sweep take")
    torch = importlib.util.find_spec("torch") is not None
    ways = ["one", "crossover", *(["ddp", "ddp-k"] if torch else [])]
    assert [row["way"] for row in result["rows"]] == ways
    assert set(result["left_out"]) == (set() if torch else {"ddp", "ddp-k"})
    assert result["equal_to_the_bit"] is True
    for row in result["rows"]:
        assert [trial["params"] for trial in row["trials"]] == result["sweep"]["trials"]
        assert 0 < row["start_up_s"] < row["s"] and row["cpu_s"] > 1
        for trial in row["trials"]:
            assert 0 < trial["begin_s"] < trial["first_step_s"] <= trial["end_s"] < row["s"]
            assert trial["curve"][-1][0] == trial["steps"]
    # The first losses follow from the first weights and batches, which all ways have in common.
    first = [[trial["curve"][0][1] for trial in row["trials"]] for row in result["rows"]]
    assert first[0] == first[1]
    for losses in first[2:]:
        assert losses == pytest.approx(first[0], rel=1e-2)
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
