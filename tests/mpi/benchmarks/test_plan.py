"""benchmarks/plan.py at toy size, on hosts with a real link: predictions, carried exchanges."""

import pytest

pytestmark = pytest.mark.usefixtures("lab")


@pytest.mark.exhaustive
def test_plan(smoke, tmp_path):
    picture = tmp_path / "plan.png"
    options = ("--only", "equal,unequal", "--cases", "two,unequal shares", "--rates", "500")
    result = smoke("plan.py", *options, "--png", str(picture))
    assert picture.stat().st_size > 10_000
    two, shares = result["rows"]
    assert (two["case"], shares["case"]) == ("two", "unequal shares")
    assert two["steps"][0] == two["steps"][1]
    for row in result["rows"]:
        low, high = row["interval_s"]
        assert 0 < low < row["predicted_s"] < high
        assert row["ratio"] == pytest.approx(row["predicted_s"] / row["achieved_s"])
    # A toy's exchange may be too slow for its number of bytes. Then its contention is unknown, and
    # nothing is predicted.
    assert all(row["case"] == "two" and row["predicted"] >= 1 for row in result["estimates"])
    assert {row["kind"] for row in result["solo"]} == {"language", "large cut in 16", "small"}
    again = smoke("plan.py", "--only", "variants", "--rates", "1000")
    assert [row["case"] for row in again["rows"]] == ["two", "unequal shares", "two cut"]


@pytest.mark.exhaustive
def test_plan_on_slow_links_and_with_a_slow_rank(smoke):
    """Predictions use the contention that was measured in the same run."""
    parts = ("contention", "slow", "unlike")
    result = smoke("plan.py", "--only", ",".join(parts), "--rates", "100,200,1000")
    assert [row["rate"] for row in result["contention"]] == [100, 200, 1000]
    assert all(row["compute"] >= 1 <= row["exchange"] for row in result["contention"])
    cases = [row["case"] for row in result["rows"]]
    assert cases == ["two, batch 16", "two, batch 8", "two, like ranks", "two, rank 1 slower"]
    assert all(
        len(profile["rank_seconds"]) == 2 for row in result["solo"] for profile in row["profiles"]
    )
    for row in result["estimates"]:
        points = {point["mbps"]: point for point in row["cost"]["contention"]}
        measured = {row["rate"]: row for row in result["contention"]}
        assert all(points[rate]["compute"] == measured[rate]["compute"] for rate in measured)


@pytest.mark.exhaustive
def test_carried(smoke, tmp_path):
    picture = tmp_path / "carried.png"
    result = smoke("carried.py", "--only", "alone,work", "--rates", "100", "--png", str(picture))
    assert picture.stat().st_size > 10_000
    alone, work = result["rows"]
    assert [(row["part"], row["rate"]) for row in (alone, work)] == [("alone", 100), ("work", 100)]
    assert set(alone["s"]) == set(alone["processor_s"]) == {"jit", "compute", "blocking", "carried"}
    assert set(work["s"]) == set(work["processor_s"]) == {"jit", "compute", "work", "carried"}
    assert all(
        len(seconds) == 1
        for row in (alone, work)
        for seconds in (*row["raw"].values(), *row["processor_s"].values())
    )
    memory = result["memory"]
    # One of four fragments is in flight: eight bits per element, plus a scale for each block of
    # 128, and the last block is padded.
    blocking, carried = memory["blocking 0"], memory["carried 0"]
    assert blocking["pending_bytes"] == 0 < carried["pending_bytes"] < 79832 / 4 * 1.2
    assert carried["programs"] > blocking["programs"] == 5
