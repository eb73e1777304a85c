"""A parameter server on the host: training without a common step, on a communicator and a thread of
its own.

parameter_server   `ParameterServer`: a worker and a server on every rank
lane               its thread: serves the rank's part and carries the messages of its worker
shard              the part of parameters and optimizer state that a rank serves
layout             a tree of arrays as one flat message for each server
clocks             how far each worker is; decides which of them may go on
"""

from jaxcross.server.parameter_server import ParameterServer

__all__ = ["ParameterServer"]
