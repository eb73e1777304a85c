"""Several hosts on one Linux machine, connected by a link whose rate you choose.

    python -m jaxcross.lab --rate 500mbit -- mpirun -n 2 python train.py

The hosts are network namespaces, which some machines don't allow. On such a machine, use
`emulated_link` instead. It doesn't create a link, but makes each exchange of a run take as long as
it would on a link of the given rate.

network    `Lab`: the hosts, which are network namespaces, and the links between them
holder     the process that creates the namespaces and holds them; imports nothing of jaxcross
transfer   a timed TCP transfer between two hosts, of a lab or real ones; `meter` runs on each host
"""

from jaxcross._link import emulated_link
from jaxcross.lab.network import Lab, available
from jaxcross.lab.transfer import Transfer as Transfer
from jaxcross.lab.transfer import measure_transfer as measure_transfer

__all__ = ["Lab", "available", "emulated_link"]


def __dir__() -> list[str]:
    return [*__all__]
