"""Records which test evaluated which place. Copied into the package as `_mutation_probe.py`.

A record is in the file before `hit` returns, so even a rank that is killed or calls `os._exit`
leaves its records. Pytest puts the current test's name into `PYTEST_CURRENT_TEST`, which processes
started by the test inherit. There's no such name while pytest collects tests. In that case we
record the test file that's on the stack, which then stands for all of its tests.
"""

import os
import sys
from os import O_APPEND, O_CREAT, O_WRONLY, close, environ, write
from os import open as open_

FILE = ""  # filled in when this file is copied
_seen = set()
# Some places are hot, and a lookup in this dictionary of bytes takes a tenth of the time.
_names = getattr(environ, "_data", environ)
_NAME = os.fsencode("PYTEST_CURRENT_TEST") if _names is not environ else "PYTEST_CURRENT_TEST"


def hit(key):
    """Records that the place of `key` was evaluated, once per process and test."""
    test = _names.get(_NAME)
    if test is None:
        test = _collected()
    if (key, test) in _seen:
        return
    _seen.add((key, test))
    try:
        file = open_(FILE, O_WRONLY | O_APPEND | O_CREAT, 0o666)
        write(file, b"%s\t%s\n" % (key.encode(), os.fsencode(test)))
        close(file)
    except OSError:  # the test may simulate a full disk, or too many open files
        _seen.discard((key, test))


def _collected():
    found, frame = "", sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if os.path.basename(name).startswith("test_"):
            found = name
        frame = frame.f_back
    return found
