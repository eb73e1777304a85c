"""Threads that run the segments of several jobs on one device, as `interleave` decides.

driver            passes events to the interleaver, and its answers to the jobs' threads; notes
                  facts about jobs in the flight recorder
router            passes the interleaver's instructions to their threads, and starts job threads
lanes             the compute lane, and the exchange lane, whose thread makes all exchanges
job_record        what the driver stores about a job, and about one call of its step
step_host         the interface between a step and whatever runs it: a job or a standalone step
standalone        a step without a runner, whose exchanges run in a second thread
collective_call   work on all ranks that fails on all of them if it fails on one
start_gate        how long jobs wait for one that doesn't reach its first step, and in which order
                  they continue
stall_watch       notices jobs that wait forever between their steps
paused_run        ends a run whose jobs are all paused, if nobody can resume them
failure_text      turns the ranks' texts about a job into one error, identical across ranks
chaos             delays threads at random, for tests
"""
