"""A parameter server on the host: training without a common step, on a communicator and a thread of its own."""

from jaxcross.server.parameter_server import ParameterServer

__all__ = ["ParameterServer"]
