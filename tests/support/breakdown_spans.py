"""Hand-made spans of jobs that run alone or cross over, whose breakdown can be worked out by hand.

All times are in seconds.
"""

from jaxcross.interleave.instrument import Span
from jaxcross.report.summary import JobSummary

S = 1_000_000_000


def piece(kind, job, step, start, end, *, rank=0, segment=None, ready=None, lane=0, nbytes=0):
    """A span, in seconds. By default, compute is segment 0 and an exchange is segment 1."""
    if segment is None:
        segment = {"compute": 0, "collective": 1}.get(kind, -1)
    ready = start if ready is None else ready
    return Span(
        rank=rank, job=job, step=step, segment=segment, kind=kind, lane=lane, nbytes=nbytes,
        start_ns=round(start * S), end_ns=round(end * S), ready_ns=round(ready * S),
    )  # fmt: skip


def alone(job, steps, *, begin=0.0, compute=1.0, exchange=1.0, rank=0, gap=0.0, nbytes=0):
    """A job whose steps run one after the other."""
    spans, now = [], begin
    for step in range(steps):
        spans.append(piece("compute", job, step, now, now + compute, rank=rank))
        now += compute
        spans.append(piece("collective", job, step, now, now + exchange, rank=rank, nbytes=nbytes))
        now += exchange + gap
    return spans


def crossed(steps, *, rank=0, begin=0.0):
    """Two jobs with c = m = 1 s each: `a` computes while `b` exchanges."""
    return alone("a", steps, rank=rank, begin=begin) + alone("b", steps, rank=rank, begin=begin + 1)


def facts(*names, steps=5, **more):
    return [JobSummary(name=name, steps=steps, **more) for name in names]
