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

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcross.wire.rank_grid import RankGrid
    from jaxcross.world.control_plane import Control
    from jaxcross.world.start import current_world, initialize
    from jaxcross.world.world import World

__all__ = ["Control", "RankGrid", "World", "current_world", "initialize"]


if not TYPE_CHECKING:  # a checker would take every misspelt name for one that this function knows

    def __getattr__(name: str) -> Any:
        """Loads a name on first use, so that `jaxcross launch` need not wait for JAX."""
        from importlib import import_module

        homes = {
            "Control": "jaxcross.world.control_plane",
            "RankGrid": "jaxcross.wire.rank_grid",
            "World": "jaxcross.world.world",
            "current_world": "jaxcross.world.start",
            "initialize": "jaxcross.world.start",
        }
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module `jaxcross.world` has no attribute `{name}`")
