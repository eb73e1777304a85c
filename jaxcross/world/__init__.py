"""The MPI world: which rank this process is, its communicators, and how it starts and ends.

start           `initialize`: MPI, the thread pool, the device, the hooks that terminate all ranks
                together
wire_choice     chooses the library for the exchanges, the same one on every rank
start_limit     a time limit for the start of MPI; `start_notice`: log lines until work begins
world           `World`: rank, size, communicators, agreements, the watchdog
exchange_owner  which thread or run may currently exchange
control_plane   small agreements between all ranks, on a communicator of their own
initial_state   makes a pytree identical on all ranks, or checks that it is
mailbox         non-blocking flat messages; `neighbours`: gathers texts among the ranks that
                exchange with one another
workers         worker processes of a rank, such as a data loader's
launch_env      the launcher's variables for this process; `probe` prints findings about MPI and JAX
malloc          settings that make malloc keep its memory; `xla_pool` and `sched_slice`: threads
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:
    from jaxcross.wire.rank_grid import RankGrid as RankGrid
    from jaxcross.world.control_plane import Control as Control
    from jaxcross.world.start import current_world as current_world
    from jaxcross.world.start import initialize as initialize
    from jaxcross.world.world import World as World
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
