"""The MPI world: which rank this process is, its communicators, and how it starts and ends.

start           `initialize`: starts MPI, thread pool and device, and installs the hooks that
                terminate all ranks together
wire_choice     chooses the library for the exchanges, the same on all ranks
start_limit     a time limit on starting MPI
start_notice    prints that the ranks have joined, until work begins
world           `World`: rank, size, communicators, agreements, and the watchdog
exchange_owner  decides which thread or run may exchange right now
control_plane   small agreements between all ranks, on a separate communicator
initial_state   makes a pytree identical on all ranks, or checks that it is
mailbox         non-blocking messages between ranks, as flat arrays
neighbours      gathers texts among ranks that exchange with each other
workers         a rank's worker processes, e.g. of a data loader
launch_env      what the launcher's environment variables say about this process
probe           prints which parts of MPI and JAX work on a host
malloc          settings that make malloc hold on to its memory
xla_pool        the size of XLA's CPU thread pool
sched_slice     shorter time slices for threads that poll
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
    from jaxcross.world.launch_env import MPI_SETTINGS, read_rank
    from jaxcross.world.mailbox import Mailbox
    from jaxcross.world.sched_slice import ask_for_short_slices
    from jaxcross.world.start import current_world, initialize
    from jaxcross.world.start_limit import START_CHECKS
    from jaxcross.world.start_notice import FIRST_NOTICE_S, no_progress_wanted
    from jaxcross.world.world import World
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
