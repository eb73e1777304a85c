"""The metadata of a data set at a URL: small files, copied into the cache for TFDS to read."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from jaxcross._files import write_whole
from jaxcross.data.cache.cache import Cache

REQUIRED = ("dataset_info.json", "features.json")
OPTIONAL = ("label.labels.txt", "metadata.json")


class RemoteFolder(NamedTuple):
    """A data set on a file system of fsspec.

    Attributes:
        fs: The file system.
        path: The data set's folder there.
        metadata: A local folder with copies of the small files.
        identity: Text that differs if the URL or the small files differ.
    """

    fs: Any
    path: str
    metadata: Path
    identity: str


def is_url(data_dir: str | Path) -> bool:
    """Returns whether `data_dir` is on a file system of fsspec, such as `https://` or `s3://`."""
    return isinstance(data_dir, str) and "://" in data_dir


def open_remote(url: str, cache: Cache) -> RemoteFolder:
    """Reads the metadata of the data set at `url`, a versioned TFDS folder. Waits for the storage.

    Raises:
        FileNotFoundError: There is no data set at `url`.
        ImportError: The file system needs a package that isn't installed; fsspec names it.
        OSError: The storage doesn't answer.
        ValueError: fsspec doesn't know this file system.
    """
    fs, path = fsspec.core.url_to_fs(url.rstrip("/"), **cache.storage_options)
    contents: dict[str, bytes] = {}
    for name in REQUIRED + OPTIONAL:
        try:
            contents[name] = fs.cat_file(f"{path}/{name}")
        except FileNotFoundError as error:
            if name in REQUIRED:
                raise FileNotFoundError(
                    f"There is no `{name}` in `{url}`. Name the versioned folder of a data set "
                    "that TFDS prepared with `--file_format=array_record`, for example "
                    "`s3://bucket/imagenet2012/5.1.0`."
                ) from error
        except Exception as error:  # each file system of fsspec raises errors of its own
            raise OSError(
                f"`{url}/{name}` cannot be read: {type(error).__name__}: {error}"
            ) from error
    digest = hashlib.sha256(repr((url, sorted(contents.items()))).encode()).hexdigest()[:32]
    folder = cache.folder / "origins" / digest
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with suppress(FileNotFoundError):
            if (folder / name).read_bytes() == content:
                continue
        write_whole(folder / name, content, shared=True)
    return RemoteFolder(fs, path, folder, digest)
