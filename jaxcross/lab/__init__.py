"""Sets up several hosts on one Linux machine, connected by links whose rate you choose.

    python -m jaxcross.lab --rate 500mbit -- mpirun -n 2 python train.py

Each host is a network namespace, which some machines don't allow. In that case, fall back to
`emulated_link`. It doesn't create a link, but makes every exchange of a run take as long as it
would over a link of the given rate.

network    `Lab`: the hosts (network namespaces) and the links between them
holder     the process that creates the namespaces and keeps them alive; doesn't import jaxcross
transfer   times a TCP transfer between two hosts, real or in a lab; `meter` runs on either end
"""

from jaxcross._link import emulated_link
from jaxcross.lab.network import Lab, available
from jaxcross.lab.transfer import Transfer as Transfer
from jaxcross.lab.transfer import measure_transfer as measure_transfer

__all__ = ["Lab", "available", "emulated_link"]


def __dir__() -> list[str]:
    return [*__all__]
