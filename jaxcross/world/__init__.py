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

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.world import malloc, probe, xla_pool
    from jaxcross.world.control_plane import (
        Control,
        RunOnAllRanks,
        all_equal,
        any_rank,
        gather,
        which_equal,
    )
    from jaxcross.world.launch_env import MPI_SETTINGS
    from jaxcross.world.mailbox import Mailbox
    from jaxcross.world.sched_slice import ask_for_short_slices
    from jaxcross.world.start import current_world, initialize
    from jaxcross.world.start_limit import START_CHECKS
    from jaxcross.world.start_notice import FIRST_NOTICE_S, no_progress_wanted
    from jaxcross.world.world import World
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
