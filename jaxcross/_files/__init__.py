"""Files on disk, for all folders. Knows only the standard library.

whole  files that are whole whatever is killed
lock   whether another process uses a file
"""

from jaxcross._files.lock import lock
from jaxcross._files.whole import replacing, sync, write_whole

__all__ = ["lock", "replacing", "sync", "write_whole"]
