"""Works out which rank ended first, in which operation, and what the other ranks were doing.

When a rank dies, the others follow within moments, so in the end every event file looks as if its
rank had been cut off. Timestamps don't settle who was first: ranks only record a sign of life about
once a second, and clocks differ between hosts.

So `_first` looks for other evidence before it resorts to time. From the most reliable kind to the
least:

1. A rank recorded its own failure, along with the exception. If several did, the earliest record
   counts.
2. A rank reported that it lost contact with other ranks, in which case those ended first.
3. A rank's script ended normally while others were waiting in an exchange that it never entered.
4. Some ranks wrote a last record and others didn't. A rank that crashes, runs out of memory or is
   killed by a signal it can't handle doesn't write anything, so the silent ranks are the ones that
   died.
5. A rank recorded that it was terminated or interrupted, or that it reported a failure.
6. No rank wrote a last record, but some had entered fewer exchanges than the others, which must
   have been waiting for them.
7. Some ranks' last sign of life is clearly older (`_BEAT_S`) than that of the others.

If none of this applies, we say so instead of guessing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from jaxcross._endings import ExitKind
from jaxcross.report.event_files import MOST_RANKS, RankRecord

_BEAT_S = 2.0
"""Ranks record a sign of life about once a second. If the last signs of life of two ranks are
further apart than this, the earlier rank ended first.
"""

_SILENTLY = "ended first, without a word (killed, crashed, or out of memory)"


def first_to_end(records: Sequence[RankRecord]) -> str:
    """Returns a paragraph that says which rank ended first, and what each was doing at the time."""
    if (
        all(record.exit_kind == ExitKind.LEFT for record in records)
        and len(records) == records[0].size
    ):
        return "All ranks ended normally: their scripts finished."
    first, why = _first(records)
    if not first:
        return f"{why} {_waiting(records, ())}".strip()
    where = defaultdict(list)
    for record in first:
        where[record.places].append(record.rank)
    at = "; ".join(
        f"{_ranks(ranks) + ' ' if len(where) > 1 else ''}{place}" for place, ranks in where.items()
    )
    others = _waiting(records, [record.rank for record in first])
    return f"{_ranks(r.rank for r in first).capitalize()} {why}, {at}. {others}".strip()


def ranks_without_file(records: Sequence[RankRecord]) -> list[int]:
    """Returns the ranks of the run that have no event file."""
    return sorted(
        set(range(min(records[0].size, MOST_RANKS))) - {record.rank for record in records}
    )


def _first(records: Sequence[RankRecord]) -> tuple[list[RankRecord], str]:
    by_rank = {record.rank: record for record in records}
    # 1. A rank recorded its own failure. If there are several, take the earliest.
    recorded = sorted((r for r in records if r.exit_kind), key=lambda r: r.last_s)
    for record in recorded:
        if record.exit_kind == ExitKind.FAILED:
            return [record], f"ended first ({record.text})"
    unrecorded = [r for r in records if not r.exit_kind]
    # 2. A rank that loses contact with others reports which ranks it lost. If their processes
    # turned out to be gone, they died without writing anything. Otherwise they were alive but
    # unresponsive, and we quote the report.
    for record in recorded:
        if record.exit_kind == ExitKind.REPORTED and record.lost:
            lost = [by_rank[rank] for rank in record.lost if rank in by_rank]
            silent = all(not r.exit_kind for r in lost) and "is gone" in record.text
            why = _SILENTLY if silent else f"stopped first (rank {record.rank}: {record.text})"
            if lost:
                return lost, why
            return [], f"{_ranks(record.lost).capitalize()} {why}; its events cannot be read."
    # 3. Ranks count their waits for other ranks, and the n-th wait is for the same operation on all
    # of them. If a rank ended normally after fewer waits than the ranks still waiting, those are
    # stuck in an operation that it never entered.
    waiting = max(
        (r.entered for r in unrecorded if r.where is not None and r.where.number), default=0
    )
    left = [r for r in recorded if r.exit_kind == ExitKind.LEFT and r.entered < waiting]
    if len(left) == 1:
        return left, "left first (its script ended)"
    if left:
        return left, "left first (their scripts ended)"
    # 4. Only some ranks wrote a last record.
    if unrecorded and len(unrecorded) < len(records):
        return unrecorded, _SILENTLY
    # 5. All ranks did.
    for record in recorded:
        if record.exit_kind in (ExitKind.TERMINATED, ExitKind.INTERRUPTED, ExitKind.REPORTED):
            return [record], f"ended first ({record.text})"
    if not unrecorded:
        return [], "No rank says why it ended."
    # 6. No rank did, e.g. because the launcher killed them all when one died.
    behind = [r for r in unrecorded if r.entered == min(s.entered for s in unrecorded)]
    if len(behind) < len(unrecorded):
        return behind, "had not reached the operation in which the others waited"
    # 7. All ranks were in the same exchange, so all that's left to go by is time.
    early = [r for r in unrecorded if r.last_s < max(s.last_s for s in unrecorded) - _BEAT_S]
    if early:
        return early, _SILENTLY
    return [], (
        "All ranks ended without a word within two seconds, after the same number of exchanges, so "
        "their events do not say which one was first. The launcher's own message may say it. Many "
        "launchers terminate all ranks when one dies; `jaxcross launch` gives the others time to "
        "report."
    )


def _waiting(records: Sequence[RankRecord], but: Iterable[int]) -> str:
    places: defaultdict[str, list[int]] = defaultdict(list)
    for record in records:
        where = record.where
        if record.rank not in but:
            places[
                f"waited {record.place}" if where and where.number else f"ended {record.place}"
            ].append(record.rank)
    text = "; ".join(f"{_ranks(ranks)} {place}" for place, ranks in sorted(places.items()))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
