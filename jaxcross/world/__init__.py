"""The MPI world: who this process is, its communicators, its start and its end.

start           `initialize`: MPI, the thread pool, the device, the hooks that end all ranks
                together
wire_choice     which library makes the exchanges, the same one on every rank
start_limit     a time limit for the start of MPI; `start_notice`: lines while nothing has begun
world           `World`: rank, size, communicators, agreements, the watchdog
exchange_owner  which thread or run may exchange now
control_plane   small agreements between all ranks, on a communicator of their own
replicas        makes a pytree equal on all ranks, or checks that it is
mailbox         flat messages without waiting; `neighbours`: texts of the ranks that exchange with
                one another
workers         worker processes of a rank, such as a data loader's
launch_env      the launcher's variables for this process; `probe` prints it
malloc          memory that is kept; `xla_pool` and `sched_slice`: threads
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:
    from jaxcross.wire.rank_grid import RankGrid as RankGrid
    from jaxcross.world.control_plane import Control as Control
    from jaxcross.world.start import current_world as current_world
    from jaxcross.world.start import initialize as initialize
    from jaxcross.world.world import World as World
else:  # a checker would take every misspelt name for one that `__getattr__` knows
    __getattr__, __dir__, __all__ = on_first_use(__name__)
