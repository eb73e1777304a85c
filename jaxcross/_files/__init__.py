"""Files on disk, for all folders. Knows only the standard library.

whole  files that are whole whatever is killed
lock   whether another process uses a file, and which
"""

from jaxcross._files.lock import holder, lock
from jaxcross._files.whole import replacing, sync, write_whole

__all__ = ["holder", "lock", "replacing", "sync", "write_whole"]
