"""The MPI world: start and end of all ranks together, axes over ranks, communicators, agreements, the watchdog."""

from jaxcross.wire.rank_grid import Mesh
from jaxcross.world.control_plane import Control
from jaxcross.world.start import current, initialize
from jaxcross.world.world import World

__all__ = ["Control", "Mesh", "World", "current", "initialize"]
