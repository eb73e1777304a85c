"""How many images per second does the input pipeline make, from 500x375 JPEG to 224x224 crops?

    python benchmarks/data.py [--json FILE] [--smoke]

The script writes synthetic records and reads them once. Then it measures three things in turn:
normalised training batches and evaluation batches, each with 1 and 2 threads, and a single decode
that is shared by two readers. Note that synthetic JPEGs are smaller than those of ImageNet (see
`jpeg_bytes`), and that photographs take longer to decode.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jaxcross.data import (
    Batches,
    SharedDecode,
    eval_batches,
    open_records,
    synthesise,
    train_batches,
)

WIDTH, HEIGHT, IMAGE_SIZE, BATCH = 500, 375, 224, 32


def rate(batches: Batches, steps: int) -> float:
    next(batches)  # starts the threads and opens the files
    start = time.perf_counter()
    for _ in range(steps):
        next(batches)
    seconds = time.perf_counter() - start
    batches.close()
    return steps * BATCH / seconds


def shared_rate(batches: Batches, steps: int) -> float:
    """Returns the images per second that two readers of one decode receive together."""
    shared = SharedDecode(batches)
    first, second = shared.reader(), shared.reader()
    next(first), next(second)
    start = time.perf_counter()
    for _ in range(steps):
        next(first), next(second)
    seconds = time.perf_counter() - start
    assert shared.redecoded == 0
    batches.close()
    return 2 * steps * BATCH / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write medians, spread and raw numbers")
    parser.add_argument(
        "--smoke", action="store_true", help="a few batches only, to see that it runs"
    )
    args = parser.parse_args()
    images, steps, repeats = (128, 2, 2) if args.smoke else (512, 16, 7)

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        synthesise(folder, images=images, width=WIDTH, height=HEIGHT)
        synth_s = time.perf_counter() - start
        records = open_records(folder)
        jpeg_bytes = statistics.mean(len(records.read(n)[0]) for n in range(images))

        def train(threads: int) -> Batches:
            return train_batches(folder, batch_size=BATCH, image_size=IMAGE_SIZE, threads=threads)

        rows: dict[str, Callable[[], float]] = {
            "train, 1 thread": lambda: rate(train(1), steps),
            "train, 2 threads": lambda: rate(train(2), steps),
            "train, 2 threads, 2 readers of one decode": lambda: shared_rate(train(2), steps),
            "evaluation, 2 threads": lambda: rate(
                eval_batches(folder, batch_size=BATCH, image_size=IMAGE_SIZE, steps=steps + 1),
                steps,
            ),
        }
        raw: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(repeats):
            for name, measure in rows.items():
                raw[name].append(measure())

    print(
        f"{images} images of {WIDTH}x{HEIGHT}, {jpeg_bytes / 1e3:.0f} kB each, written in "
        f"{synth_s:.1f} s"
    )
    for name, rates in raw.items():
        print(
            f"{name:45} {statistics.median(rates):6.0f} images/s  ({min(rates):.0f} to "
            f"{max(rates):.0f})"
        )
    if args.json:
        versions = {
            name: importlib.metadata.version(name)
            for name in (
                "grain",
                "array-record",
                "tensorflow-datasets",
                "opencv-python-headless",
                "numpy",
            )
        }
        result = {
            "question": (__doc__ or "").splitlines()[0],
            "command": sys.argv,
            "versions": {"python": platform.python_version(), **versions},
            "cores": len(os.sched_getaffinity(0)),
            "jpeg_bytes": jpeg_bytes,
            "synth_s": synth_s,
            "images_per_second": {
                name: {
                    "median": statistics.median(rates),
                    "min": min(rates),
                    "max": max(rates),
                    "raw": rates,
                }
                for name, rates in raw.items()
            },
        }
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
