"""Jobs, as their users see them.

runner             `Runner`: several jobs share this rank's device, from the ranks' agreement on a
                   run to its report and errors
plain_loop         `run` and `Job`, for jobs that are plain loops `state, metrics = step(state,
                   batch)`
fused              several such jobs as one, with the batches of each
context            `JobContext`, which a job's function receives
engine             the engine of a job, behind its context: its thread, its steps, its results, its
                   end
batch_loops        loops over batches, and how many examples they use; `prefetch` prepares batches
                   ahead of time, and knows the position in the data
job_state          the state that a job is left with, however it ends; `resumption` connects a job
                   to its checkpoints
replicas           whether all ranks hold the same state, and when to compare it
metrics            what a job has logged
progress_reporter  how far the jobs are, shown during the run
evaluations        work that a job does every n steps; `early_stopping` decides by the metrics,
                   without acting on it
step_registry      the functions with exchanges that a job calls
skipped_steps      notices a job that would skip all further steps
admission          checks before a job's first step that all ranks have the memory for it; `memory`
                   adds up what jobs need
submissions        jobs that rank 0 starts on all ranks by name
stop_message       the message of a stopped run: what it has saved
arguments          the options of a run, and checks of what is passed to runners and jobs
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
