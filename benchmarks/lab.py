"""Runs a command between two hosts and a shaped link on this machine, and measures the link's rate.

    python benchmarks/lab.py [--rate 500mbit] [--hosts 2] [--latency 1ms] -- mpirun -n 2
        python train.py

Before the command runs, the script prints the rate that a plain TCP transfer reaches in each
direction. Afterwards, it prints how many megabytes the ranks have sent over the links. If that's 0
MB, the ranks communicated through shared memory instead.
"""

from jaxcross.lab.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(measure=True))
