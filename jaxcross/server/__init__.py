"""A parameter server on the host, which lets ranks train without stepping together.

The server runs in a thread of its own, and uses a communicator of its own.

parameter_server   `ParameterServer`, the public class: a worker and a server on every rank
lane               the server's thread, which also sends and receives the worker's messages
served_part        the part of the parameters and of the optimizer's state that a rank serves
message_layout     the conversion of a tree of arrays into one flat message per server, and back
clocks             the rule that decides which workers may continue
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.server.parameter_server import ParameterServer
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
