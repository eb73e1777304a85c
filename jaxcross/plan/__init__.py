"""Decisions about a run before it starts, from what was measured of its jobs.

    compression   the least compression with which the exchanges of all jobs hide behind computation

A plan traces steps by types alone: it needs no ranks, no device and no `World`.
"""

from jaxcross.plan.compression import Candidate, JobCost, choose_compression

__all__ = ["Candidate", "JobCost", "choose_compression"]
