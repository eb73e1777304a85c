"""Runs several training loops, called jobs, on a shared device.

runner             the `Runner` class: one run of several jobs, from comparing settings between
                   ranks to the report and any errors
plain_loop         `run` and `Job`, for plain loops of the form `state, metrics = step(state,
                   batch)`
fused              trains several plain loops as a single job
context            `JobContext`, the object that's passed to a job's function
engine             the machinery behind a `JobContext`: the job's thread, its steps, its end
batch_loops        loops over batches, and the number of examples in a batch; `prefetch` reads
                   batches ahead of time and keeps track of the position in the data
job_state          finds a job's latest state, no matter how the job ended; `resumption` connects a
                   job to its checkpoints
replicas           checks that all ranks have the same state
metrics            the metrics logged by a job
progress_reporter  shows the jobs' progress during the run
evaluations        runs evaluations every n steps; `early_stopping` decides when to stop
step_registry      the functions with exchanges that a job has called
skipped_steps      detects jobs that would never stop skipping steps
admission          makes sure that a job fits into memory on all ranks; `memory` computes how much
                   memory jobs need
submissions        jobs that rank 0 starts on all ranks by sending a function's name
stop_message       the message printed by a stopped run: what has been saved
arguments          the options of a run, and argument checks for runners and jobs
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.jobs import arguments
    from jaxcross.jobs.arguments import SharedOptions, check_count, check_options, check_values
    from jaxcross.jobs.context import JobContext
    from jaxcross.jobs.engine import JobDone, JobEngine, current_engine
    from jaxcross.jobs.fused import FusedJob, FusedStep, Fusion
    from jaxcross.jobs.job_state import form_of, own_copy
    from jaxcross.jobs.memory import (
        JobMemory,
        as_bytes,
        device_limit_bytes,
        memory_limit,
        needed_by_groups,
        needed_bytes,
    )
    from jaxcross.jobs.plain_loop import Job, check_batches_apart, run
    from jaxcross.jobs.prefetch import close_unread
    from jaxcross.jobs.runner import MAX_ERRORS_SHOWN, Runner
    from jaxcross.jobs.step_registry import memory_of, step_graph_of
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
