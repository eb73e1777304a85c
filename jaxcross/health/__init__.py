"""Detects ranks that hang or die, and then terminates all ranks.

This folder depends on no other folder of the package.

watchdog           reports ranks that have not arrived, with stacks, and terminates a run that
                   hangs; ends MPI in order after the scripts
heartbeat          a small message to two neighbours about once a second
activity           activities of a rank, and the report of a stuck wait
flight_recorder    the activities of this rank, in a file that survives `kill -9`
abort              terminates every rank if one fails; `abort_notice` sends the reason
timed_comm         a communicator with a time limit on each call
process            identity and state of a rank's process
signals            Ctrl-C and SIGTERM: none is lost, and during a run they wait until the main
                   thread asks for them
tracebacks         Python stacks of all threads as text, and tracebacks trimmed for users
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
