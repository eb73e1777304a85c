"""Reads and writes named arrays in orbax's format. No other file uses orbax.

Orbax can coordinate the processes of a distributed JAX program, but that's not what our ranks are:
each of them is a JAX process in its own right. We let every rank use orbax as if it were alone, and
leave it to the `checkpointer` module to combine what the ranks have written into a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxcross._pytree import Form
from jaxcross.checkpoint.part import UnusableError

# The only one-byte element types supported by tensorstore, which orbax uses for storage. Arrays of
# any other type, e.g. a newer kind of float8, are stored as `uint8` with the same bytes.
_NAMED = frozenset(
    {
        "bool",
        "int8",
        "uint8",
        "int4",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    }
)


def write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays into `folder`, which mustn't exist yet, and skips empty arrays. Waits."""
    import orbax.checkpoint as ocp

    stored = {name: _stored(array) for name, array in arrays.items() if array.size}
    if stored:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(stored))


def read(folder: Path, forms: Mapping[str, Form]) -> dict[str, np.ndarray]:
    """Reads arrays, checking that they have the given types and shapes. Waits.

    Each array's type, shape and chunk size on disk are checked before we read it. Otherwise, a
    damaged or malicious file that claims to contain a huge array could make us run out of memory.

    Raises:
        UnusableError: The names, types or shapes differ.
        Exception: Any error raised by orbax or tensorstore.
    """
    empty = {
        name: np.empty(form.shape, np.dtype(form.dtype))
        for name, form in forms.items()
        if 0 in form.shape
    }
    wanted = {name: form for name, form in forms.items() if name not in empty}
    return empty | (_read(folder, wanted) if wanted else {})


def _read(folder: Path, forms: Mapping[str, Form]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        known: Any = checkpointer.metadata(folder).item_metadata
        if known is None or set(known) != set(forms):
            raise UnusableError(f"`{folder}` does not hold the arrays that its `part.json` lists")
        for name, form in forms.items():
            _check_size(folder, name, form, known[name])
        whole = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in forms}
        arrays = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=whole))
    return {name: _as_saved(folder, name, form, arrays[name]) for name, form in forms.items()}


def _check_size(folder: Path, name: str, form: Form, known: Any) -> None:
    chunk = getattr(known.storage, "chunk_shape", None) or form.shape
    sizes = (
        tuple(known.shape),
        str(known.dtype),
        len(chunk),
        all(map(int.__le__, chunk, form.shape)),
    )
    if sizes != (form.shape, _type_on_disk(form.dtype), len(form.shape), True):
        raise UnusableError(
            f"`{folder}` holds `{name}` as {known.dtype}{list(known.shape)} in chunks of {chunk}, "
            f"not {form}"
        )


def _type_on_disk(dtype: str) -> str:
    return "uint8" if np.dtype(dtype).itemsize == 1 and dtype not in _NAMED else dtype


def _stored(array: np.ndarray) -> np.ndarray:
    return array.view(_type_on_disk(array.dtype.name))


def _as_saved(folder: Path, name: str, form: Form, array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.shape != form.shape or array.dtype.name != _type_on_disk(form.dtype):
        raise UnusableError(
            f"`{folder}` holds `{name}` as {array.dtype}{list(array.shape)}, not {form}"
        )
    return array.view(np.dtype(form.dtype))
