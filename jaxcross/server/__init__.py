"""A parameter server on the host, which lets ranks train without running in lockstep.

The server runs in its own thread and uses its own communicator.

parameter_server   `ParameterServer`, the public class: each rank is both a worker and a server
lane               the server's thread, which also handles the worker's messages
served_part        a rank's part of the parameters and the optimizer's state
message_layout     converts a tree of arrays to one flat message per server, and back
clocks             decides which workers may continue
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.server.parameter_server import ParameterServer
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
