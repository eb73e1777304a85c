"""Reads the offline runs of W&B, whose format is LevelDB's log format with protobuf messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768


def records(path: Path) -> Iterator[Any]:
    """Yields the records of a `.wandb` file, except for one that a kill has left incomplete."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    at, message = 7, b""  # after the file's header
    while at + 7 <= len(content):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        message += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(message)
            message = b""


def runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns each job's runs in a `wandb` folder that `wandb sync` finds, oldest first.

    A run has `id`, `group`, `config`, `exit`, `summary` and `rows`, each row a dict.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("offline-run-*/*.wandb")):  # not `latest-run`, which is a link
        run: dict[str, Any] = {"rows": [], "summary": {}, "exit": None}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                config = {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
                config.pop("_wandb")
                run |= {"id": record.run.run_id, "group": record.run.run_group, "config": config}
                found.setdefault(record.run.display_name, []).append(run)
            elif kind == "history":
                run["rows"].append(_values(record.history.item))
            elif kind == "summary":
                run["summary"] |= _values(record.summary.update)
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
    return found


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in items}
