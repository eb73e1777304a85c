"""Decodes once for several readers, whatever the order of their calls."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.data import Batches, SharedDecode, synthesise, train_batches
from jaxcross.data.batches import BatchStream
from jaxcross.jobs import prefetch

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    synthesise(root, images=8, classes=2, width=24, height=24)
    return root


class Numbers(Batches):
    """Like `Batches`, except that batch n holds n: opened, read and closed without files."""

    def __init__(self, steps: int, step: int = 0) -> None:
        self._steps, self.step = steps, step

    @property
    def steps(self) -> int:
        return self._steps

    def at(self, step: int) -> "Numbers":
        return type(self)(self.steps, step)

    def __next__(self) -> dict:
        if self.step >= self.steps:
            raise StopIteration
        self.step += 1
        return {"image": np.array([self.step - 1])}

    def close(self) -> None:
        pass


def test_two_readers_one_decode(folder: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "image_size": 8, "seed": 1, "steps": STEPS}
    alone = list(train_batches(folder, **options))
    shared = SharedDecode(train_batches(folder, **options))
    readers = [shared.reader(), shared.reader()]
    together = list(zip(*readers, strict=True))
    assert len(together) == STEPS
    for expected, pair in zip(alone, together, strict=True):
        assert pair[0] is pair[1]
        assert np.array_equal(pair[0]["image"], expected["image"])
    assert (shared.decoded, shared.redecoded, shared.served) == (STEPS, 0, 2 * STEPS)
    assert readers[0].num_classes == 2
    assert readers[0].steps_per_epoch == 2


def test_one_after_the_other_gets_the_same_bits(folder: Path) -> None:
    shared = SharedDecode(train_batches(folder, batch_size=4, image_size=8, steps=STEPS), window=2)
    first, second = shared.reader(), shared.reader()
    one, two = list(first), list(second)
    assert all(np.array_equal(a["image"], b["image"]) for a, b in zip(one, two, strict=True))
    assert shared.decoded == STEPS
    assert shared.redecoded == STEPS - 2, "the window's two last batches are still there"


def test_every_reader_gets_an_unreadable_batchs_error(folder: Path, monkeypatch: Any) -> None:
    """Readers don't skip to the next batch, or later ones would differ from a lone stream's."""
    whole = BatchStream.example

    def damaged(self: BatchStream, place: Any) -> Any:
        if place.epoch == 1 and place.record == bad:
            raise ValueError("record is damaged")
        return whole(self, place)

    options: dict[str, Any] = {"batch_size": 4, "image_size": 8, "seed": 1, "steps": STEPS}
    stream = train_batches(folder, **options)
    bad = int(stream._stream.order[9])  # of batch 2
    monkeypatch.setattr(BatchStream, "example", damaged)
    shared = SharedDecode(train_batches(folder, **options))
    for reader in (shared.reader(), shared.reader()):
        for _ in range(2):
            next(reader)
        for _ in range(2):
            with pytest.raises(ValueError, match="damaged"):
                next(reader)
        assert reader.step == 2


def test_idle_reader_does_not_block_resuming_readers(folder: Path) -> None:
    """A reader nobody reads from doesn't hold up the readers that resume."""
    shared = SharedDecode(train_batches(folder, batch_size=4, image_size=8, steps=STEPS))
    shared.reader()  # belongs to a job that has already ended
    ahead, *readers = [shared.reader() for _ in range(3)]
    for reader, step in ((ahead, 5), *((reader, 3) for reader in readers)):
        reader.set_state(reader.get_state() | {"step": step})
    for pair in zip(*readers, strict=True):
        assert pair[0] is pair[1]
    assert len(list(ahead)) == STEPS - 5
    assert (shared.decoded, shared.redecoded) == (STEPS - 3, 0)


def test_a_reader_resumes_from_its_state(folder: Path) -> None:
    shared = SharedDecode(train_batches(folder, batch_size=4, image_size=8, steps=STEPS))
    reader = shared.reader()
    batches = [next(reader) for _ in range(3)]
    later = shared.reader()
    later.set_state(reader.get_state())
    assert later.step == 3
    batches += list(later)
    alone = list(train_batches(folder, batch_size=4, image_size=8, steps=STEPS))
    assert all(np.array_equal(a["image"], b["image"]) for a, b in zip(batches, alone, strict=True))


def test_readers_that_resume_share_again(folder: Path) -> None:
    def stream() -> Batches:
        return train_batches(folder, batch_size=4, image_size=8, steps=STEPS)

    shared = SharedDecode(stream())
    readers = [shared.reader(), shared.reader()]
    for reader, step in zip(readers, (2, 3), strict=True):
        reader.set_state(stream().at(step).get_state())
    rest = [list(readers[0]), list(readers[1])]
    alone = list(stream())
    for batches, step in zip(rest, (2, 3), strict=True):
        assert len(batches) == STEPS - step
        assert all(
            np.array_equal(a["image"], b["image"])
            for a, b in zip(batches, alone[step:], strict=True)
        )
    assert (shared.decoded, shared.redecoded) == (STEPS - 2, 0)


def test_batches_are_read_only() -> None:
    batch = next(SharedDecode(Numbers(3)).reader())
    with pytest.raises(ValueError, match="read-only"):
        batch["image"][0] = 1


def test_a_job_takes_shared_batches_as_they_are(folder: Path) -> None:
    shared = SharedDecode(train_batches(folder, batch_size=4, image_size=8, steps=STEPS))
    batch = next(shared.reader())
    assert all(prefetch.read_only(array) for array in batch.values())


def test_window_must_hold_a_batch() -> None:
    with pytest.raises(ValueError, match=r"^`window` must be at least 1 batch, not 0."):
        SharedDecode(Numbers(3), window=0)


@given(
    order=st.lists(st.integers(0, 3), max_size=60),
    window=st.integers(1, 4),
    starts=st.lists(st.integers(0, 8), min_size=4, max_size=4),
    leave=st.sets(st.integers(0, 3)),
)
def test_any_call_order_gives_each_reader_all_batches(
    order: list[int], window: int, starts: list[int], leave: set[int]
) -> None:
    shared = SharedDecode(Numbers(10), window=window)
    readers = [shared.reader(start_step=start) for start in starts]
    seen: list[list[int]] = [[] for _ in readers]
    for place, turn in enumerate(order):
        if place > 30 and turn in leave:
            readers[turn].close()  # a closed reader may still be used: it keeps its position
        batch = next(readers[turn], None)
        if batch is not None:
            seen[turn].append(int(batch["image"][0]))
        assert len(shared._kept) <= window
    for start, reader, numbers in zip(starts, readers, seen, strict=True):
        assert numbers == list(range(start, reader.step))
    assert shared.served == sum(map(len, seen))
    assert shared.decoded <= 10


def test_threads_decode_each_batch_once() -> None:
    """A barrier keeps four threads within one batch, so ten decodes suffice in any order."""
    shared = SharedDecode(Numbers(10), window=2)
    barrier = threading.Barrier(4, timeout=60)
    seen: dict[int, list[int]] = {}

    def read(name: int) -> None:
        seen[name] = []
        reader = shared.reader(start_step=0)
        barrier.wait()
        for batch in reader:
            seen[name].append(int(batch["image"][0]))
            barrier.wait()

    threads = [threading.Thread(target=read, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {name: list(range(10)) for name in range(4)}
    assert (shared.decoded, shared.redecoded, shared.served) == (10, 0, 40)


def test_free_running_threads_end() -> None:
    shared = SharedDecode(Numbers(200), window=1)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(len(list(shared.reader())))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [200] * 4


def test_an_error_reaches_every_reader(folder: Path) -> None:
    class Broken(Numbers):
        def __next__(self) -> dict:
            raise ValueError("broken record")

    shared = SharedDecode(Broken(3))
    for reader in (shared.reader(), shared.reader()):
        with pytest.raises(ValueError, match="broken record"):
            next(reader)
