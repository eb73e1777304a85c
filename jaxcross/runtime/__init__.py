"""Threads that run the segments of several jobs on one device, as `interleave` decides.

driver            passes events to the interleaver, and the interleaver's instructions to threads;
                  writes notes about jobs to the flight recorder
router            puts each instruction into the right thread's queue, and starts job threads
lanes             the threads of the compute lane and of the exchange lane
job_record        what the driver stores about a job, and about one call of its step
step_host         the interface between a step and whatever runs it: a job or a standalone step
standalone        runs a step without a runner; its exchanges run in a second thread
collective_call   runs a function on all ranks, and makes it fail on all of them if it fails on one
start_gate        how long jobs wait for a job that doesn't reach its first step, and in which order
                  they continue
stall_watch       detects jobs that are stuck between two steps
paused_run        ends a run whose jobs are all paused if nothing can resume them
failure_text      turns the ranks' texts about a job into one error, identical across ranks
chaos             delays threads at random, for tests
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.runtime.chaos import chaos_of
    from jaxcross.runtime.collective_call import run_collectively
    from jaxcross.runtime.driver import Driver, FlightNotes
    from jaxcross.runtime.failure_text import describe, explain
    from jaxcross.runtime.job_record import JobRecord, RestoreMode, Stopped
    from jaxcross.runtime.lanes import LaneThread
    from jaxcross.runtime.paused_run import nobody_resumes
    from jaxcross.runtime.stall_watch import after_run
    from jaxcross.runtime.standalone import Standalone, run_execution
    from jaxcross.runtime.step_host import Agreement, StepHost
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
