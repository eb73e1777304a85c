"""Jobs, as their users see them.

runner          `Runner`: several jobs share this rank's device
plain_loop      `run`, for jobs that are plain loops `state, metrics = step(state, batch)`;
                `plain_job` is their class; `standing` has the results of those without a context
fused           several such jobs as one; `side_by_side` takes their batches together
context         what a job's function receives
job_run         the runner's side of a job: its function, its place in the run, its end; owns
                context, lifecycle, host
lifecycle       the part that a job takes in a run: its driver, record, thread and end; `thread` is
                the thread's class
host            runs a job's steps and counts them; `examples` counts what they use
batch_loops     loops over batches; `prefetch` prepares them ahead; `data_position` says where a job
                is in its data
latest_state    the state that a job is left with, however it ends; `resumption` ties it to
                checkpoints
replicas        whether all ranks hold the same state; `replica_checks` says when that is compared
metrics         what a job logged
progress        how far the jobs are, shown while they run
observer        follows a job that is a trial of a sweep
evaluations     what a job does every so many steps; `early_stopping` decides by the metrics,
                without doing
step_registry   the functions with exchanges that a job calls
skipped_steps   notices a job that would skip all further steps
admission       whether the memory that a job needs is left on all ranks
agreement       what ranks agree on before the jobs of a run begin, and after a stop
submissions     jobs that rank 0 starts on all ranks by name
outcome         what a run came to; `stop_text` says what a stopped one has saved
options         what a run can be given
arguments       checks of what is passed to runners and jobs
"""
