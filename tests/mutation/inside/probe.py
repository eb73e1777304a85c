"""Records which test evaluated which place. It is copied into the package under test as
`_mutation_probe.py`.

A record is in the file before `hit` returns, so a rank that is killed, or ends by `os._exit`, has
left its records. A process that a test starts inherits the test's name from pytest, in
`PYTEST_CURRENT_TEST`. While pytest collects there is no such name, and then the test file on the
stack stands for all its tests.
"""

import os
import sys
from os import O_APPEND, O_CREAT, O_WRONLY, close, environ, write
from os import open as open_

FILE = ""  # filled in where this is copied
_seen = set()
_names = getattr(
    environ, "_data", environ
)  # of bytes: looked up in a tenth of the time, as some places are hot
_NAME = os.fsencode("PYTEST_CURRENT_TEST") if _names is not environ else "PYTEST_CURRENT_TEST"


def hit(key):
    """Records the place of `key`, once per process and test."""
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
    except OSError:  # a test of full disks or of too many open files
        _seen.discard((key, test))


def _collected():
    found, frame = "", sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if os.path.basename(name).startswith("test_"):
            found = name
        frame = frame.f_back
    return found
