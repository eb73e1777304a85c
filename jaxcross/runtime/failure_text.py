"""Turns the ranks' texts about a job that can't continue into one error, identical across ranks."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcross._endings import JobStatus
from jaxcross.errors import ExchangeError, JobError, clause, first_line, shortened
from jaxcross.program import (
    branch_call_mismatch,
    signature_mismatch,
    step_mismatch,
    without_sources,
)

_LONGEST = 4000  # the maximum length of an exception's text sent to other ranks, in characters

# JAX attaches a note containing this word to many of its errors. The note explains how to show
# JAX's own frames, but says nothing about what went wrong, so we leave it out of our texts.
_NOT_OF_THE_ERROR = "JAX_TRACEBACK_FILTERING"


def describe(error: BaseException) -> str:
    """Returns an exception and its notes as a text that can be part of a sentence."""
    try:
        notes = [note for note in getattr(error, "__notes__", ()) if _NOT_OF_THE_ERROR not in note]
        text = " ".join([clause(str(error)), *(f"({clause(note)})" for note in notes)])
    except Exception as worse:
        text = f"(its message cannot be shown: {type(worse).__name__})"
    if len(text) > _LONGEST:
        text = f"{shortened(text, _LONGEST)} ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def explain(job: str, step: int, texts: Sequence[str]) -> JobError | ExchangeError:
    """Returns the error with which a job ends. Identical across ranks.

    Args:
        job: The job's name.
        step: How many steps all ranks have committed.
        texts: The ranks' texts, in rank order. Each one consists of a kind (`failed`, `ejected`,
            `step`, `end`, `batch`, `sync`, or nothing), a line break, and details.
    """
    parts = _parts(texts)
    for how, verb in ((JobStatus.FAILED, "failed"), (JobStatus.EJECTED, "was ejected")):
        responsible = [(rank, body) for rank, (kind, body) in enumerate(parts) if kind == how]
        if responsible:
            alike: dict[str, list[str]] = {}
            for rank, body in responsible:
                alike.setdefault(clause(body), []).append(str(rank))
            together = f"after step {step}: {ExchangeError.__name__}: "
            body = responsible[0][1]
            others = {kind for kind, _ in parts} - {how}
            if others <= {""} and len(alike) == 1 and body.startswith(together):
                # Between two steps, the ranks have compared their exchanges, or their replicas of a
                # state, and found a difference, in which case each rank raises an `ExchangeError`.
                # A rank whose thread was busy may not have reported that error yet, so its text is
                # empty. It's the same error nevertheless, so the job ends with an `ExchangeError`
                # on all ranks.
                why = body.removeprefix(together)
                if others:
                    why = (
                        f"{clause(why)} (found on rank "
                        f"{', '.join(str(rank) for rank, _ in responsible)}; the other ranks were "
                        "busy)"
                    )
                if not why.startswith(f"Job `{job}`"):
                    why = f"Job `{job}`, step {step + 1}: {why}"
                return ExchangeError(why)
            what = "; on ".join(
                f"rank{'s' * (len(them) > 1)} {', '.join(them)} {body}"
                for body, them in alike.items()
            )
            return JobError(
                f"Job `{job}` {verb} on {what}. Every rank leaves the job after step {step}, the "
                "last one that all of them committed; other jobs continue."
            )
    kinds = {kind for kind, _ in parts}
    heads, signatures = zip(*(body.partition("\n")[::2] for _, body in parts), strict=True)
    calls, functions = zip(
        *(head.removeprefix("called ").partition(" by ")[::2] for head in heads), strict=True
    )
    if kinds == {"step"} and len(set(functions)) > 1:
        return ExchangeError(
            f"Job `{job}`, step {step + 1}: {step_mismatch(f'job `{job}`', functions)}"
        )
    same = kinds == {"step"} or (kinds == {"sync"} and len(set(heads)) == 1)
    if same and len(set(without_sources(signatures))) > 1:
        return ExchangeError(f"Job `{job}`, step {step + 1}: {signature_mismatch(job, signatures)}")
    if kinds == {"step"}:
        return ExchangeError(f"Job {branch_call_mismatch(job, calls)}")
    lines = [clause(first_line(body)) if body else "was busy" for _, body in parts]
    by_rank = "; ".join(f"rank {rank} {line}" for rank, line in enumerate(lines))
    shapes = (
        " Or did shapes or types of a step's arguments change on some ranks only, as in a shorter "
        'last batch? Those ranks then have to agree on the exchanges or, with `cut="auto"`, on the '
        "cut again. Change shapes and types on all ranks in the same step."
    )
    return JobError(
        f"Job `{job}` does different things on different ranks after step {step}: {by_rank}. All "
        "ranks must run the same loop: the same number of steps, and the same calls in the same "
        "order. Let `job.batches(...)` end the loop, and decide from values that are equal on all "
        f"ranks.{shapes if {'step', 'sync'} <= kinds else ''}"
    )


def printing_ranks(texts: Sequence[str]) -> list[int]:
    """Returns the ranks that should print why a job has ended.

    Each reason should be printed only once, so if several ranks failed for the same reason, only
    the first of them prints it. If the job was ejected without a failure, the first rank that
    ejected it prints the reason. Otherwise that's left to rank 0.

    Args:
        texts: As for `explain`.
    """
    firsts = [
        (rank, kind)
        for rank, (kind, _) in enumerate(_parts(texts))
        if texts.index(texts[rank]) == rank
    ]
    failed = [rank for rank, kind in firsts if kind == JobStatus.FAILED]
    if failed:
        return failed
    # A single rank is enough, because the error names all ranks that ejected the job.
    return [rank for rank, kind in firsts if kind == JobStatus.EJECTED][:1] or [0]


def _parts(texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(kind, body) for kind, _, body in (text.partition("\n") for text in texts)]
