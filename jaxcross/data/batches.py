"""Turns records into batches: shuffles them with a seed, then picks and decodes this rank's shard.

The reading and decoding happens in Grain's threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import grain
import numpy as np

from jaxcross.data.augment import decode, eval_crop, train_crop
from jaxcross.data.cache.cache import Cache
from jaxcross.data.cache.feed import Arrival, Feed
from jaxcross.data.records import REMEDY, Records, open_records
from jaxcross.errors import clause

Batch = dict[str, np.ndarray]


class StreamPosition(NamedTuple):
    """An entry in a rank's stream: which record to read, and in which pass over the data."""

    record: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStream:
    """The full recipe for one rank's batches.

    Nothing else affects them: not the number of threads, and not what other processes are doing.

    Attributes:
        steps: Total number of batches; `None` for an endless stream.
    """

    records: Records
    batch_size: int
    image_size: int
    rank: int
    size: int
    seed: int
    train: bool
    steps: int | None

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches per rank and pass. The remainder is skipped on all ranks."""
        return len(self.records) // (self.batch_size * self.size)

    @property
    def order(self) -> grain.MapDataset:
        """The record number at each position of this rank's endless stream.

        For training, each pass is shuffled differently.
        """
        order = grain.MapDataset.range(len(self.records))
        if self.train:
            order = order.shuffle(seed=self.seed % 2**32)
        # Use the rank and size from our own `world`, not JAX's: under mpirun, JAX believes it's
        # process 0 of 1 on every rank, so all ranks would end up reading the same records.
        return order[self.rank :: self.size][: self.steps_per_epoch * self.batch_size].repeat()

    def example(self, position: StreamPosition, arrival: Arrival | None = None) -> Batch:
        """Reads, decodes and augments a record.

        The augmentation is seeded by the stream's seed, the pass and the record, so it's
        reproducible. When there's a cache, pass the record it has already read as `arrival`.
        """
        try:
            image, label = self._image(position.record, arrival)
        except ValueError as error:
            where = (
                f"record {position.record} of split `{self.records.split}` in "
                f"`{self.records.folder}`"
            )
            raise ValueError(f"{clause(str(error))}. This occurred at {where}.") from error
        if self.train:
            rng = np.random.default_rng((self.seed % 2**32, position.epoch, position.record))
            image = train_crop(image, self.image_size, rng)
        else:
            image = eval_crop(image, self.image_size)
        return {"image": image, "label": np.asarray(label, np.int32)}

    def _image(self, record: int, arrival: Arrival | None) -> tuple[np.ndarray, int]:
        if arrival is None or self.records.cached is None:
            jpeg, label = self.records.read(record)
            return decode(jpeg), label
        return self.records.cached.image(record, arrival.raw, _decoded)

    @property
    def _stop(self) -> int:
        """The position after the last record."""
        return sys.maxsize // 2 if self.steps is None else self.steps * self.batch_size

    def feed(self, step: int) -> Feed | None:
        """Starts reading ahead from batch `step` onwards. Returns None without a cache."""
        if self.records.cached is None:
            return None
        order = self.order
        return self.records.cached.feed(
            lambda position: int(cast(int, order[position])),
            length=self.steps_per_epoch * self.batch_size,
            start=step * self.batch_size,
            stop=self._stop,
        )

    def open(self, step: int, threads: int, feed: Feed | None = None) -> grain.DatasetIterator:
        """Starts Grain's threads at batch `step`, and returns an iterator over the batches."""
        order = self.order
        per_epoch = self.steps_per_epoch * self.batch_size
        positions = grain.MapDataset.range(step * self.batch_size, self._stop)

        def load(position: int) -> Batch:
            epoch = position // per_epoch
            if feed is None:
                return self.example(
                    StreamPosition(record=int(cast(int, order[position])), epoch=epoch)
                )
            # The arrival already carries the record's number, which saves us a 0.1 ms lookup in
            # Grain's order.
            arrival = feed.take(position)
            return self.example(StreamPosition(record=arrival.record, epoch=epoch), arrival)

        examples = positions.map(load)
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(2 * threads, 2 * self.batch_size)
        )
        return iter(examples.to_iter_dataset(options).batch(self.batch_size, drop_remainder=True))


def _decoded(example: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    return decode(example["image"]), int(example["label"])


class Batches(Iterator[Batch]):
    """A resumable iterator over one rank's batches, as NumPy arrays.

    Batches have the form `{"image": float32 [batch, size, size, 3], "label": int32 [batch]}`.
    Calling `next` waits for the batch to be decoded, but never communicates. All ranks get the same
    number of batches.

    The iterator's position is the number of batches taken so far. To resume, pass this number as
    `start_step`, or save the result of `get_state` and restore it with `set_state`. Not
    thread-safe.

    Attributes:
        steps: Total number of batches, counted from step 0; `None` for an endless stream.
        steps_per_epoch: Number of batches in one pass over the data set.
        num_classes: Number of distinct values of `label`.
        step: Number of batches taken so far, counted from step 0 (rather than from `start_step`).
    """

    def __init__(self, stream: BatchStream, *, threads: int, start_step: int = 0) -> None:
        self._stream = stream
        self._threads = threads
        self._iterator: grain.DatasetIterator | None = None
        self._feed: Feed | None = None
        self.step = start_step

    @property
    def steps(self) -> int | None:
        return self._stream.steps

    @property
    def steps_per_epoch(self) -> int:
        return self._stream.steps_per_epoch

    @property
    def num_classes(self) -> int:
        return self._stream.records.num_classes

    def at(self, step: int) -> Batches:
        """Returns a new iterator over the same batches, starting at batch `step`.

        Nothing is read until you ask it for a batch.
        """
        return Batches(self._stream, threads=self._threads, start_step=step)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self.steps is not None and self.step >= self.steps:
            self.close()
            raise StopIteration
        if self._iterator is None:
            self._feed = self._stream.feed(self.step)
            self._iterator = self._stream.open(self.step, self._threads, self._feed)
        try:
            batch = next(self._iterator)
        except Exception:
            # If we kept using Grain's iterator, it would carry on after the unreadable record and
            # silently leave that record out. Close it instead: the next call then opens a new
            # iterator at the same position and raises the same error again.
            self.close()
            raise
        self.step += 1
        return batch

    def waited_s(self) -> dict[str, float]:
        """Returns how many seconds the reading threads have spent waiting for each cache level.

        Empty without a cache.
        """
        feed = self._feed
        return {} if feed is None else feed.waited_s()

    def close(self) -> None:
        """Stops the reading threads. Calling `next` again restarts them at the current step."""
        iterator = self._iterator
        self._iterator = None
        feed = self._feed
        self._feed = None
        if feed is not None:
            feed.close()
        if iterator is not None:
            iterator.close()

    def get_state(self) -> dict[str, Any]:
        """Returns the position and the settings it's valid for, as a JSON-compatible dict.

        To resume, pass it to `set_state`.
        """
        stream = self._stream
        names = ("batch_size", "image_size", "rank", "size", "seed", "train")
        state: dict[str, Any] = {name: getattr(stream, name) for name in names}
        return state | {
            "split": stream.records.split,
            "records": len(stream.records),
            "step": self.step,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the position in `state`.

        From here on, you get the same batches as after the corresponding call to `get_state`.

        Raises:
            ValueError: The state was saved from a different stream, where the same position would
                mean different images; or its `step` isn't a number of batches.
        """
        own = self.get_state()
        differ = [name for name in own if name != "step" and own[name] != state.get(name)]
        if differ:
            what = ", ".join(
                f"`{name}` {state.get(name)!r} (here {own[name]!r})" for name in differ
            )
            raise ValueError(
                f"This data state belongs to another stream: it has {what}. Open the stream with "
                "the values of the state, or don't restore it."
            )
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise ValueError(
                "`step` of a data state must be a whole number of batches, 0 or more, got "
                f"{step!r:.60}. Pass a state that `get_state` returned."
            )
        self.close()
        self.step = step


def _batches(stream: BatchStream, *, epochs: int | None, threads: int, start_step: int) -> Batches:
    positive = {
        "batch_size": stream.batch_size,
        "image_size": stream.image_size,
        "threads": threads,
    }
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, not {value}.")
    if not 0 <= stream.rank < stream.size:
        raise ValueError(
            f"`rank` must be from 0 to {stream.size - 1}, since `size` is {stream.size}, got "
            f"{stream.rank}."
        )
    if epochs is not None and stream.steps is not None:
        raise ValueError(f"Give `steps` ({stream.steps}) or `epochs` ({epochs}), not both.")
    if stream.steps_per_epoch == 0:
        raise ValueError(
            f"Split `{stream.records.split}` in `{stream.records.folder}` has "
            f"{len(stream.records)} records, fewer than one batch of {stream.batch_size} on each "
            f"of {stream.size} ranks. Use a smaller `batch_size`, or more records. {REMEDY}"
        )
    if epochs is not None:
        stream = replace(stream, steps=epochs * stream.steps_per_epoch)
    return Batches(stream, threads=threads, start_step=start_step)


def train_batches(
    data_dir: str | Path,
    *,
    batch_size: int,
    image_size: int = 224,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    steps: int | None = None,
    epochs: int | None = None,
    start_step: int = 0,
    threads: int = 2,
    split: str = "train",
    cache: Cache | None = None,
) -> Batches:
    """Opens one rank's training stream, reshuffled on every pass and randomly cropped and flipped.

    This only reads metadata and doesn't communicate. The seed, batch size, rank and number of ranks
    determine which images a rank gets at each step. How an image is cropped and flipped depends
    only on the seed and the pass, so you get the same augmented images on any number of ranks.

    Args:
        data_dir: TFDS's root folder, the data set's folder inside it, or the versioned folder. With
            a cache, the URL of a versioned folder works too.
        batch_size: Number of images per rank and step.
        image_size: Height and width in pixels.
        rank: `world.rank`.
        size: `world.size`.
        seed: Seed for shuffling and augmentation. Must be the same on all ranks.
        steps: Stop after this many batches. Without `steps` or `epochs`, the stream is endless.
        epochs: Stop after this many passes.
        start_step: Batch to resume from. `steps` and `epochs` are still counted from batch 0.
        threads: Number of reading threads.
        split: Name of the split.
        cache: Cache to read the records through. It doesn't affect the contents of the batches.

    Raises:
        FileNotFoundError: `data_dir` doesn't exist.
        ValueError: `data_dir` isn't a TFDS data set in ArrayRecord format with this split, or it
            has less than one batch per rank.
    """
    stream = BatchStream(
        records=open_records(data_dir, split, cache=cache),
        batch_size=batch_size,
        image_size=image_size,
        rank=rank,
        size=size,
        seed=seed,
        train=True,
        steps=steps,
    )
    return _batches(stream, epochs=epochs, threads=threads, start_step=start_step)


def eval_batches(
    data_dir: str | Path,
    *,
    batch_size: int,
    image_size: int = 224,
    rank: int = 0,
    size: int = 1,
    steps: int | None = None,
    threads: int = 2,
    split: str = "validation",
    cache: Cache | None = None,
) -> Batches:
    """Opens one rank's evaluation stream: records in stored order, each cropped at the centre.

    The stream ends after one pass over the split, or after `steps` batches. The other arguments
    work as in `train_batches`. Every rank has to get the same number of full batches, so a few
    records at the end of the split may be left out. If you can't afford to lose any, choose a
    `batch_size` such that the number of records is a multiple of `batch_size * size`.

    Raises:
        FileNotFoundError: `data_dir` doesn't exist.
        ValueError: `data_dir` isn't a TFDS data set in ArrayRecord format with this split, or it
            has less than one batch per rank.
    """
    stream = BatchStream(
        records=open_records(data_dir, split, cache=cache),
        batch_size=batch_size,
        image_size=image_size,
        rank=rank,
        size=size,
        seed=0,
        train=False,
        steps=steps,
    )
    return _batches(stream, epochs=1 if steps is None else None, threads=threads, start_step=0)
