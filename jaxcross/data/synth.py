"""Writes a small data set in ImageNet's real format.

The images aren't just noise. Their class is visible, so a model can learn something from them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.dataset_info import DatasetIdentity

from jaxcross.data.records import INFO_FILE, NAME

VERSION = "5.1.0"  # the version of TFDS's imagenet2012
SPLITS = {"train": 1.0, "validation": 0.25}  # number of images per split, as a fraction of `images`
SHARD_RECORDS = 1024
QUALITY = 90


def class_image(
    label: int, classes: int, width: int, height: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns a uint8 BGR image whose hue and stripe width depend on the class.

    Everything else about the image is random. Cropping or flipping the image leaves the hue and the
    stripe width alone, so the class can be learned even under the usual augmentation.
    """
    hue = 180 * label / classes + rng.normal(0, 20 / classes)
    base = cv2.cvtColor(np.array([[[hue % 180, 200, 180]]], np.uint8), cv2.COLOR_HSV2BGR)[
        0, 0
    ].astype(np.float32)
    # Draw at a quarter of the width and height, then scale up. That makes the image about as smooth
    # as a photograph, and its JPEG about as large.
    rows, columns = np.mgrid[0 : max(1, height // 4), 0 : max(1, width // 4)].astype(np.float32)
    angle = rng.uniform(-0.6, 0.6)
    period = 6 + 4 * (label % 4)
    wave = np.sin(
        (columns * np.cos(angle) + rows * np.sin(angle)) * (2 * np.pi / period)
        + rng.uniform(0, 2 * np.pi)
    )
    light = rng.uniform(0.7, 1.2)
    small = base * (light * (1 + 0.3 * wave[..., None])) + rng.normal(0, 12, (*wave.shape, 3))
    image = np.clip(small, 0, 255).astype(np.uint8)
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)


def _examples(
    split: str, count: int, classes: int, width: int, height: int, seed: int
) -> Iterator[dict[str, Any]]:
    for index in range(count):
        rng = np.random.default_rng((seed, list(SPLITS).index(split), index))
        label = index % classes
        image = class_image(label, classes, width, height, rng)
        _, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        name = f"n{label:08d}_{index}.JPEG"
        yield {"image": jpeg.tobytes(), "label": label, "file_name": name}


def synthesise(
    data_dir: str | Path,
    *,
    images: int = 256,
    classes: int = 8,
    width: int = 500,
    height: int = 375,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a small `imagenet2012`, and returns its folder.

    The `train` split gets `images` images, and `validation` a quarter of that. We write to a
    temporary folder beside the final one and rename it at the end, so an interrupted run never
    leaves a half-written data set behind. Calling this again with the same arguments finds the
    existing data set and writes nothing. Waits for the disk. Call it on one rank only.

    Args:
        data_dir: TFDS's root folder. The data set goes into `data_dir/imagenet2012/5.1.0`.
        images: Number of training images.
        classes: Number of classes. Images cycle through the labels 0 to `classes - 1`.
        width: Width of each image in pixels.
        height: Height of each image in pixels.
        seed: Seed for everything random in the images.
        progress: Called every few images with the number written so far and the total.

    Raises:
        ValueError: A number isn't positive, or the folder already contains a different data set.
    """
    arguments = {"images": images, "classes": classes, "width": width, "height": height}
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, not {value}.")
    arguments = {"jaxcross_synth": 1, "seed": seed, **arguments}
    folder = Path(data_dir).expanduser() / NAME / VERSION
    if folder.exists():
        _check_same(folder, arguments)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{VERSION}.incomplete-", dir=folder.parent))
    try:
        _write(partial, arguments, progress)
        partial.chmod(0o755)  # `mkdtemp` makes it readable by its owner only
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_same(folder: Path, arguments: dict[str, int]) -> None:
    metadata = folder / "metadata.json"
    found = json.loads(metadata.read_text()) if metadata.is_file() else {}
    if (
        not (folder / INFO_FILE).is_file()
        or {name: found.get(name) for name in arguments} != arguments
    ):
        raise ValueError(
            f"`{folder}` already holds another data set{f' ({found})' if found else ''}, so "
            "nothing was written. Choose a different folder, or remove this one."
        )


def _write(
    folder: Path, arguments: dict[str, int], progress: Callable[[int, int], None] | None
) -> None:
    # TFDS's builder classes can generate data sets too, but a builder downloads its description
    # from the network. So we use TFDS's writer for externally generated data instead.
    identity = DatasetIdentity(
        name=NAME, version=tfds.core.Version(VERSION), data_dir=str(folder), module_name=__name__
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        description=(
            "Synthetic images in the format of ImageNet 2012; hue and stripes depend on the class."
        ),
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=arguments["classes"]),
                "file_name": tfds.features.Text(),
            }
        ),
        supervised_keys=("image", "label"),
        metadata=tfds.core.MetadataDict(arguments),
    )
    writer = tfds.core.SequentialWriter(
        info, max_examples_per_shard=SHARD_RECORDS, file_format="array_record"
    )
    writer.initialize_splits(list(SPLITS))
    images, classes, width, height = (
        arguments[name] for name in ("images", "classes", "width", "height")
    )
    counts = {split: max(1, round(images * share)) for split, share in SPLITS.items()}
    written = 0
    total = sum(counts.values())
    for split, count in counts.items():
        pending: list[dict[str, Any]] = []
        for example in _examples(split, count, classes, width, height, arguments["seed"]):
            pending.append(example)
            written += 1
            # Every call rewrites the metadata, so pass the writer many records at once.
            if len(pending) == 64:
                writer.add_examples({split: pending})
                pending = []
            if progress is not None and (written % 8 == 0 or written == total):
                progress(written, total)
        if pending:
            writer.add_examples({split: pending})
    writer.close_all()
