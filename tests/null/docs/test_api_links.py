"""Tests which entry of the API reference a name in inline code links to."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
target = runpy.run_path(str(DOCS / "extensions" / "api_links.py"))["target"]
ENTRIES = {
    *re.findall(
        r"^\.\. auto(?:class|function|data):: (\S+)",
        "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md")),
        re.MULTILINE,
    ),
    "jaxcross.Runner.add",
    "jaxcross.JobContext.log",
    "jaxcross.report.Report.load",
}


@pytest.mark.parametrize(
    ("code", "entry"),
    [
        ("jaxcross.sweep", "jaxcross.sweep"),
        ('crossover(axes="batch")', "jaxcross.crossover"),
        ("runner.add", "jaxcross.Runner.add"),
        ("runner.add(name, train)", "jaxcross.Runner.add"),
        ("job.log", "jaxcross.JobContext.log"),
        ("job.history", "jaxcross.JobContext"),  # its class describes it
        ("world.rank", "jaxcross.World"),
        ("Report.load", "jaxcross.report.Report.load"),
        ("tensor.step_cost", "jaxcross.tensor.step_cost"),
        ("streaming_diloco", "jaxcross.exchange.streaming_diloco"),
        ("Mesh(tensor=p)", "jaxcross.tensor.Mesh"),
        ("run", None),  # also a method
        ("check_replicas", None),  # an argument
        ("jax.jit", None),
        ("jaxcross.lab", None),  # a module
        ("jaxcross demo", None),
    ],
)
def test_name_links_to_its_entry(code, entry):
    assert target(code, ENTRIES) == entry


@pytest.mark.parametrize("code", ["jaxcross.swoop", "runner.remove()", "Report.lode"])
def test_name_that_does_not_exist_is_an_error(code):
    with pytest.raises(LookupError):
        target(code, ENTRIES)
