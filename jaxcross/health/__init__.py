"""Is every rank alive, and what to do if one is not. Knows nothing else of the package but its errors.

watchdog           reports ranks that have not arrived, with stacks, and ends a run that hangs
heartbeat          a small message to two neighbours about once a second
activity           what a rank is in, and what can be told from what several ranks say of themselves
flight_recorder    what this rank is in, in a file that outlives `kill -9`
abort              ends every rank when one fails; `abort_notice` says why, `shutdown_barrier` ends in order
timed_comm         a communicator whose calls are watched
process            which process a rank is, and what the kernel says of it
sigterm            SIGTERM as Ctrl-C; `deferred_signals` keeps signals until the main thread asks
stacks             Python stacks of all threads as text; `tracebacks` trims a user's
"""
