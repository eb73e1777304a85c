"""Spans of hand-written runs, in seconds."""

from jaxcross.interleave.instrument import Span

S = 1_000_000_000


def span(kind, job, step, start, end, *, rank=0, segment=None, lane=0, label=""):
    if segment is None:
        segment = {"compute": 0, "collective": 1}.get(kind, -1)
    return Span(
        rank=rank,
        job=job,
        step=step,
        segment=segment,
        kind=kind,
        lane=lane,
        start_ns=round(start * S),
        end_ns=round(end * S),
        ready_ns=round(start * S),
        nbytes=8 if kind == "collective" else 0,
        label=label,
    )
