"""`benchmarks/data.py` and `benchmarks/data_cache.py` run, and write their measurements."""

import pytest


@pytest.mark.integration
def test_smoke(smoke):
    result = smoke("data.py")
    assert result["question"].startswith("How many images per second")
    assert len(result["images_per_second"]) == 4
    assert all(
        len(rates["raw"]) == 2 and rates["median"] > 0
        for rates in result["images_per_second"].values()
    )


@pytest.mark.integration
@pytest.mark.usefixtures("lab")
def test_smoke_of_the_cache(smoke, tmp_path):
    """Over the lab link. Byte counts are exact at any size; rates mean nothing at this one."""
    ways = "cache, fits, 2 jobs;cache, half fits, 1 job"
    result = smoke("data_cache.py", "--ways", ways, "--png", str(tmp_path / "levels.png"))
    assert result["question"].startswith("Does training from slow storage reach full speed")
    first, second = result["raw"]["cache, fits, 2 jobs"][0]["passes"]
    assert first["origin_bytes"] > second["origin_bytes"] == 0
    assert result["raw"]["cache, fits, 2 jobs"][0]["levels"]["origin"] == result["images"]
    assert len(result["ways"]) == 3
    assert (tmp_path / "levels.png").stat().st_size > 0
