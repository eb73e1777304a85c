"""For which target does XLA compile on this accelerator?

    python benchmarks/gpu_target.py [--json FILE] [--stand-in] FOLDER

Writes XLA's description of the card to `FOLDER/<device kind>.txtpb`. A machine that has JAX's CUDA
plugin but no GPU can then compile for exactly this card:

    jax.experimental.topologies.get_topology_desc(platform="cuda", topology="1x1x1",
        target_config=TEXT)

After writing the file, the script makes this call itself. XLA can only describe GPUs. On any other
device, the script writes no description, and the result gives the reason. This is an error unless
you pass `--stand-in`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
from gpu_ranks import accelerator, prepare
from jax.experimental import topologies
from jaxlib import xla_client
from race_file import write_whole
from workloads import parser, write_json


def target_config(devices: list[Any]) -> str | None:
    """Returns XLA's target configuration of these devices as text, or None if there is none."""
    return getattr(xla_client.get_topology_for_devices(devices), "target_config", None)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, metavar="FOLDER", help="where the text goes")
    options.add_argument(
        "--stand-in", action="store_true", help="a second CPU device stands for the accelerator"
    )
    args = options.parse_args()
    prepare(args.stand_in)
    kind = accelerator(args.stand_in).device_kind
    text = target_config(jax.devices())
    if text is None:
        reason = f"XLA has no target configuration for the device kind `{kind}`: only GPUs have one"
        print(reason, flush=True)
        write_json(args.json, __doc__, {"device_kind": kind, "file": None, "reason": reason})
        raise SystemExit(0 if args.stand_in else 1)
    name = re.sub(
        r"\W+", "_", kind
    ).lower()  # a borrowed machine may not return files with spaces in their names
    path = args.folder / f"{name}.txtpb"
    write_whole(path, text)
    print(f"wrote {path}, {len(text)} characters", flush=True)
    write_json(args.json, __doc__, {"device_kind": kind, "file": path.name})
    described = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=text)
    print(f"compiles without a device for: {described.devices[0].device_kind}", flush=True)


if __name__ == "__main__":
    main()
