"""One rank's description of one checkpoint, as JSON.

Each part of a checkpoint comes with a description. The file may be damaged or come from somebody
else, so we treat it as untrusted and check every field. A digest in the file reveals whether its
text has changed since it was written.
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
from jaxcross._schema import Count, record

FORMAT = 2
MAX_BYTES = 64 * 2**20  # maximum size of a part's text, enough for half a million leaves
_MAX_ELEMENTS = 2**48
_TYPE = re.compile(r"bool|u?int\d+|b?float\d+(_e\dm\d\w*)?|complex\d+")


class UnusableError(Exception):
    """A checkpoint is incomplete or has changed on disk. Fall back to an older one."""


class AbsentError(UnusableError):
    """A part is missing because it was never completed or has been deleted."""


class UnknownFormatError(Exception):
    """A checkpoint is intact, but was written by a different version of jaxcross."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLeaf:
    """A leaf of a checkpoint: its form, its digest, and whether it was identical on all ranks.

    Leaves that are identical on all ranks are only stored by rank 0.
    """

    form: Form
    digest: str
    common: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a checkpoint.

    Attributes:
        job: The job's name.
        step: How many steps the job had made.
        rank: The rank that wrote the part.
        ranks: The number of ranks in that run.
        leaves: All leaves of this rank's state, by path.
        files: The size in bytes and the digest of each array file, by its path within the part's
            folder.
        places: The positions in this rank's data; see `jaxcross.jobs.prefetch`.
        cuts: The fastest cut found for each program.
        environment: Everything else that affects the last bits of results: versions, device,
            threads.
        notes: The results of the job's evaluations, and its skipped steps; see
            `jaxcross.jobs.resumption`.
        best_step: The step of the best state so far, if best states are kept and there is one.
    """

    job: str
    step: Count
    rank: Count
    ranks: Count
    leaves: Mapping[str, SavedLeaf]
    files: Mapping[str, tuple[Count, str]]
    places: tuple[tuple[Count, str | None], ...]
    cuts: Mapping[str, Count]
    environment: Mapping[str, str]
    notes: Mapping[str, str]
    best_step: Count | None

    @property
    def forms(self) -> dict[str, Form]:
        return {path: saved.form for path, saved in self.leaves.items()}

    @property
    def rank_local(self) -> list[str]:
        """Paths of the leaves that are stored by every rank, not just by rank 0."""
        return [path for path, saved in self.leaves.items() if not saved.common]


def to_text(part: Part) -> str:
    """Returns the part as JSON, including its digest."""
    body = {"format": FORMAT, **asdict(part)}
    return json.dumps({**body, "digest": _digest(body)}, indent=1)


def parse(text: str) -> Part:
    """Parses the text of a part, as written by `to_text`.

    Raises:
        UnusableError: The text isn't a part, or is damaged.
        UnknownFormatError: The part is intact, but uses the format of a different version.
    """
    try:
        body = json.loads(text)
        claimed = body.pop("digest")
        whole = claimed == _digest(body)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise UnusableError(f"cannot be parsed ({type(error).__name__}: {error})") from None
    if not whole:
        raise UnusableError("does not match its digest, so it has changed since it was written")
    if body.pop("format", None) != FORMAT:
        raise UnknownFormatError
    try:
        return _part(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableError(f"has invalid contents ({type(error).__name__}: {error})") from None


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _part(body: dict[str, Any]) -> Part:
    _check_fields(body, Part)
    part = record(body, Part)
    if part.rank >= part.ranks:
        raise ValueError(f"rank {part.rank} of {part.ranks} ranks")
    for saved in body["leaves"].values():
        _check_fields(saved, SavedLeaf)
        _check_fields(saved["form"], Form)
    for form in part.forms.values():
        _check_form(form)
    return part


def _check_fields(data: Mapping[str, Any], kind: type[Part | SavedLeaf | Form]) -> None:
    """Checks that all fields are present, even those with a default, and that there are no more."""
    if set(data) != {field.name for field in fields(kind)}:
        raise ValueError(f"it has the fields {sorted(data)}")


def _check_form(form: Form) -> None:
    if (
        form.kind not in KINDS
        or not _TYPE.fullmatch(form.dtype)
        or not numeric(np.dtype(form.dtype))
    ):
        raise ValueError(f"a leaf of kind {form.kind!r} and type {form.dtype!r}")
    if (
        len(form.shape) > 64
        or min(form.shape, default=0) < 0
        or math.prod(size or 1 for size in form.shape) > _MAX_ELEMENTS
    ):
        raise ValueError(f"a leaf of shape {form.shape}")
