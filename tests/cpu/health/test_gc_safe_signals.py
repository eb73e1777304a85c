"""Ctrl-C and SIGTERM terminate a rank even in a garbage collector callback.

Python drops exceptions there.
"""

import subprocess
import sys

import pytest

START = """
import atexit, gc, os, signal, threading
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.signals import install_interrupt
from jaxcross.health.process import this_process
from jaxcross.health.signals import SigtermHandler
"""

IN_COLLECTION = """
def callback(phase, info):
    if phase == "start" and not sent:
        sent.append(True)
        os.kill(os.getpid(), number)
sent = []
gc.callbacks.append(callback)
"""

COLLECT = f"""{IN_COLLECTION}
try:
    gc.collect()
    print("collected", flush=True)
    signal.sigtimedwait((), 60)
    print("lost")
except KeyboardInterrupt as error:
    print(type(error).__name__)
"""


def printed(code):
    """Returns what a process prints, which must not mention ignored exceptions."""
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


HANDLERS = pytest.mark.parametrize(
    ("install", "number", "error"),
    [
        ("install_interrupt()", "SIGINT", "KeyboardInterrupt"),
        ("SigtermHandler(FlightRecorder([this_process()], 0)).install()", "SIGTERM", "Terminated"),
    ],
)


@HANDLERS
def test_signal_in_a_collection_is_raised_after_it(install, number, error):
    assert printed(f"{install}\nnumber = signal.{number}\n{COLLECT}") == f"collected\n{error}\n"


EXIT = f"""
class Timer(threading.Timer):  # runs out once the interpreter is exiting, however long that takes
    def run(self):
        exiting.wait(60)
        self.function(*self.args)
threading.Timer = Timer
exiting = threading.Event()
{IN_COLLECTION}
@atexit.register
def close():
    exiting.set()
    timer.join()
    print("closed", flush=True)
    try: os.kill(os.getpid(), number); print("lost")
    except BaseException as error: print(type(error).__name__)

gc.collect()
[timer] = [thread for thread in threading.enumerate() if isinstance(thread, Timer)]
"""


@HANDLERS
def test_late_signal_spares_exit_but_a_new_one_raises(install, number, error):
    """If the script ends before a signal is resent, no `atexit` callback is interrupted.

    A new signal does interrupt it.
    """
    assert printed(f"{install}\nnumber = signal.{number}\n{EXIT}") == f"closed\n{error}\n"


IMPORT = """
import sys
class Finder:  # sends the signal when an extension that is being loaded imports something
    def find_spec(self, name, *rest):
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_qualname.startswith("ExtensionFileLoader."):
            frame = frame.f_back
        if frame is not None and not sent:
            sent.append(name)
            os.kill(os.getpid(), signal.SIGINT)
            sent.append("continues")
sent = []
install_interrupt()
sys.meta_path.insert(0, Finder())
try:
    import numpy.random
    signal.sigtimedwait((), 60)
except KeyboardInterrupt:
    print("interrupted after", len(sent))
"""


def test_signal_while_an_extension_loads_is_raised_later():
    """NumPy's generators are extensions that import others; interrupting one there may crash it."""
    assert printed(IMPORT) == "interrupted after 2\n"


def test_signal_elsewhere_is_raised_at_once():
    assert printed(
        "install_interrupt()\n"
        "try: os.kill(os.getpid(), signal.SIGINT); print('late')\n"
        "except KeyboardInterrupt: print('at once')"
    ) == "at once\n"  # fmt: skip


def test_a_handler_of_the_script_stays():
    assert printed(
        "signal.signal(signal.SIGINT, lambda *_: print('mine'))\n"
        "install_interrupt()\n"
        "os.kill(os.getpid(), signal.SIGINT)"
    ) == "mine\n"  # fmt: skip
