"""What the data cache's tests share: a small data set, caches in a folder, hashes of batches."""

import hashlib
from contextlib import contextmanager

from jaxcross.data import Cache, synthesise

IMAGES = 48
STREAM = {"batch_size": 6, "image_size": 16, "seed": 3}


def write_set(root):
    return synthesise(root, images=IMAGES, classes=3, width=64, height=48)


@contextmanager
def caches_in(folder):
    """Opens caches that share a folder, in-memory files included, and closes them at the end."""
    (folder / "memory").mkdir()
    opened = []

    def call(**options):
        cache = Cache(
            folder / "cache", memory_folder=folder / "memory", **{"ahead_records": 8, **options}
        )
        opened.append(cache)
        return cache

    yield call
    for cache in opened:
        cache.close()


def digest(batch):
    return hashlib.sha256(batch["image"].tobytes() + batch["label"].tobytes()).hexdigest()


def digests(batches):
    """One hash per batch, over all of its bits."""
    found = [digest(batch) for batch in batches]
    batches.close()
    return found


def tree(folder):
    """Names, modification times and hashes of all files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [
        (str(path), path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
    ]


def records_of(cache):
    """The number of records that each level has delivered."""
    return {name: level.records for name, level in cache.statistics().items()}
