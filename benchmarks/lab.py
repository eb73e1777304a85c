"""Run a command between two hosts and a shaped link on this machine, and say how fast the link
really is.

    python benchmarks/lab.py [--rate 500mbit] [--hosts 2] [--latency 1ms] -- mpirun -n 2 python
    train.py

Prints the rate that a plain TCP transfer reaches in each direction before the command runs, and the
megabytes that its ranks sent over the links: a command whose ranks spoke over shared memory shows
as 0 MB.
"""

from jaxcross.lab.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(measure=True))
