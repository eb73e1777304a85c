"""Runs a benchmark's own script as ranks on hosts with a real slow link. Measures nothing."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ended import ends_on_signals, run
from ranks import command, mpirun_or_exit
from rivals.teams import lab_or_exit
from workloads import parser

from jaxcross.lab import Lab


def parser_of_hosts(description: str | None) -> argparse.ArgumentParser:
    """Returns a command line with `--json`, `--smoke`, `--rate`, and what `on_hosts` adds."""
    made = parser(description)
    made.add_argument(
        "--rate", default="500mbit", help="of each link in each direction (default %(default)s)"
    )
    made.add_argument(
        "--worker", metavar="FILE", help="(internal) run as a rank and write the numbers there"
    )
    return made


def on_hosts(
    script: str,
    rate: str,
    hosts: int = 2,
    arguments: Sequence[str] = (),
    *,
    local: int = 1,
    burst_kb: int = 256,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Starts `script` with this process's arguments and `--worker FILE`, on one-core hosts.

    Args:
        script: The benchmark's file.
        rate: The rate of each host's link, in each direction.
        hosts: Number of hosts. If there are more hosts than cores, they share the cores.
        arguments: Additional arguments for the script.
        local: Ranks per host, numbered consecutively.
        burst_kb: Kilobytes that an idle link passes at full speed.
        environment: Additional environment variables for the ranks, which override the lab's.

    Returns:
        What rank 0 wrote to FILE, and facts about the link.

    Raises:
        RuntimeError: Almost nothing crossed the link.
    """
    mpirun = mpirun_or_exit()
    with (
        ends_on_signals(),
        tempfile.TemporaryDirectory() as folder,
        lab_or_exit(hosts=hosts, rate=rate, burst_kb=burst_kb) as lab,
    ):
        out = Path(folder) / "result.json"
        arguments = [*sys.argv[1:], *arguments, "--worker", str(out)]
        line, environ = command(mpirun, hosts * local, script, arguments, cores=1)
        if local > 1:
            line[1:1] = (
                ["--map-by", f"ppr:{local}:node"]
                if mpirun.vendor == "openmpi"
                else ["-ppn", str(local)]
            )
        run(lab.wrap(line), {**lab.environment(environ), **(environment or {})})
        facts = {"link": lab.description, "bytes_crossed": bytes_crossed(lab), "mpi": mpirun.vendor,
                 "tcp_bits_per_s": lab.measure_rate()}  # fmt: skip
        return {**json.loads(out.read_text()), **facts}


def bytes_crossed(lab: Lab, least: float = 1e5) -> int:
    """Returns the bytes that the lab's links have carried.

    Raises:
        RuntimeError: Almost nothing crossed the links, e.g. because the ranks share memory.
    """
    crossed = lab.bytes_crossed()
    if crossed < least:
        raise RuntimeError(
            f"only {crossed} bytes crossed the {lab.description}, so the times mean nothing."
        )
    return crossed
