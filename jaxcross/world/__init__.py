"""The MPI world: start and end of all ranks together, axes over ranks, communicators, agreements, the watchdog."""

from jaxcross.wire.rank_grid import Mesh
from jaxcross.world.control import Control
from jaxcross.world.core import World
from jaxcross.world.start import current, initialize

__all__ = ["Control", "Mesh", "World", "current", "initialize"]
