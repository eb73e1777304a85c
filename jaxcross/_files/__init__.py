"""Files on disk, for all folders. Uses only the standard library.

whole  files that are complete even if the process is killed
lock   whether another process uses a file, and which one
"""

from jaxcross._files.lock import holder, lock
from jaxcross._files.whole import replacing, sync, write_whole

__all__ = ["holder", "lock", "replacing", "sync", "write_whole"]
