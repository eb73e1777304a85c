"""Detection of ranks that hang or die, and the end of all ranks that follows. Knows only the errors
of the package.

watchdog           reports ranks that have not arrived, with stacks, and ends a run that hangs
heartbeat          a small message to two neighbours about once a second
activity           activities of a rank, and the report of a stuck wait
flight_recorder    the activities of this rank, in a file that survives `kill -9`
abort              ends every rank when one fails; `abort_notice` sends the reason,
                   `shutdown_barrier` ends in order
timed_comm         a communicator with a time limit on each call
process            identity and state of a rank's process
sigterm            SIGTERM as Ctrl-C; `deferred_signals` keeps signals until the main thread asks
gc_safe_signals    Ctrl-C and SIGTERM during garbage collection, where Python drops exceptions
stacks             Python stacks of all threads as text; `tracebacks` trims a user's
"""
