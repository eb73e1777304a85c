"""Runs the cells of a notebook on several local ranks: `%load_ext jaxcross`, then `%%ranks 2`.

A notebook's kernel is one process, and MPI can't turn it into several. So the kernel starts ranks
with `mpirun`, as `jaxcross launch` does, sends them the text of each cell, and shows what comes
back. The ranks live on between cells, because a program that's written in a notebook is spread over
many of them. ipyparallel does the same for engines of any kind, over sockets and with a controller
in between. We only need ranks on this machine, so named pipes in a private folder are enough: no
port is opened, and a rank that waits for its next cell uses no CPU time.

extension   `load_ipython_extension`, and the magics `%%ranks` and `%ranks_stop`
cell        runs one cell: what is shown, when it has failed, and whether the ranks can be kept
processes   starts and ends the ranks, and exchanges messages with them
cell_rank   what runs on a rank: receives cells, executes them, and sends back results
figures     a backend for matplotlib that shows a rank's figures in the notebook
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # public names
    from jaxcross.notebook.extension import load_ipython_extension as load_ipython_extension
    from jaxcross.notebook.extension import unload_ipython_extension as unload_ipython_extension
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
