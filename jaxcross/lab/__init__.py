"""Several hosts on one Linux machine, joined by a link of a chosen rate: MPI over real TCP without a cluster.

Each host is a network namespace with its own host name; its link to a switch (a bridge) is shaped in both directions.
Everything lives in one private set of namespaces whose only lifeline is a pipe from this process, so whatever happens
to it, `kill -9` included, the kernel takes down hosts, links and the processes in them. No root is needed where the
kernel lets users make namespaces, nothing on the machine is changed, and several labs can run side by side.

    python -m jaxcross.lab --rate 500mbit -- mpirun -n 2 python train.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HOLDER = Path(__file__).with_name("holder.py")
START_S = 20
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "mount": "util-linux"}


class Lab:
    """A context manager: hosts `h0`, `h1` ... exist from enter to exit. Waits about 0.2 s; communicates with nobody.

    Args:
        hosts: How many.
        rate: Of each host's link in each direction, as `tc` spells it (`500mbit`); None leaves it unshaped.
        latency: Added to each packet that a host sends (`1ms`); needs a kernel with netem. None adds nothing.

    Raises:
        OSError: (on enter) This machine does not allow it; says which step failed.
        ValueError: A rate, latency or number of hosts that cannot be meant.

    Example:
        >>> with Lab(rate="500mbit") as lab:  # doctest: +SKIP
        ...     lab.run(["mpirun", "-n", "2", "python", "train.py"])
        ...     print(lab.bytes_crossed())
    """

    def __init__(self, hosts: int = 2, rate: str | None = "500mbit", latency: str | None = None) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"a lab has 1 to 200 hosts, not `{hosts}`.")
        if rate is not None and not re.fullmatch(r"\d+(\.\d+)?[kmgt]?(bit|bps)", rate):
            raise ValueError(f"`{rate}` is no rate: write 500mbit, 1gbit, ... as tc does.")
        if latency is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", latency):
            raise ValueError(f"`{latency}` is no latency: write 200us, 1ms, ... as tc does.")
        self.hosts = hosts
        self.rate = rate
        self.latency = latency
        self._holder: subprocess.Popen[str] | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for tool, package in TOOLS.items():
            if shutil.which(tool) is None:
                raise OSError(f"no lab on this machine: the command `{tool}` is missing. Install {package}.")
        if not sys.platform.startswith("linux"):
            raise OSError(f"no lab on this machine: namespaces need Linux, this is `{sys.platform}`.")
        wish = {"hosts": self.hosts, "rate": self.rate, "latency": self.latency}
        # -I: the package folder must not come first on its path. A session of its own: Ctrl-C is for the command only
        self._holder = subprocess.Popen(
            [sys.executable, "-I", str(HOLDER), json.dumps(wish)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        try:
            answer = self._holder.stdout.readline()
            self._facts = json.loads(answer) if answer else {"error": self._last_words()}
            if "error" in self._facts:
                raise OSError(f"no lab on this machine: {self._facts['error']}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the hosts down, and kills whatever still runs on them."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        for stream in (holder.stdin, holder.stdout, holder.stderr):
            if stream is not None:
                stream.close()
        holder.wait()

    def _last_words(self) -> str:
        holder = self._holder
        assert holder is not None
        assert holder.stderr is not None
        lines = holder.stderr.read().strip().splitlines()
        return lines[-1] if lines else "the process that holds the namespaces ended without a word."

    @property
    def description(self) -> str:
        """For reports: what joins the ranks."""
        rate = self.rate or "unshaped"
        return (
            f"real link {rate}{f', {self.latency}' if self.latency else ''} ({self.hosts} hosts in network namespaces)"
        )

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside, on the machine `head` from which all hosts are reached."""
        if self._holder is None:
            raise ValueError("the lab is closed: use it inside its `with` block.")
        user = ["--user", "--preserve-credentials"] if self._facts["user"] else []
        enter = ["nsenter", f"--target={self._facts['pid']}", *user, "--mount", "--net", "--uts", "--pid"]
        # entering a mount namespace moves to its root
        return [*enter, "--", "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *command]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Environment in which a plain `mpirun -n N` spreads its ranks over the hosts and their TCP links.

        Ranks of one host share that host's part of the machine's cores, set before Python starts.
        """
        folder = self._facts["folder"]
        return {
            **(os.environ if base is None else base),
            # MPICH
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": f"{folder}/enter",
            "HYDRA_HOST_FILE": f"{folder}/hostfile",
            "FI_PROVIDER": "tcp",
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            # Open MPI 5
            "PRTE_MCA_plm_ssh_agent": f"{folder}/enter",
            "PRTE_MCA_prte_default_hostfile": f"{folder}/hostfile",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` inside, in `environment()`. Waits for the command."""
        options["env"] = self.environment(options.pop("env", None))
        return subprocess.run(self.wrap(command), check=False, **options)

    def bytes_crossed(self) -> int:
        """Bytes that all hosts have sent since the lab began, as their links counted them (headers included)."""
        if self._holder is None:
            raise ValueError("the lab is closed: use it inside its `with` block.")
        lines = Path(f"/proc/{self._facts['pid']}/net/dev").read_text().splitlines()
        counters = dict(line.split(":", 1) for line in lines if ":" in line)
        ports = [values for name, values in counters.items() if name.strip().startswith("to-h")]
        return sum(int(values.split()[0]) for values in ports)


def available() -> str | None:
    """None if a lab can be had on this machine, else the reason. Tries it: takes about 0.2 s."""
    try:
        with Lab(hosts=2):
            return None
    except OSError as error:
        return str(error)
