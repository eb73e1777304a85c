"""What does an exchange cost the link and the core?

    python benchmarks/exchange_cost.py [--rate 500mbit] [--repeats 5] [--ways] [--wires]
        [--limits none,64k,1m,4m] [--settings]

We all-reduce ResNet-50's 161 gradients as one program, in which sums are joined in the same way as
in the library. There are two hosts with one core each and a real link. We measure:
  alone        one exchange while nothing else is running
  beside       exchanges while ResNet-50 computes on the same core
  computation  the same step without its exchange, alone and alongside exchanges
Some options add variants:
  --ways      Repeats `beside` with a different scheduling of the exchange's thread: the default;
              time slices other than the 0.25 ms that `beside` requests; and those slices at
              niceness 5. At the end, all other threads run at niceness 1, 3 and 5. This comes last
              because a thread can't lower its niceness again.
  --wires     Repeats `alone` and `beside` over mpi4py instead of mpi4jax: once with MPI's blocking
              call, and once with a non-blocking call that is tested between sleeps of 10 us to 1
              ms.
  --limits    Repeats `alone` and `beside`, each time joining only sums of up to the given number of
              bytes. With `none`, each sum is a separate message.
  --settings  Repeats the first three measurements with each of several settings of the MPI library.
              These settings can only be changed by starting the ranks again.
All variants that a single run can have take turns. We report:
  fill  the bytes on the wire over what the link can carry in the same time, as measured with plain
        TCP
  tax   an upper limit for the core seconds that an exchange takes from the computation: the CPU
        time of its thread, plus the time that the kernel spends on packets
We also report for how long the computation's threads had the core, including the packets that the
kernel handles in the meantime. If these threads need more time during exchanges than alone, the
difference is the cost of caches, memory and packets. The rest of the computation's slow-down is
time that the exchange's thread had the core.

The benchmark uses the MPI of the environment that it runs in. To compare MPICH and Open MPI, run it
once in an environment with each.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts import on_hosts, parser_of_hosts
from paired import ratios, with_interval
from workloads import write_json

RANK = Path(__file__).with_name("exchange_cost_rank.py")
_PUT = "send,put,inplace,need-ack,need-csum,hetero-rdma"
SETTINGS = {
    "mpich": [
        {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"},
        {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1"},
        *(
            {
                "MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "0",
                "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": algorithm,
            }
            for algorithm in ("recursive_doubling", "reduce_scatter_allgather", "ring")
        ),
        {"FI_TCP_ZEROCOPY_SIZE": "65536"},
        {"FI_TCP_STAGING_SBUF_SIZE": "0"},
        {"FI_TCP_PREFETCH_RBUF_SIZE": "262144"},
    ],
    "openmpi": [
        # Open MPI's own defaults, without what the library sets when it starts Open MPI: both
        # changes undone, then each alone.
        {"OMPI_MCA_btl_tcp_flags": _PUT, "OMPI_MCA_mpi_yield_when_idle": "0"},
        {"OMPI_MCA_btl_tcp_flags": _PUT},
        {"OMPI_MCA_mpi_yield_when_idle": "0"},
        *(
            {
                "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
                "OMPI_MCA_coll_tuned_allreduce_algorithm": algorithm,
            }
            for algorithm in ("3", "6")
        ),  # recursive doubling, Rabenseifner
        {"OMPI_MCA_btl_tcp_links": "2"},
        {"OMPI_MCA_btl_tcp_progress_thread": "1"},
        {
            "OMPI_MCA_pml": "cm",
            "OMPI_MCA_mtl": "ofi",
            "OMPI_MCA_opal_common_ofi_provider_include": "tcp",
        },
    ],
}


def limits(text: str) -> dict[str, int]:
    """For `argparse`: maps each word of `none,64k,4m` to its bytes."""
    found = {}
    for word in filter(None, text.split(",")):
        if (match := re.fullmatch(r"none|(\d+)([km])", word)) is None:
            raise argparse.ArgumentTypeError(f"`{word}` is neither `none` nor bytes as 64k or 4m.")
        found[word] = int(match[1]) << {"k": 10, "m": 20}[match[2]] if match[1] else 0
    return found


def options() -> argparse.ArgumentParser:
    """Returns the command line, which the ranks use as well."""
    made = parser_of_hosts(__doc__)
    made.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    made.add_argument("--ways", action=argparse.BooleanOptionalAction, help="to share the core")
    made.add_argument(
        "--limits", type=limits, default="", metavar="A,B", help="none, or bytes as 64k or 4m"
    )
    made.add_argument("--wires", action="store_true", help="over mpi4py, too")
    made.add_argument(
        "--settings", action="store_true", help="the MPI's own, each in a launch of its own"
    )
    return made


def main() -> int:
    args = options().parse_args()
    result = launched(args)
    result["settings"] = []
    write_json(args.json, __doc__, result)
    for setting in SETTINGS[result["mpi"]] if args.settings else ():
        print(" ".join(f"{name}={value}" for name, value in setting.items()))
        try:
            found = launched(args, setting, ["--no-ways", "--limits="])
        except subprocess.CalledProcessError:
            found = {"failed": "the ranks did not run to their end"}
        except RuntimeError as error:  # the setting may make MPI bypass the link
            found = {"failed": str(error)}
        print(found.get("failed", ""))
        result["settings"].append({"environment": setting, **found})
        write_json(args.json, __doc__, result)
    return 0


def launched(
    args: Any, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs all measurements in one launch, whose ranks also receive `arguments`.

    Raises:
        RuntimeError: Fewer bytes crossed the link than the exchanges need.
    """
    result = on_hosts(str(RANK), args.rate, arguments=arguments, environment=environment)
    needed = 2 * result["bytes"] * result["exchanges"]  # both ranks send their operand once
    if result["bytes_crossed"] < needed:
        raise RuntimeError(
            f"{result['bytes_crossed']} bytes crossed the link, the exchanges need {needed}."
        )
    there = min(result["tcp_bits_per_s"])
    for name, row in result["exchange"].items():
        row["fill"] = 8 * result["bytes"] / there / row["s"]["median"]
        print(
            f"exchange {name:26} {row['s']['median']:.3f} s, {row['cpu_s']['median']:.3f} s of its "
            f"thread's CPU, {row['softirq_s']['median']:.3f} s of the kernel's; fills "
            f"{row['fill']:.1%} of the link"
        )
    for name, row in result["computation_s"].items():
        ran = result["computation_ran_s"][name]["median"]
        print(f"computation {name:34} {row['median']:.3f} s, {ran:.3f} s of them on the core")
    result["over_mpi4jax"] = over_mpi4jax(result)
    for name, found in result["over_mpi4jax"].items():
        print(f"{name}: {with_interval(found)} of mpi4jax's")
    beside = result["exchange"]["beside"]
    result["tax_s"] = beside["cpu_s"]["median"] + beside["softirq_s"]["median"]
    print(f"{result['mpi']}: tax of an exchange {result['tax_s']:.3f} s")
    return result


def over_mpi4jax(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns each round's mpi4py mean over its mpi4jax mean, with the median's 95% interval.

    The exchanges of a round share the same conditions, so they count as one measurement.
    """
    exchange, computation = result["exchange"], result["computation_round_s"]

    def rounds(name: str) -> list[float]:
        raw = exchange[name]["s"]["raw"]
        several = len(raw) // result["repeats"]
        return [statistics.fmean(raw[n : n + several]) for n in range(0, len(raw), several)]

    found = {}
    for wire in [
        name.removeprefix("alone") for name in exchange if name.startswith("alone, mpi4py")
    ]:
        for way in ("alone", "beside"):
            found[f"exchange {way}{wire}"] = ratios(rounds(way + wire), rounds(way))
        new, old = (computation[f"beside exchanges{suffix}"]["raw"] for suffix in (wire, ""))
        found[f"computation beside exchanges{wire}"] = ratios(new, old)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
