"""Draws `docs/images/crossover.png` from the run of `jaxcross demo` that the tutorial shows.

    python docs/pictures/crossover.py [FILE]

`benchmarks/results/demo.json` holds the reports that the demo wrote, two for each way of running.
As in the demo, the table covers all four reports and the picture shows the last two. A test
compares the tutorial's table with these reports.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from style import target

from jaxcross.report import Comparison, Report
from jaxcross.report.gantt import draw_gantt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "demo.json"
WAYS = ("sequential", "crossover")


def reports() -> list[list[Report]]:
    """Returns the reports of each way of running, in order."""
    kept = json.loads(RESULT.read_text())
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        for way in WAYS:
            loaded = []
            for report in kept[way]:
                path.write_text(json.dumps(report))
                loaded.append(replace(Report.load(path), policy=way))
            found.append(loaded)
    return found


def main() -> int:
    ways = reports()
    comparison = Comparison.of(*ways)
    picture = target("crossover.png")
    draw_gantt(ways[1][-1], picture, compare=ways[0][-1], headline=comparison.headline)
    print(comparison)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
