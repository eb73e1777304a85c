"""Prints how many mutants each suite killed, by folder, and every mutant that survived."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutation.judge import Verdict

KILLS = (Verdict.KILLED, Verdict.HUNG)
RESULTS = Path(__file__).with_name("results.json")
COLUMNS = ("mutants", "quick", "integration", "hung", "survive both", "old only", "absent", "open")


def column(new: Mapping | None, old: Mapping | None) -> str:
    """Returns the one column that a mutant counts in, given its results in both suites."""
    if new is None or new["verdict"] == Verdict.ABSENT:
        return "open"
    if new["verdict"] == Verdict.HUNG:
        return "hung"
    if new["verdict"] == Verdict.KILLED:
        return "quick" if new["stage"] == 0 else "integration"
    if old is None:
        return "open"
    if old["verdict"] == Verdict.ABSENT:
        return "absent"
    return "old only" if old["verdict"] in KILLS else "survive both"


def show(
    console: Console,
    mutants: Sequence[Mapping],
    results: Mapping[str, Mapping[str, Mapping]],
    new: str,
    old: str,
) -> bool:
    """Prints the table and the lists. Returns False if a mutant is open, or if only the old suite
    kills it.
    """
    columns = {
        each["key"]: column(*(results.get(name, {}).get(each["key"]) for name in (new, old)))
        for each in mutants
    }
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in mutants:
        for row in (str(PurePosixPath(each["file"]).parent), "all"):
            counts[row].update(["mutants", columns[each["key"]]])
    table = Table(
        title=f"Mutants killed by the suite `{new}`, and by `{old}` those that survive it"
    )
    table.add_column("folder", no_wrap=True)
    for name in COLUMNS:
        table.add_column(
            name, justify="right", style={"old only": "red", "open": "yellow"}.get(name)
        )
    for row, count in counts.items():
        if row != "all":
            table.add_row(row, *(str(count[name] or "") for name in COLUMNS))
    table.add_section()
    table.add_row("all", *(str(counts["all"][name]) for name in COLUMNS))
    cut_off = sum(
        any(
            results.get(suite, {}).get(each["key"], {}).get("verdict") == Verdict.LIMITED
            for suite in (new, old)
        )
        for each in mutants
    )
    if cut_off:
        table.caption = (
            f"For {cut_off} mutants a suite ran out of time, so it might have killed them: see "
            "README.md."
        )
    console.print(table)
    noted = _saved()
    for name in ("old only", "open", "absent", "survive both", "hung"):
        chosen = [each for each in mutants if columns[each["key"]] == name]
        if chosen:
            console.print(f"\n[bold]{name}[/bold]")
        for each in chosen:
            console.print(
                f"{each['file']}:{each['line']} {each['function']} \\[{each['operator']}] "
                f"{each['key']}"
            )
            if note := noted.get(each["key"], {}).get("note"):
                console.print(f"  {escape(note)}", soft_wrap=True)
            console.print(
                f"  [red]- {escape(each['before'])}[/red]\n  [green]+ "
                f"{escape(each['after'])}[/green]",
                soft_wrap=True,
            )
            for suite in (new, old):
                if result := results.get(suite, {}).get(each["key"]):
                    console.print(f"  {suite}: {escape(_verdict(result))}", soft_wrap=True)
    return not counts["all"]["old only"] and not counts["all"]["open"]


def _verdict(result: Mapping) -> str:
    verdict = Verdict(result["verdict"])
    if verdict in KILLS:
        return f"{verdict} by {result['killer']} {result['reason']}".strip()
    if verdict is Verdict.LIMITED:
        return (
            f"survived {result['passed']} tests in {result['seconds']:.0f} s; "
            f"{result['unrun_direct']} more evaluate it"
        )
    if verdict is Verdict.UNCOVERED:
        lost = ", but a process without a test's name did" if result.get("nameless") else ""
        return f"no test evaluates it{lost}"
    if verdict is Verdict.ABSENT:
        return "its function differs in this checkout"
    mates = (
        f"; of their files, {result['unrun_mates']} other tests were left"
        if result["unrun_mates"]
        else ""
    )
    return f"survived {result['passed']} tests, {result['direct']} of which evaluate it{mates}"


def save(mutants: Sequence[Mapping], results: Mapping[str, Mapping]) -> None:
    """Writes a suite's verdicts to `results.json`. A note is kept as long as its mutant's function
    doesn't change.
    """
    noted = _saved()
    left = {
        each["key"]: {
            "place": f"{each['file']}:{each['line']}",
            "before": each["before"],
            "after": each["after"],
            "verdict": results[each["key"]]["verdict"],
            "note": noted.get(each["key"], {}).get("note", ""),
        }
        for each in mutants
        if each["key"] in results and results[each["key"]]["verdict"] != Verdict.KILLED
    }
    verdicts = Counter(result["verdict"] for result in results.values())
    commits = sorted({result["commit"] for result in results.values()})
    RESULTS.write_text(
        json.dumps({"commits": commits, "verdicts": verdicts, "not killed": left}, indent=1) + "\n"
    )


def _saved() -> Mapping[str, Mapping[str, str]]:
    return json.loads(RESULTS.read_text())["not killed"] if RESULTS.exists() else {}
