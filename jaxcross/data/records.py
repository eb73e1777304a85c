"""Finds a TFDS data set on disk or at a URL, and reads its records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import tensorflow_datasets as tfds

from jaxcross._files import write_whole
from jaxcross.data.cache.cache import Cache
from jaxcross.data.cache.origin import FooterFiles, LocalOrigin, Origin, RemoteOrigin, Shard
from jaxcross.data.cache.split import CachedSplit
from jaxcross.errors import clause

NAME = "imagenet2012"
INFO_FILE = "dataset_info.json"
REMEDY = (
    "Write a small one with `jaxcross data synth DIR`, or prepare ImageNet with `tfds build "
    "imagenet2012 --file_format=array_record --data_dir=DIR --manual_dir=FOLDER_OF_THE_TAR_FILES`, "
    "and pass DIR."
)
# Small files with a data set's metadata. TFDS can only read these from a local folder, so for a
# data set at a URL, we copy them into the cache.
_REQUIRED = (INFO_FILE, "features.json")
_OPTIONAL = ("label.labels.txt", "metadata.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """One split of a data set: a sequence of `{"image": JPEG bytes, "label": int, ...}`.

    Indexing reads the record.

    Attributes:
        folder: The versioned TFDS folder containing the split, or its URL.
        split: For example `train` or `validation`.
        num_classes: Number of distinct values of `label`.
        source: Random access by record number. Safe to use from several threads.
        cached: The same records, read through the cache; None without a cache.
    """

    folder: Path | str
    split: str
    num_classes: int
    source: Sequence[Any] | CachedSplit
    cached: CachedSplit | None = None

    def __len__(self) -> int:
        return len(self.source)

    def read(self, record: int) -> tuple[bytes, int]:
        """Reads a record and returns its JPEG bytes and label. Waits for the disk."""
        example = self.source[record]
        return example["image"], int(example["label"])


class _RemoteFolder(NamedTuple):
    """A data set on one of fsspec's file systems.

    Attributes:
        fs: The file system.
        path: The data set's folder on this file system.
        metadata: A local folder with copies of the metadata files.
        identity: A string that changes whenever the URL or the metadata does.
    """

    fs: Any
    path: str
    metadata: Path
    identity: str


def find_folder(data_dir: str | Path) -> Path:
    """Returns the versioned folder in `data_dir`.

    `data_dir` can be TFDS's root folder, the data set's folder, or the versioned folder itself. If
    several versions exist, we pick the newest.

    Raises:
        FileNotFoundError: `data_dir` doesn't exist.
        ValueError: `data_dir` isn't a TFDS data set.
    """
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"The data folder `{root}` does not exist. {REMEDY}")
    if (root / INFO_FILE).is_file():
        return root
    versions = [
        path.parent
        for pattern in (f"{NAME}/*", "*")
        for path in root.glob(f"{pattern}/{INFO_FILE}")
    ]
    if not versions:
        raise ValueError(
            f"`{root}` is not a TFDS data set: there is no `{INFO_FILE}` in it, in a version "
            f"folder, or in `{NAME}/<version>`. {REMEDY}"
        )
    return max(
        versions, key=lambda path: [int(part) for part in path.name.split(".") if part.isdecimal()]
    )


def open_records(
    data_dir: str | Path, split: str = "train", *, cache: Cache | None = None
) -> Records:
    """Opens a split. Only reads metadata; records are read when you index them.

    Args:
        data_dir: A folder (see `find_folder`). With a cache, also the URL of a versioned folder on
            any file system supported by fsspec.
        split: Name of the split.
        cache: Cache to read the records through.

    Raises:
        FileNotFoundError: `data_dir` doesn't exist.
        OSError: The storage behind a URL doesn't respond.
        ValueError: `data_dir` isn't a TFDS data set in ArrayRecord format, lacks this split, or
            contains no labelled images; or it's a URL and there's no cache; or the cache's folder
            is inside the data set's folder.
    """
    remote = None
    if _is_url(data_dir):
        if cache is None:
            raise ValueError(
                f"`{data_dir}` is a URL, which is read through a cache: pass `cache=Cache(FOLDER, "
                "...)`."
            )
        remote = _open_remote(str(data_dir), cache)
    folder = remote.metadata if remote else find_folder(data_dir)
    where = str(data_dir) if remote else str(folder)
    builder: Any  # its methods are decorated, so a type checker can't read their signatures
    try:
        builder = tfds.builder_from_directory(folder)
    except Exception as error:
        raise ValueError(
            f"TFDS cannot read the data set in `{where}`: {clause(str(error))}. {REMEDY}"
        ) from error
    info = builder.info
    stored = getattr(info.file_format, "value", info.file_format)
    if stored != "array_record":
        raise ValueError(
            f"The data set in `{where}` is stored as `{stored}`, which only TensorFlow reads; "
            "jaxcross reads `array_record`. Convert it with `python -m "
            f"tensorflow_datasets.scripts.convert_format --dataset_dir={where} --out_path=NEW "
            "--out_file_format=array_record`."
        )
    if split not in info.splits:
        raise ValueError(
            f"The data set in `{where}` has no split `{split}`; it has {sorted(info.splits)}. "
            f"Pass one of these as `split`, or a different data set. {REMEDY}"
        )
    features: Any = info.features or {}
    if "image" not in features or "label" not in features:
        raise ValueError(
            f"The data set in `{where}` has the features {sorted(features)}; training needs "
            f"`image` (JPEG) and `label`. {REMEDY}"
        )
    # Keep TFDS from decoding the JPEGs. We use OpenCV for that, which releases the GIL.
    decoders = {"image": tfds.decode.SkipDecoding()}
    known: dict[str, Any] = {
        "folder": where if remote else folder,
        "split": split,
        "num_classes": features["label"].num_classes,
    }
    if cache is None:
        source: Any = builder.as_data_source(split, decoders=decoders)
        return Records(**known, source=source)
    if remote:
        origin = _remote_origin(remote, builder, split, cache)
    else:
        origin = _local_origin(folder, builder, split, cache)
    parse = partial(features.deserialize_example_np, decoders=decoders)
    cached = cache.split(origin, f"{where}: {split}", parse)
    return Records(**known, source=cached, cached=cached)


def _is_url(data_dir: str | Path) -> bool:
    return isinstance(data_dir, str) and "://" in data_dir


def _open_remote(url: str, cache: Cache) -> _RemoteFolder:
    """Reads the metadata of the data set at `url`, a versioned TFDS folder.

    Waits for the storage.
    """
    fs, path = fsspec.core.url_to_fs(url.rstrip("/"), **cache.storage_options)
    contents: dict[str, bytes] = {}
    for name in _REQUIRED + _OPTIONAL:
        try:
            contents[name] = fs.cat_file(f"{path}/{name}")
        except FileNotFoundError as error:
            if name in _REQUIRED:
                raise FileNotFoundError(
                    f"There is no `{name}` in `{url}`. Name the versioned folder of a data set "
                    "that TFDS prepared with `--file_format=array_record`, for example "
                    "`s3://bucket/imagenet2012/5.1.0`."
                ) from error
        except Exception as error:  # fsspec's file systems all raise different errors
            raise OSError(
                f"`{url}/{name}` cannot be read: {type(error).__name__}: {clause(str(error))}. "
                "Check the URL and the cache's `storage_options`, e.g. credentials."
            ) from error
    digest = hashlib.sha256(repr((url, sorted(contents.items()))).encode()).hexdigest()[:32]
    folder = cache.folder / "origins" / digest
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with suppress(FileNotFoundError):
            if (folder / name).read_bytes() == content:
                continue
        write_whole(folder / name, content, shared=True)
    return _RemoteFolder(fs, path, folder, digest)


def _remote_origin(remote: _RemoteFolder, builder: Any, split: str, cache: Cache) -> Origin:
    shards = [
        each._replace(path=f"{remote.path}/{Path(each.path).name}")
        for each in _shards(builder, split)
    ]
    footers = FooterFiles(remote.metadata / "footers")
    return RemoteOrigin(remote.fs, shards, remote.identity, footers, cache.stop)


def _local_origin(folder: Path, builder: Any, split: str, cache: Cache) -> Origin:
    if folder.resolve() in (cache.folder, *cache.folder.parents):
        raise ValueError(
            f"The cache folder `{cache.folder}` is inside the data set's folder `{folder}`. Choose "
            "one outside of it."
        )
    raw = builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    return LocalOrigin(_shards(builder, split), raw, f"{folder.resolve()}: {split}")


def _shards(builder: Any, split: str) -> list[Shard]:
    files = builder.info.splits[split].file_instructions
    return [Shard(str(each.filename), each.skip, each.take) for each in files]
