"""`Report`: the record of a run on all its ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxcross._schema import record, spelt, unspelt
from jaxcross.errors import clause
from jaxcross.interleave import Span
from jaxcross.report.html_table import as_html
from jaxcross.report.record import SPAN_FIELDS, clock_offsets, from_rows, shifted, to_rows
from jaxcross.report.summary import JobSummary, TimeBreakdown
from jaxcross.report.table import printed_text, render
from jaxcross.report.time_breakdown import break_down
from jaxcross.report.units import plural, seconds

if TYPE_CHECKING:
    from rich.console import Group

    from jaxcross.plan import Difference, Prediction

FORMAT = 2
IN_TURN = "sequential"  # the policy that runs the jobs one after the other, as a baseline
_MAX_SPANS = 1_000_000  # sum over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The record of a finished run. `print(report)` shows it as a table.

    Attributes:
        spans: The spans of all ranks, on rank 0's clock.
        jobs: The jobs, in the order in which they were added.
        wall_ns: Begin and end of the run on each rank, in nanoseconds on rank 0's clock.
        policy: Name of the policy.
        placement: The device on which segments ran.
        link: The link between the ranks. If it's emulated, this text and all output say so.
        dropped: Number of spans discarded because there were too many.
        fusion: Which jobs `jaxcross.fuse` fused and which it didn't, and why.
        rounds: Where the time went: the length of a round, its bound and the losses. Computed from
            the other attributes.
    """

    spans: tuple[Span, ...]
    jobs: tuple[JobSummary, ...]
    wall_ns: dict[int, tuple[int, int]]
    policy: str = ""
    placement: str = ""
    link: str = ""
    dropped: int = 0
    fusion: tuple[str, ...] = ()
    rounds: TimeBreakdown = field(init=False)

    def __post_init__(self) -> None:
        lengths = {rank: end - start for rank, (start, end) in self.wall_ns.items()}
        object.__setattr__(
            self,
            "rounds",
            break_down(self.spans, self.jobs, lengths, in_turn=self.policy == IN_TURN),
        )

    @classmethod
    def build(
        cls,
        spans: Iterable[Span],
        *,
        jobs: Sequence[JobSummary],
        start_ns: int,
        end_ns: int,
        rank: int = 0,
        size: int = 1,
        policy: str = "",
        placement: str = "",
        link: str = "",
        dropped: int = 0,
        control: Any | None = None,
        watch: AbstractContextManager[Any] | None = None,
    ) -> Report:
        """Gathers the spans of all ranks into a report.

        With `control`, this call communicates and waits: all ranks have to make it, on the thread
        that's allowed to use `control`. The report is then identical across ranks.

        The report combines the spans, the begin and end times and each job's `left_over` from all
        ranks; everything else comes from rank 0. If there are too many spans, only the latest are
        kept, about a million across all ranks.

        Args:
            spans: This rank's spans, oldest first.
            jobs: The jobs of the run.
            start_ns: `time.monotonic_ns` of this rank when the run began.
            end_ns: `time.monotonic_ns` of this rank when the run ended.
            rank: This rank.
            size: Number of ranks.
            policy: Name of the policy.
            placement: The device on which segments ran.
            link: The link between the ranks.
            dropped: Number of this rank's spans that have been discarded already.
            control: `World.control`, or None for a single-rank run.
            watch: A context manager to enter while this call waits for the other ranks.

        Raises:
            ValueError: There are several ranks but no `control`.
        """
        if size > 1 and control is None:
            raise ValueError(
                f"a report of `{size}` ranks needs `control` to gather their spans: pass "
                "`control=world.control`."
            )
        mine = tuple(spans)
        kept = mine[-max(1, _MAX_SPANS // size) :]
        part = {
            "rank": rank,
            "start": start_ns,
            "end": end_ns,
            "dropped": dropped + len(mine) - len(kept),
            "jobs": [asdict(job) for job in jobs],
            "spans": to_rows(kept),
        }
        text = json.dumps(part)
        with watch or nullcontext():
            texts = [text] if control is None or size == 1 else control.allgather_text(text)
        parts = [json.loads(text) for text in texts]
        every = [span for part in parts for span in from_rows(part["spans"])]
        offsets = {part["rank"]: 0 for part in parts} | clock_offsets(every)
        return cls(
            spans=shifted(every, offsets),
            jobs=_joined([part["jobs"] for part in parts]),
            wall_ns={
                p["rank"]: (p["start"] + offsets[p["rank"]], p["end"] + offsets[p["rank"]])
                for p in parts
            },
            policy=policy,
            placement=placement,
            link=link,
            dropped=sum(part["dropped"] for part in parts),
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.wall_ns))

    def speedup(self, over: Report) -> float | None:
        """Returns how many times shorter a job-step is in this run than in `over`.

        Returns None if either run has no round, i.e. if we couldn't measure how long it takes to
        make one step of every job.

        This doesn't check whether the two runs are comparable: if the machine was busy during one
        of them, the result is misleading. `Comparison` is the safer choice.
        """
        one = over.rounds.s_per_step
        other = self.rounds.s_per_step
        return one / other if one is not None and other else None

    def against(self, predicted: Prediction) -> Difference:
        """Compares the run with its prediction, and explains why its rounds took longer.

        Args:
            predicted: A prediction for the same jobs under the same policy, from
                `jaxcross.plan.predict`.

        Returns:
            The difference; `print` shows its table.

        Raises:
            ValueError: The jobs, the policy or the segments differ, or either the run or the
                prediction has no steady state.
        """
        return predicted.difference(self)

    def summary(self) -> dict[str, Any]:
        """Returns the numbers of the table as plain data. Their names include the units."""
        rounds = self.rounds
        return {
            "policy": self.policy,
            "placement": self.placement,
            "link": self.link,
            "ranks": len(self.wall_ns),
            "wall_s": rounds.wall_s,
            "start_up_s": rounds.start_up_s,
            "rounds": rounds.rounds,
            "in_turn": rounds.in_turn,
            "steady_share": rounds.steady_share,
            "shared_share": rounds.shared_share,
            "period_s": rounds.period_s,
            "bound_s": rounds.bound_s,
            "limit": rounds.bottleneck,
            "efficiency": rounds.efficiency,
            "s_per_step": rounds.s_per_step,
            "hidden_share": rounds.hidden_share,
            "examples_per_s": rounds.examples_per_s,
            "lost_s": dict(rounds.lost_s),
            "slow_rank": None if rounds.slow_rank is None else asdict(rounds.slow_rank),
            "dropped_spans": self.dropped,
            "fusion": [*self.fusion],
            "jobs": [
                {
                    "name": job.facts.name,
                    "steps": job.facts.steps,
                    "first_step": job.facts.first_step,
                    "last_step": job.facts.last_step,
                    "steps_per_round": job.steps_per_round,
                    "steps_per_s": job.steps_per_s,
                    "examples_per_s": job.examples_per_s,
                    "unit": job.facts.unit,
                    "compute_s": job.compute_s,
                    "exchange_s": job.exchange_s,
                    "hidden_share": job.hidden_share,
                    "bytes_per_step": job.bytes_per_step,
                    "other_calls": job.other_calls,
                    "final_loss": job.facts.final_loss,
                    "metrics": dict(job.facts.metrics),
                    "left": job.facts.how,
                    "why": job.facts.why,
                    "skipped_steps": job.facts.skipped,
                    "replicas": job.facts.replicas,
                    "left_over": [*job.facts.left_over],
                }
                for job in rounds.jobs
            ],
        }

    def to_json(self, path: str | Path) -> Path:
        """Writes the summary, facts about the jobs and all spans. `load` reads it all back.

        JSON has no way to write NaN and infinities as numbers, so the file contains the strings
        `"nan"`, `"inf"` and `"-inf"` instead.
        """
        content = {
            "format": FORMAT,
            "summary": spelt(self.summary()),
            "jobs": [spelt(asdict(job)) for job in self.jobs],
            "wall_ns": [[rank, *when] for rank, when in self.wall_ns.items()],
            "span_fields": SPAN_FIELDS,
            "spans": to_rows(self.spans),
        }
        path = Path(path)
        path.write_text(json.dumps(content, allow_nan=False))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a file that `to_json` wrote.

        Raises:
            ValueError: The file isn't such a report.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ValueError(
                    f"its format is {content['format']!r:.60}, but this version reads {FORMAT}"
                )
            summary = content["summary"]
            return cls(
                spans=from_rows(content["spans"], content["span_fields"]),
                jobs=tuple(_read_facts(job) for job in content["jobs"]),
                wall_ns={rank: (start, end) for rank, start, end in content["wall_ns"]},
                policy=summary["policy"],
                placement=summary["placement"],
                link=summary["link"],
                dropped=summary["dropped_spans"],
                fusion=tuple(map(str, summary.get("fusion", ()))),
            )
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else clause(str(error))
            raise ValueError(
                f"`{path}` is not a report of jaxcross: {reason}. Write one with "
                "`report.to_json(path)`."
            ) from error

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Writes a trace for https://ui.perfetto.dev or chrome://tracing."""
        from jaxcross.report.chrome import trace_events

        path = Path(path)
        path.write_text(json.dumps(trace_events(self), allow_nan=False))
        return path

    def to_gantt(
        self,
        path: str | Path,
        compare: Report | None = None,
        *,
        window: tuple[float, float] | None = None,
    ) -> Path:
        """Draws the lanes over time as a PNG. If `compare` is given, draws that run above this one.

        Args:
            path: Where to write the PNG.
            compare: Another run of the same jobs, drawn on the same time axis.
            window: Start and end of the picture, in seconds since the run began. By default, the
                picture starts once the jobs are in steady state, and is short enough to tell
                individual segments apart.

        Raises:
            ValueError: `window` doesn't end after it begins, or `compare` has different jobs.
            MissingExtraError: matplotlib is not installed. The extra `plot` installs it.
        """
        from jaxcross.report.gantt import draw_gantt

        return draw_gantt(self, Path(path), compare, window=window)

    def __rich__(self) -> Group:
        return render(self)

    def __repr__(self) -> str:
        outcomes = ", ".join(
            f"{count} {how}" for how, count in Counter(job.how for job in self.jobs).items()
        )
        steps = sum(job.steps for job in self.jobs)
        return (
            f"<Report of {plural(len(self.jobs), 'job')}{outcomes and f' ({outcomes})'}: "
            f"{plural(steps, 'step')} in {seconds(self.rounds.wall_s)} on "
            f"{plural(len(self.wall_ns), 'rank')}; print() shows the table>"
        )

    def __str__(self) -> str:
        return printed_text(render(self))

    def _repr_html_(self) -> str:
        return as_html(render(self))


def _joined(ranks: Sequence[Sequence[dict[str, Any]]]) -> tuple[JobSummary, ...]:
    """Merges the ranks' lists of jobs. Concatenates `left_over`, and takes the rest from rank 0."""
    left_over: dict[str, list[int]] = {}
    for jobs in ranks:
        for job in jobs:
            left_over.setdefault(job["name"], []).extend(job["left_over"])
    return tuple(
        JobSummary(**{**job, "left_over": tuple(left_over[job["name"]])}) for job in ranks[0]
    )


def _read_facts(job: dict[str, Any]) -> JobSummary:
    """Inverts `asdict` for a job, whose NaN and infinities may have been written as strings."""
    numbers = {key: unspelt(job[key]) for key in ("examples_per_step", "final_loss") if key in job}
    metrics = {key: unspelt(value) for key, value in job.get("metrics", {}).items()}
    return record({**job, **numbers, "metrics": metrics}, JobSummary)
