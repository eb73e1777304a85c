"""The errors that a caller can act on. Bad arguments raise Python's own `TypeError` and `ValueError`."""


class CutError(Exception):
    """A train step cannot be traced or cut as written."""


class ExchangeError(Exception):
    """An exchange cannot be made: ranks disagree, a communicator cannot be had, or MPI failed."""


class JobError(Exception):
    """A job failed, or was used in a way its step cannot follow. Names the job, and where known step and rank."""


class InternalError(Exception):
    """jaxcross broke a promise to itself. Please report it."""
