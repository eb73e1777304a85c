"""Levels of cache between a data set and training, shared by the jobs, ranks and runs of a node.

    cache.py         the folder, its levels, its users
    split.py         one split, read through the levels
    feed.py          reads ahead of a stream, on a thread
    next_use.py      which records a level keeps, and the simulation that predicts hits: pure
    streams.py       when each record is needed next, by all streams of the node
    page_store.py    one level: records in the pages of a shared file
    origin.py        where the data set lies: a folder, or byte ranges through fsspec
    array_record.py  where a record lies in its shard
    remote.py        the metadata of a data set that a URL names
    locks.py         locks of files, among processes and runs
    small_files.py   small files that are whole or absent
    statistics.py    what each level has given
    info.py          the same for people, without joining the users of a cache

Processes share files and locks of a folder, and no messages. The data set is never written.
"""

from jaxcross.data.cache.cache import Cache
from jaxcross.data.cache.next_use import Tally, simulate
from jaxcross.data.cache.statistics import LevelStatistics

__all__ = ["Cache", "LevelStatistics", "Tally", "simulate"]
