"""Records to batches: a seeded order, this rank's share of it, decoded on a few threads by
Grain.
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

Batch = dict[str, np.ndarray]


class StreamPosition(NamedTuple):
    """Record at one position of a rank's stream, and the pass over the data set."""

    record: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Everything that a rank's stream of batches depends on: not threads, time or other processes.

    Attributes:
        steps: Batches in all; `None` for no end.
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
        """Full batches that every rank gets from one pass; the rest of a pass is left out on all
        ranks alike.
        """
        return len(self.records) // (self.batch_size * self.size)

    @property
    def order(self) -> grain.MapDataset:
        """Record number at each position of this rank's endless stream, another permutation each
        pass.
        """
        order = grain.MapDataset.range(len(self.records))
        if self.train:
            order = order.shuffle(seed=self.seed % 2**32)
        # Rank and size are the world's own: under mpirun JAX reports process 0 of 1 on every rank.
        return order[self.rank :: self.size][: self.steps_per_epoch * self.batch_size].repeat()

    def example(self, position: StreamPosition, arrival: Arrival | None = None) -> Batch:
        """Reads, decodes and augments one record. The random numbers depend on seed, pass and
        record alone.

        With a cache, `arrival` is what was read ahead.
        """
        try:
            image, label = self._image(position.record, arrival)
        except ValueError as error:
            where = (
                f"record {position.record} of split `{self.records.split}` in "
                f"`{self.records.folder}`"
            )
            raise ValueError(f"{error} It is {where}.") from error
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
        """Position after the last record."""
        return sys.maxsize // 2 if self.steps is None else self.steps * self.batch_size

    def feed(self, step: int) -> Feed | None:
        """Starts reading ahead of batch `step` where there is a cache."""
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
        """Starts Grain's threads at batch `step`."""
        order = self.order
        per_epoch = self.steps_per_epoch * self.batch_size
        positions = grain.MapDataset.range(step * self.batch_size, self._stop)

        def load(position: int) -> Batch:
            epoch = position // per_epoch
            if feed is None:
                return self.example(
                    StreamPosition(record=int(cast(int, order[position])), epoch=epoch)
                )
            arrival = feed.take(
                position
            )  # with its record: Grain would take 0.1 ms for the position
            return self.example(StreamPosition(record=arrival.record, epoch=epoch), arrival)

        examples = positions.map(load)
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(2 * threads, 2 * self.batch_size)
        )
        return iter(examples.to_iter_dataset(options).batch(self.batch_size, drop_remainder=True))


def _decoded(example: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    return decode(example["image"]), int(example["label"])


class Batches(Iterator[Batch]):
    """A rank's batches: `{"image": float32 [batch, size, size, 3], "label": int32 [batch]}`, NumPy,
    resumable.

    `next` waits until the batch is decoded; it never communicates. All ranks have the same number
    of steps. The position is the number of batches taken: pass it as `start_step`, or use
    `get_state` and `set_state`. One thread may use it at a time.

    Attributes:
        steps: Batches in all, counted from step 0; `None` for no end.
        steps_per_epoch: Batches in one pass over the data set.
        num_classes: How many values `label` can take.
        step: Batches taken so far, counted from step 0 (not from `start_step`).
    """

    def __init__(self, stream: Stream, *, threads: int, start_step: int = 0) -> None:
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
        """Another iterator over the same batches, standing before batch `step`; reads nothing
        yet.
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
            # Grain would go on after the unreadable record: the next call must get the same error
            self.close()
            raise
        self.step += 1
        return batch

    def waited_s(self) -> dict[str, float]:
        """Returns the seconds for which reading threads have waited for a cache, by its level; none
        without a cache.
        """
        feed = self._feed
        return {} if feed is None else feed.waited_s()

    def close(self) -> None:
        """Ends the reading threads; the iterator can go on from where it stands."""
        iterator = self._iterator
        self._iterator = None
        feed = self._feed
        self._feed = None
        if feed is not None:
            feed.close()
        if iterator is not None:
            iterator.close()

    def get_state(self) -> dict[str, Any]:
        """The position and what it is valid for, as JSON-able values."""
        stream = self._stream
        names = ("batch_size", "image_size", "rank", "size", "seed", "train")
        state: dict[str, Any] = {name: getattr(stream, name) for name in names}
        return state | {
            "split": stream.records.split,
            "records": len(stream.records),
            "step": self.step,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of `state`; the batches from there on are those of the iterator that
        it came from.

        Raises:
            ValueError: The state is of another stream, so that its position would mean other
                images.
        """
        own = self.get_state()
        differ = [name for name in own if name != "step" and own[name] != state.get(name)]
        if differ:
            what = ", ".join(
                f"`{name}` {state.get(name)!r} (here {own[name]!r})" for name in differ
            )
            raise ValueError(
                f"This data state belongs to another stream: it has {what}. Open it with those "
                "values."
            )
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise ValueError(
                f"This data state has `step` {step!r}, which is not a number of batches."
            )
        self.close()
        self.step = step


def _batches(stream: Stream, *, epochs: int | None, threads: int, start_step: int) -> Batches:
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
            f"`rank` {stream.rank} is not one of {stream.size} ranks, 0 to {stream.size - 1}."
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
    """Opens the training stream of one rank: shuffled each pass, randomly cropped and flipped.

    Opening reads metadata only; it does not communicate. The images of a step depend on `seed`,
    `batch_size`, `size` and `rank`; the augmentation of a record depends on `seed` and the pass
    alone, so it is the same on any number of ranks.

    Args:
        data_dir: TFDS's root folder, the data set's folder in it, or the version's; with a cache
            also a URL of it.
        batch_size: Images a rank and step.
        image_size: Height and width in pixels.
        rank: `world.rank`.
        size: `world.size`.
        seed: Of order and augmentation; give all ranks the same.
        steps: End after that many batches; with neither `steps` nor `epochs`, never.
        epochs: End after that many passes.
        start_step: Begin before this batch, to resume; `steps` and `epochs` still count from 0.
        threads: Reading threads.
        split: Which split.
        cache: Levels of memory and disk through which records are read; the batches are the same
            without it.

    Raises:
        FileNotFoundError: `data_dir` does not exist.
        ValueError: It is not a TFDS data set in ArrayRecord format with this split, or has less
            than one batch a rank.
    """
    stream = Stream(
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
    """Opens the evaluation stream of one rank: stored order, central crop, one pass (or `steps`
    batches).

    The arguments are those of `train_batches`. Records beyond the last batch that every rank can
    fill are left out: choose `batch_size * size` to divide the split where each record must count.

    Raises:
        FileNotFoundError: `data_dir` does not exist.
        ValueError: It is not a TFDS data set in ArrayRecord format with this split, or has less
            than one batch a rank.
    """
    stream = Stream(
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
