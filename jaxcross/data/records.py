"""Finds a TFDS data set on disk, and reads its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

NAME = "imagenet2012"
INFO_FILE = "dataset_info.json"
REMEDY = (
    "Write a small one with `jaxcross data synth DIR`, or prepare ImageNet with `tfds build imagenet2012 "
    "--file_format=array_record --data_dir=DIR --manual_dir=FOLDER_OF_THE_TAR_FILES`, and pass DIR."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """One split of a data set: a sequence of `{"image": JPEG bytes, "label": int, ...}`, read when indexed.

    Attributes:
        folder: The versioned TFDS folder that holds it.
        split: `train`, `validation` ...
        num_classes: How many values `label` can take.
        source: Random access by record number; safe to use from several threads.
    """

    folder: Path
    split: str
    num_classes: int
    source: Sequence[Any]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, record: int) -> tuple[bytes, int]:
        """Reads one record from disk (waits for the disk): its JPEG bytes and its label."""
        example = self.source[record]
        return example["image"], int(example["label"])


def find_folder(data_dir: str | Path) -> Path:
    """Finds the versioned folder in `data_dir`, which may be TFDS's root, the data set's folder or the version's.

    Raises:
        FileNotFoundError: `data_dir` does not exist.
        ValueError: It is no TFDS data set.
    """
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"The data folder `{root}` does not exist. {REMEDY}")
    if (root / INFO_FILE).is_file():
        return root
    versions = [path.parent for pattern in (f"{NAME}/*", "*") for path in root.glob(f"{pattern}/{INFO_FILE}")]
    if not versions:
        raise ValueError(
            f"`{root}` is not a TFDS data set: there is no `{INFO_FILE}` in it, in a version folder, or in "
            f"`{NAME}/<version>`. {REMEDY}"
        )
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".") if part.isdecimal()])


def open_records(data_dir: str | Path, split: str = "train") -> Records:
    """Opens one split for reading; reads the folder's metadata, not yet a record.

    Raises:
        FileNotFoundError: `data_dir` does not exist.
        ValueError: It is no TFDS data set, not in ArrayRecord format, has no such split, or holds no labelled images.
    """
    folder = find_folder(data_dir)
    builder: Any  # its methods are decorated: a type checker cannot read their signatures
    try:
        builder = tfds.builder_from_directory(folder)
    except Exception as error:
        raise ValueError(f"TFDS cannot read the data set in `{folder}`: {error} {REMEDY}") from error
    info = builder.info
    stored = getattr(info.file_format, "value", info.file_format)
    if stored != "array_record":
        raise ValueError(
            f"The data set in `{folder}` is stored as `{stored}`, which only TensorFlow reads; jaxcross reads "
            f"`array_record`. Convert it with `python -m tensorflow_datasets.scripts.convert_format "
            f"--dataset_dir={folder} --out_path=NEW --out_file_format=array_record`."
        )
    if split not in info.splits:
        raise ValueError(f"The data set in `{folder}` has no split `{split}`; it has {sorted(info.splits)}. {REMEDY}")
    features: Any = info.features or {}
    if "image" not in features or "label" not in features:
        raise ValueError(
            f"The data set in `{folder}` has the features {sorted(features)}; training needs `image` (JPEG) and "
            f"`label`. {REMEDY}"
        )
    # The JPEG bytes are wanted as they lie: a crop is decoded and scaled once, by OpenCV, off the GIL.
    source: Any = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    return Records(folder=folder, split=split, num_classes=features["label"].num_classes, source=source)
