"""Runs one way of benchmarks/data_cache.py in a separate process.

The script prints a line after each pass over the data, and another one at the end.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from jaxcross.data import Batches, Cache, open_records, train_batches
from jaxcross.data.batches import BatchStream, StreamPosition
from jaxcross.data.cache import simulate
from jaxcross.data.cache.next_use import PAGE_BYTES
from jaxcross.data.cache.origin import RemoteOrigin

STEP_SIZE = 512  # size of a matrix product that stands in for a training step


def page_share(sizes: np.ndarray, share: float) -> tuple[int, int]:
    """Returns a budget for `share` of the records, and how much of it their pages may use."""
    budget = max(
        1 << 16, int(share * int((-(-sizes // PAGE_BYTES)).sum()) * (PAGE_BYTES + 8)) + 4096
    )
    return budget, (budget - 64) // (PAGE_BYTES + 8) * PAGE_BYTES


class Dictionary:
    """A rival: keeps every record that it has read in a dictionary."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, record: int) -> Any:
        if record not in self._kept:
            self._kept[record] = self._source[record]
        return self._kept[record]


def sizes_of(folder: str) -> np.ndarray:
    """Returns the bytes of each record. Reads the local folder, before anything is timed."""
    with Cache(Path(folder).parents[2] / "sizes") as cache:
        records = open_records(folder, cache=cache)
        return np.array([len(records.cached.read(n)[0]) for n in range(len(records))])


def torch_batches(stream: BatchStream, batch: int) -> Iterator[Any]:
    """A rival: PyTorch's loader over a data set with a dictionary.

    There are no worker processes, because each would have a separate dictionary.
    """
    import torch.utils.data

    class Examples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return stream.steps * batch

        def __getitem__(self, position: int) -> Any:
            epoch = position // (stream.steps_per_epoch * batch)
            return stream.example(StreamPosition(record=int(stream.order[position]), epoch=epoch))

    return iter(
        torch.utils.data.DataLoader(Examples(), batch_size=batch, shuffle=False, num_workers=0)
    )


def streams(
    request: dict[str, Any], stack: ExitStack, sizes: np.ndarray
) -> tuple[list[Any], Cache | None]:
    work = Path(request["work"])
    work.mkdir(exist_ok=True)
    options = {
        "batch_size": request["batch"],
        "image_size": request["image_size"],
        "epochs": request["epochs"],
        "threads": 2,
    }
    seed = 100 * request["seed"]
    if request["way"] == "local":
        return [train_batches(request["folder"], seed=seed, **options)], None
    if request["way"] == "copy":
        # fsspec can't list a folder on a server without index pages, so we take the names from the
        # data set.
        fs = fsspec.filesystem("http")
        for path in sorted(Path(request["folder"]).iterdir()):
            fs.get_file(f"{request['url']}/{path.name}", str(work / path.name))
        return [train_batches(work, seed=seed, **options)], None
    if request["way"] == "cache":
        ahead = 64
        disk, _ = page_share(sizes, request["share"])
        memory, _ = page_share(sizes, request["share"] / 4)
        images = int(
            request.get("images_share", 0) * len(sizes) * (4104 * (500 * 375 * 3 // PAGE_BYTES + 2))
        )
        cache = stack.enter_context(
            Cache(
                work / "cache",
                disk_bytes=disk,
                memory_bytes=memory,
                images_bytes=images,
                ahead_records=ahead,
            )
        )
        return [
            train_batches(request["url"], seed=seed + job, cache=cache, **options)
            for job in range(request["jobs"])
        ], cache
    cache = stack.enter_context(Cache(work / "cache"))
    batches = train_batches(request["url"], seed=seed, cache=cache, **options)
    records = batches._stream.records
    if request["way"] == "fsspec":
        origin = records.cached._origin
        assert isinstance(origin, RemoteOrigin)
        place = {"cache_storage": str(work / "fsspec"), "target_protocol": "http"}
        origin._fs = fsspec.filesystem(request["protocol"], **place)
    source: Any = records.source
    if request["way"] in ("dictionary", "torch"):
        source = Dictionary(source)
    plain = replace(batches._stream, records=replace(records, source=source, cached=None))
    if request["way"] == "torch":
        return [torch_batches(plain, request["batch"])], None
    # With two threads, fsspec's block cache returns zeros for new blocks, and its file cache
    # occasionally fails.
    return [Batches(plain, threads=1 if request["way"] == "fsspec" else 2)], None


def predicted_bytes(request: dict[str, Any], taken: list[Batches], sizes: np.ndarray) -> int:
    length = taken[0].steps_per_epoch * request["batch"]
    budgets = [page_share(sizes, request["share"] / 4)[1], page_share(sizes, request["share"])[1]]

    def order_of(batches: Batches) -> Any:
        order = batches._stream.order
        return lambda epoch: np.array(
            [int(order[p]) for p in range(epoch * length, (epoch + 1) * length)]
        )

    origin = taken[0]._stream.records.cached._origin
    sent = np.array([origin.read_bytes(record) for record in range(len(sizes))])
    tallies = simulate(
        [order_of(each) for each in taken],
        sizes,
        budgets,
        length=length,
        epochs=request["epochs"],
        group=32,
        read_bytes=sent,
    )
    return sum(tally.origin_bytes for tally in tallies)


class Sampler:
    """Samples what each level has served, ten times per second.

    Also records the longest time during which this process didn't run.

    Attributes:
        samples: Seconds since the start, and bytes by level.
        gap_s: The longest time between two samples, minus a tenth of a second.
    """

    def __init__(self, cache: Cache | None) -> None:
        self.samples: list[dict[str, float]] = []
        self.gap_s = 0.0
        self._cache = cache
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = last = time.perf_counter()
        while not self._done.wait(0.1):
            now = time.perf_counter()
            self.gap_s, last = max(self.gap_s, now - last - 0.1), now
            levels = self._cache.statistics().items() if self._cache else ()
            self.samples.append(
                {"s": round(now - began, 2), **{name: level.nbytes for name, level in levels}}
            )

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["way"] == "torch" and importlib.util.find_spec("torch") is None:
        print(json.dumps({"missing": "PyTorch is not installed"}), flush=True)
        return
    sizes = sizes_of(request["folder"])
    steps = len(sizes) // request["batch"]
    matrix = np.ones((STEP_SIZE, STEP_SIZE), np.float32)
    with ExitStack() as stack:
        began = time.perf_counter()
        taken, cache = streams(request, stack, sizes)
        sampler = Sampler(cache)
        first_batch_s = 0.0
        for number in range(request["epochs"]):
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                for batches in taken:  # in turn, like jobs in crossover
                    next(batches)
                    first_batch_s = first_batch_s or time.perf_counter() - began
                    matrix = np.clip(matrix @ matrix, 0, 1)
            now = time.perf_counter()
            cpu_s = (
                time.process_time() - cpu_start
            )  # other work on the machine disturbs it less than wall time
            found = {"pass": number, "seconds": now - start, "cpu_s": cpu_s, "ended_s": now - began}
            print(
                json.dumps({**found, "images": steps * request["batch"] * len(taken)}), flush=True
            )
            sys.stdin.readline()
        for batches in taken:
            if isinstance(batches, Batches):
                batches.close()
        sampler.stop()
        levels = (
            {name: level.records for name, level in cache.statistics().items()} if cache else {}
        )
        predicted = (
            predicted_bytes(request, taken, sizes)
            if cache and request.get("predict", True)
            else None
        )
    print(
        json.dumps(
            {
                "first_batch_s": first_batch_s,
                "levels": levels,
                "predicted_bytes": predicted,
                "samples": sampler.samples[:: max(1, len(sampler.samples) // 80)]
                if request["samples"]
                else [],
                "gap_s": sampler.gap_s,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
