"""Threads that run the segments of several jobs on one device, as `interleave` decides.

driver            hands events to the interleaver, and answers to the jobs' threads
router            hands the interleaver's instructions to their threads, and starts those of jobs
lanes             the compute lane, and the exchange lane: the thread that makes exchanges
job_record        what the driver keeps of a job, and of one call of its step
step_host         the interface between a step and the job, or the standalone step, that runs it
standalone        a step without a runner, whose exchanges run in a second thread
collective_call   work on every rank in which one rank's failure is everyone's
joint_start       how long jobs wait for one that does not come to its first step, and in which
                  order they go on
stall_watch       notices jobs that wait for ever between their steps
paused_run        ends a run whose jobs are all paused, if nobody can resume them
failure_text      one error, the same on every rank, of what the ranks say about a job
flight_notes      facts about jobs for the flight recorder
chaos             threads that are late now and then, for tests
"""
