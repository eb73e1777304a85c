"""A multi-level cache for training data, shared by all jobs, ranks and runs on a node.

    cache.py         the cache's folder, its levels and its users
    split.py         one split, read through the levels
    feed.py          a thread that reads ahead of one stream
    next_use.py      decides which records a level keeps, and predicts hits by simulation
    streams.py       when each record is needed next by any stream on the node
    page_store.py    one level: records in the pages of a shared file
    origin.py        where the data set is stored: a folder, or byte ranges through fsspec
    array_record.py  finds and decodes single records of a shard
    locks.py         file locks that work across processes and runs
    statistics.py    how much each level has delivered
    info.py          what a cache contains and has delivered, for `jaxcross data info`

All processes on a node share one cache. They coordinate through files and file locks in a common
folder, without any messages between them. The data set itself is never written to.
"""

from jaxcross.data.cache.cache import Cache
from jaxcross.data.cache.next_use import Tally, simulate
from jaxcross.data.cache.statistics import LevelStatistics

__all__ = ["Cache", "LevelStatistics", "Tally", "simulate"]
