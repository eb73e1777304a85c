"""Scripts in which one rank is killed, stopped or asked to exit while another waits for it."""

START = (
    "import os, signal, sys, threading\nfrom jaxcross.world import initialize\nworld = "
    "initialize({})\n"
)
WAIT = (
    "from mpi4py import MPI\n"
    "with world.monitor(job='a', step=3, segment=1, what='psum'):\n    "
    "MPI.COMM_WORLD.Dup().Barrier()\n"
)
HURT = "if world.rank == 1:\n    os.kill(os.getpid(), signal.SIG{})\n"
