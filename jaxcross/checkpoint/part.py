"""One rank's description of one checkpoint, as JSON.

It's parsed as untrusted data: every field is checked before we use it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from jaxcross._pytree import KINDS, Form, numeric

FORMAT = 2
MAX_BYTES = 64 * 2**20  # maximum size of a part's text, enough for half a million leaves
_MAX_ELEMENTS = 2**48
_TYPE = re.compile(r"bool|u?int\d+|b?float\d+(_e\dm\d\w*)?|complex\d+")


class UnusableError(Exception):
    """A checkpoint is incomplete or not as it was written, so the previous one should be used."""


class AbsentError(UnusableError):
    """A part is missing: either it was never written completely, or it was deleted."""


class UnknownFormatError(Exception):
    """A checkpoint is intact, but was written by another version of jaxcross."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLeaf:
    """A leaf of a checkpoint: its form, its digest, and whether it was identical on all ranks.

    Leaves that are identical on all ranks are stored only by rank 0.
    """

    form: Form
    digest: str
    common: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a checkpoint.

    Attributes:
        job: The job's name.
        step: The number of steps the job had made.
        rank: The rank that wrote the part.
        ranks: Number of ranks in that run.
        leaves: All leaves of this rank's state, by path.
        files: Size in bytes and digest of each file that holds arrays, by path in the part's
            folder.
        places: Positions in this rank's data; see `jaxcross.jobs.prefetch`.
        cuts: The cut that was found to be fastest, by program.
        environment: Everything else that affects the last bits of results: versions, device,
            threads.
        notes: Results of the job's evaluations, and its skipped steps; see
            `jaxcross.jobs.resumption`.
        best_step: The step of the best state so far, if best states are kept and there is one.
    """

    job: str
    step: int
    rank: int
    ranks: int
    leaves: Mapping[str, SavedLeaf]
    files: Mapping[str, tuple[int, str]]
    places: tuple[tuple[int, str | None], ...]
    cuts: Mapping[str, int]
    environment: Mapping[str, str]
    notes: Mapping[str, str]
    best_step: int | None

    @property
    def forms(self) -> dict[str, Form]:
        return {path: saved.form for path, saved in self.leaves.items()}

    @property
    def rank_local(self) -> list[str]:
        """Paths of the leaves that were stored by each rank rather than by rank 0 for all."""
        return [path for path, saved in self.leaves.items() if not saved.common]


def to_text(part: Part) -> str:
    """Returns the part as JSON, including its digest."""
    body = {"format": FORMAT, **asdict(part)}
    return json.dumps({**body, "digest": _digest(body)}, indent=1)


def parse(text: str) -> Part:
    """Parses a part that `to_text` wrote.

    Raises:
        UnusableError: The text isn't such a part, or is damaged.
        UnknownFormatError: The part is intact, but has another version.
    """
    try:
        body = json.loads(text)
        claimed = body.pop("digest")
        whole = claimed == _digest(body)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise UnusableError(f"cannot be parsed ({type(error).__name__}: {error})") from None
    if not whole:
        raise UnusableError("does not have the digest that it had when it was written")
    if body.pop("format", None) != FORMAT:
        raise UnknownFormatError
    try:
        return _part(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableError(f"makes no sense ({type(error).__name__}: {error})") from None


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _part(body: dict[str, Any]) -> Part:
    if set(body) != {field.name for field in fields(Part)}:
        raise ValueError(f"it has the fields {sorted(body)}")
    step, rank, ranks = (_count(body[name]) for name in ("step", "rank", "ranks"))
    if rank >= ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    return Part(
        job=_text(body["job"]),
        step=step,
        rank=rank,
        ranks=ranks,
        leaves={_text(path): _saved(**saved) for path, saved in body["leaves"].items()},
        files={
            _text(path): (_count(size), _text(digest))
            for path, (size, digest) in body["files"].items()
        },
        places=tuple(
            (_count(taken), None if state is None else _text(state))
            for taken, state in body["places"]
        ),
        cuts={_text(key): _count(pieces) for key, pieces in body["cuts"].items()},
        environment={_text(key): _text(value) for key, value in body["environment"].items()},
        notes={_text(key): _text(value) for key, value in body["notes"].items()},
        best_step=None if body["best_step"] is None else _count(body["best_step"]),
    )


def _saved(*, form: dict[str, Any], digest: object, common: object) -> SavedLeaf:
    return SavedLeaf(form=_form(**form), digest=_text(digest), common=_flag(common))


def _form(*, kind: str, dtype: str, shape: list[object], weak: object, impl: object) -> Form:
    if kind not in KINDS or not _TYPE.fullmatch(dtype) or not numeric(np.dtype(dtype)):
        raise ValueError(f"a leaf of kind {kind!r} and type {dtype!r}")
    sizes = tuple(_count(size) for size in shape)
    if len(sizes) > 64 or math.prod(size or 1 for size in sizes) > _MAX_ELEMENTS:
        raise ValueError(f"a leaf of shape {sizes}")
    return Form(kind=kind, dtype=dtype, shape=sizes, weak=_flag(weak), impl=_text(impl))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not a text")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value
