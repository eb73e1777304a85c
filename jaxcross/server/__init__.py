"""A parameter server on the host: ranks train without stepping together.

It runs in its own thread and uses its own communicator.

parameter_server   `ParameterServer`: a worker and a server on every rank
lane               its thread: serves the rank's part and carries the messages of its worker
served_part        the part of the parameters and the optimizer's state that a rank serves
message_layout     a tree of arrays as one flat message per server
clocks             how far each worker has come, and which of them may continue
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.server.parameter_server import ParameterServer
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
