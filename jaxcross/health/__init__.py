"""Detects ranks that hang or die, and then terminates all ranks.

This folder doesn't depend on any other folder of the package.

watchdog           reports which ranks haven't arrived, with their stacks, and terminates hanging
                   runs; keeps ranks from leaving MPI while others may still send
heartbeat          a small message to two neighbours about once a second
activity           what a rank is doing, and the report about a stuck wait
flight_recorder    writes this rank's activities to a file that survives `kill -9`
abort              terminates all ranks if one of them fails
abort_notice       sends the other ranks the reason before they are terminated
timed_comm         a communicator that notices when a call doesn't return
process            identity and state of a rank's process
signals            Ctrl-C and SIGTERM: no signal is lost, and during a run, exceptions are stored
                   until the main thread asks for them
tracebacks         the stacks of all threads as text, and tracebacks without internal frames
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.health import process
    from jaxcross.health.abort import (
        INTERRUPTED,
        TERMINATED,
        AbortReason,
        ExceptionHooks,
        Terminated,
        abort_everywhere,
        end_processes,
        is_interactive,
        print_error,
        traceback_text,
    )
    from jaxcross.health.activity import Activity, RankStatus, missing_ranks
    from jaxcross.health.flight_recorder import FlightRecorder
    from jaxcross.health.process import ProcessId, process_state, this_process
    from jaxcross.health.signals import SigtermHandler, defer_signals, install_interrupt
    from jaxcross.health.watchdog import Monitor, WaitingFor, Watchdog
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
