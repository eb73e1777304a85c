"""The records, the augmentation and the batch stream, on real ArrayRecord files, no TensorFlow."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from jaxcross.data import Batches, eval_batches, open_records, synthesise, train_batches
from jaxcross.data.augment import centre_crop, decode, eval_image, random_crop, train_image
from tests.support import warm_python

IMAGES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    synthesise(root, images=IMAGES, classes=3, width=64, height=48)
    return root


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def take(batches: Batches, count: int) -> list[dict]:
    taken = [next(batches) for _ in range(count)]
    batches.close()
    return taken


@pytest.mark.integration
def test_no_tensorflow(folder: Path) -> None:
    code = (
        "import sys; from jaxcross.data import *\n"
        "it = train_batches(sys.argv[1], batch_size=4, image_size=16, steps=2)\n"
        "assert len(list(it)) == 2\n"
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=120)


def test_batch_has_the_promised_shapes_and_scale(folder: Path) -> None:
    (batch,) = take(train_batches(folder, batch_size=8, image_size=32), 1)
    assert batch["image"].shape == (8, 32, 32, 3)
    assert batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int32
    assert batch["label"].shape == (8,)
    assert -2.2 < batch["image"].min() < batch["image"].max() < 2.7
    assert set(batch["label"]) <= {0, 1, 2}


def test_ranks_share_out_each_pass(folder: Path) -> None:
    """A pass reads each record exactly once; augmentation doesn't depend on the rank count."""
    alone = next(train_batches(folder, batch_size=IMAGES, image_size=16, steps=1))
    parts = [
        next(train_batches(folder, batch_size=8, image_size=16, rank=r, size=3, steps=1))
        for r in range(3)
    ]

    def images(*batches: dict) -> list[bytes]:
        return sorted(image.tobytes() for batch in batches for image in batch["image"])

    assert len(set(images(alone))) == IMAGES
    assert images(alone) == images(*parts)


def test_all_ranks_have_equally_many_steps(folder: Path) -> None:
    streams = [
        train_batches(folder, batch_size=5, image_size=8, rank=r, size=2, epochs=2)
        for r in range(2)
    ]
    assert [stream.steps for stream in streams] == [4, 4]
    assert [len(list(stream)) for stream in streams] == [4, 4]
    assert [
        len(list(eval_batches(folder, batch_size=2, image_size=8, rank=r, size=2)))
        for r in range(2)
    ] == [1, 1]


def test_passes_differ_and_seeds_differ(folder: Path) -> None:
    first, second = take(train_batches(folder, batch_size=IMAGES, image_size=8, seed=1), 2)
    assert not np.array_equal(first["image"], second["image"])
    assert sorted(first["label"]) == sorted(second["label"])
    (other,) = take(train_batches(folder, batch_size=IMAGES, image_size=8, seed=2), 1)
    assert not np.array_equal(first["image"], other["image"])


def test_independent_of_threads(folder: Path) -> None:
    one = take(train_batches(folder, batch_size=6, image_size=8, seed=3, threads=1), 6)
    many = take(train_batches(folder, batch_size=6, image_size=8, seed=3, threads=5), 6)
    assert all(map(equal, one, many))


def test_resume_from_state_and_from_start_step(folder: Path) -> None:
    """Resumes across passes: a pass has 4 steps, and the stream stops in the second pass."""
    options: dict[str, Any] = {"batch_size": 6, "image_size": 8, "seed": 3, "steps": 9}
    through = list(train_batches(folder, **options))
    stopped = train_batches(folder, **options)
    take(stopped, 5)
    state = stopped.get_state()
    resumed = train_batches(folder, **options)
    resumed.set_state(state)
    assert all(map(equal, list(resumed), through[5:]))
    started = list(train_batches(folder, **options, start_step=5))
    assert len(started) == 4
    assert all(map(equal, started, through[5:]))
    assert all(map(equal, list(stopped), through[5:])), (
        "closing an iterator must not lose its place"
    )


RESUME = """
import hashlib, json, os, sys
from pathlib import Path
from typing import Any
from jaxcross.data import train_batches
folder, state, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
it = train_batches(folder, batch_size=6, image_size=8, seed=3, steps=8)
if state.exists():
    it.set_state(json.loads(state.read_text()))
for batch in it:
    with log.open("a") as file:
        bits = batch["image"].tobytes() + batch["label"].tobytes()
        file.write(hashlib.sha256(bits).hexdigest() + "\\n")
    state.write_text(json.dumps(it.get_state()))
    if it.step == int(sys.argv[4]):
        os.kill(os.getpid(), 9)
"""


@pytest.mark.integration
def test_killed_and_resumed(folder: Path, tmp_path: Path) -> None:
    def go(name: str, kill_at: int) -> int:
        places = [folder, tmp_path / f"{name}.json", tmp_path / f"{name}.log"]
        command = [*warm_python.COMMAND, "-c", RESUME, *places, kill_at]
        return subprocess.run([str(word) for word in command], check=False, timeout=120).returncode

    assert go("killed", 3) == -9
    assert go("killed", 0) == 0
    batches = list(train_batches(folder, batch_size=6, image_size=8, seed=3, steps=8))
    whole = [
        hashlib.sha256(b["image"].tobytes() + b["label"].tobytes()).hexdigest() for b in batches
    ]
    assert len(whole) == 8
    assert (tmp_path / "killed.log").read_text().splitlines() == whole


def test_state_of_another_stream_is_refused(folder: Path) -> None:
    state = train_batches(folder, batch_size=6, image_size=8, seed=3).get_state()
    with pytest.raises(
        ValueError, match=r"^This data state belongs to another stream: it has `seed` 3"
    ) as caught:
        train_batches(folder, batch_size=6, image_size=8, seed=4).set_state(state)
    assert "(here 4)" in str(caught.value)


def test_evaluation_is_the_stored_order_and_the_centre(folder: Path) -> None:
    batch = next(eval_batches(folder, batch_size=6, image_size=16))
    records = open_records(folder, "validation")
    for place in range(6):
        jpeg, label = records.read(place)
        assert np.array_equal(batch["image"][place], eval_image(jpeg, 16))
        assert batch["label"][place] == label


def test_random_crops_keep_to_area_and_aspect() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_crop(375, 500, rng) for _ in range(500)])
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 375).all()
    assert (left + width <= 500).all()
    share = height * width / (375 * 500)
    assert 0.078 < share.min() < 0.15
    assert 0.85 < share.max() <= 1.0
    assert ((width / height > 0.73) & (width / height < 1.36)).all()


def test_a_long_image_falls_back_to_its_centre() -> None:
    assert random_crop(10, 1000, np.random.default_rng(0))[2:] == (10, 10)
    assert centre_crop(256, 512) == (16, 144, 224, 224)


def test_evaluation_crop_of_a_plain_image() -> None:
    _, jpeg = cv2.imencode(
        ".png", np.full((40, 60, 3), (255, 0, 0), np.uint8)
    )  # blue, in OpenCV's channel order
    image = eval_image(jpeg.tobytes(), 8)
    expected = (np.array([0, 0, 1]) - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(image, np.broadcast_to(expected, image.shape), atol=1e-5)


def test_augmentation_depends_on_the_generator_alone(folder: Path) -> None:
    jpeg, _ = open_records(folder).read(0)
    once, again = (train_image(jpeg, 16, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, train_image(jpeg, 16, np.random.default_rng(6)))


@pytest.mark.parametrize("jpeg", [b"", b"no image"])
def test_bad_image(jpeg: bytes) -> None:
    with pytest.raises(
        ValueError, match=f"^A record's `image` of {len(jpeg)} bytes cannot be decoded."
    ):
        decode(jpeg)


def test_bad_arguments(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^`batch_size` must be at least 1, not 0."):
        train_batches(folder, batch_size=0)
    with pytest.raises(ValueError, match=r"^`rank` must be from 0 to 1, since `size` is 2, got 2."):
        train_batches(folder, batch_size=1, rank=2, size=2)
    with pytest.raises(ValueError, match=r"^Give `steps` \(3\) or `epochs` \(1\), not both."):
        train_batches(folder, batch_size=1, steps=3, epochs=1)
    with pytest.raises(
        ValueError,
        match=r"^Split `train` in .* has 24 records, fewer than one batch of 13 on each of 2",
    ):
        train_batches(folder, batch_size=13, size=2)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^The data folder `.*nowhere` does not exist."
    ) as caught:
        train_batches(tmp_path / "nowhere", batch_size=1)
    assert "jaxcross data synth DIR" in str(caught.value)
    assert "tfds build imagenet2012" in str(caught.value)


def test_folder_that_is_not_tfds(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(
        ValueError, match=r"^`.*` is not a TFDS data set: there is no `dataset_info.json`"
    ) as caught:
        train_batches(tmp_path, batch_size=1)
    assert "jaxcross data synth DIR" in str(caught.value)


def test_folder_that_tfds_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^TFDS cannot read the data set in `"):
        train_batches(tmp_path, batch_size=1)


def test_missing_split(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has no split `test`; it has \['train', 'validation'\]."):
        train_batches(folder, batch_size=1, split="test")


def test_tfrecord_is_refused(folder: Path, tmp_path: Path) -> None:
    version = next((folder / "imagenet2012").iterdir())
    for name in ("dataset_info.json", "features.json"):
        text = (version / name).read_text()
        (tmp_path / name).write_text(text.replace('"array_record"', '"tfrecord"'))
    with pytest.raises(
        ValueError, match=r"^The data set in `.*` is stored as `tfrecord`"
    ) as caught:
        train_batches(tmp_path, batch_size=1)
    assert "convert_format" in str(caught.value)


def test_every_level_of_folder_is_found(folder: Path) -> None:
    version = folder / "imagenet2012" / "5.1.0"
    assert {open_records(path).folder for path in (folder, folder / "imagenet2012", version)} == {
        version
    }
