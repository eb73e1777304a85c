"""Sets up several hosts on one Linux machine, connected by links whose rate you choose.

This lets you run MPI over real TCP without a cluster.

Each host is a network namespace with its own hostname, connected to a switch (a bridge) by a link
that's shaped in both directions.

Everything lives inside a private set of namespaces, so the machine itself is left untouched and you
can run several labs side by side. You don't even need root, as long as the kernel lets users create
namespaces.

The namespaces belong to a separate process, the holder, which only runs while this process keeps a
pipe to it open. However this process dies (`kill -9` included), the pipe gets closed, the holder
exits, and the kernel cleans up the hosts, the links and any processes still running inside.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxcross._link import LINK_VARIABLE
from jaxcross.errors import clause
from jaxcross.lab.transfer import START_S, measure_transfer

HOLDER = Path(__file__).with_name("holder.py")
SBIN = os.pathsep.join(("/usr/local/sbin", "/usr/sbin", "/sbin"))
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "mount": "util-linux"}


class Lab:
    """A context manager that provides hosts `h0`, `h1`, ... Entering it takes about 0.2 s.

    Args:
        hosts: Number of hosts.
        rate: The rate of each host's link in each direction, written the way `tc` does (e.g.
            `500mbit`). If None, the links aren't shaped.
        latency: Delay added to every packet a host sends (e.g. `1ms`). This requires a kernel with
            netem. If None, no delay is added.
        burst_kb: How many kilobytes an idle link lets through at full speed.

    Raises:
        OSError: (when entering) The machine can't run a lab. The message says which step failed.
        ValueError: A rate, latency, burst or number of hosts is invalid.

    Example:
        >>> with Lab(rate="500mbit") as lab:  # doctest: +SKIP
        ...     lab.run(["mpirun", "-n", "2", "python", "train.py"])
        ...     print(lab.bytes_crossed())
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | None = "500mbit",
        latency: str | None = None,
        *,
        burst_kb: int = 256,
    ) -> None:
        if not 1 <= hosts <= 200:
            raise ValueError(f"`hosts` of a lab must be from 1 to 200, got `{hosts}`.")
        if rate is not None:
            _check_rate(rate)
        if latency is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", latency):
            raise ValueError(f"`{latency}` is not a latency: write 200us, 1ms, ... as tc does.")
        if burst_kb < 64:
            raise ValueError(
                "`burst_kb` must be at least 64, because the kernel's largest packet has 64 kB, "
                f"got {burst_kb}."
            )
        self.hosts = hosts
        self.rate = rate
        self.burst_kb = burst_kb
        self.latency = latency
        self._holder: subprocess.Popen[str] | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for tool, package in TOOLS.items():
            if shutil.which(tool) is not None:
                continue
            elsewhere = shutil.which(tool, path=SBIN)
            if elsewhere is not None:
                # These tools often live in a folder that's only on root's PATH.
                folder = Path(elsewhere).parent
                raise OSError(
                    f"no lab on this machine: `{tool}` is in `{folder}`, which is not on the path. "
                    "Add it to `PATH`."
                )
            raise OSError(
                f"no lab on this machine: the command `{tool}` is missing. Install {package}."
            )
        if not sys.platform.startswith("linux"):
            raise OSError(
                f"no lab on this machine: namespaces need Linux, but this is `{sys.platform}`. Use "
                "a Linux machine."
            )
        request = {
            "hosts": self.hosts,
            "rate": self.rate,
            "latency": self.latency,
            "burst_kb": self.burst_kb,
        }
        # Without -I, Python would put the script's folder first on its import path, where our
        # modules could shadow those of the standard library. The holder gets its own session so
        # that Ctrl-C only reaches the command and doesn't tear down the lab.
        self._holder = subprocess.Popen(
            [sys.executable, "-I", str(HOLDER), json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
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
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hosts and kills anything still running on them."""
        holder = self._holder
        self._holder = None
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
        return lines[-1] if lines else "the process that holds the namespaces ended unexpectedly."

    @property
    def _open(self) -> dict[str, Any]:
        """What the holder told us, such as its process id and the lab's folder."""
        if self._holder is None:
            raise ValueError("the lab is closed: use it inside its `with` block.")
        return self._facts

    @property
    def description(self) -> str:
        """A description of the link between the ranks, for reports."""
        rate = self.rate or "unshaped"
        return (
            f"real link {rate}{f', {self.latency}' if self.latency else ''} ({self.hosts} hosts in "
            "network namespaces)"
        )

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs `command` inside the lab.

        The command runs on a machine called `head`, which can reach all hosts.
        """
        user = ["--user", "--preserve-credentials"] if self._open["user"] else []
        enter = [
            "nsenter",
            f"--target={self._open['pid']}",
            *user,
            "--mount",
            "--net",
            "--uts",
            "--pid",
        ]
        # Entering a mount namespace resets the working directory to its root, so change back.
        return [*enter, "--", "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *command]

    def wrap_host(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs `command` on host `h<host>`, pinned to its cores."""
        self._check_host(host)
        return self.wrap([f"{self._open['folder']}/enter", f"h{host}", shlex.join(command)])

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Returns an environment in which a plain `mpirun -n N` uses the lab's hosts and TCP links.

        With it, `mpirun` spreads the ranks over the hosts. The machine's cores are split between
        the hosts, and every rank is pinned to its host's share before Python starts. With more
        hosts than cores, nothing is pinned.

        It also sets `JAXCROSS_LINK`, which tells the reports of runs how to describe the link.
        """
        folder = self._open["folder"]
        return {
            **(os.environ if base is None else base),
            LINK_VARIABLE: self.description,
            # MPICH
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": f"{folder}/enter",
            "HYDRA_HOST_FILE": f"{folder}/hostfile",
            "FI_PROVIDER": "tcp",
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            # Open MPI 5
            "PRTE_MCA_plm_ssh_agent": f"{folder}/enter",
            "PRTE_MCA_prte_default_hostfile": f"{folder}/hostfile",
            # Open MPI names its session folder after the host and the process id, and both are the
            # same in every lab. To keep two labs on one machine from sharing a folder, put it
            # inside the lab.
            "PRTE_MCA_prte_tmpdir_base": folder,
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a command in the lab, in `environment()`, and waits for it like `subprocess.run`."""
        options["env"] = self.environment(options.pop("env", None))
        return subprocess.run(self.wrap(command), check=False, **options)

    def set_rate(self, rate: str) -> None:
        """Changes the rate of every link, in both directions. Open connections survive this.

        Raises:
            ValueError: The rate is invalid, or the links were created unshaped.
            OSError: The kernel refused. The message comes from the kernel.
        """
        _check_rate(rate)
        if self.rate is None:
            raise ValueError(
                f"the links of this lab are unshaped, so their rate cannot be changed to `{rate}`. "
                "Create the lab with a rate, as `Lab(rate=...)`."
            )
        for host in range(self.hosts):
            tc = ["tc", "qdisc", "change", "dev"]
            new = ["root", "handle", "1:", *shape(rate, self.burst_kb)]
            for line in (
                self.wrap([*tc, f"to-h{host}", *new]),
                self.wrap_host(host, [*tc, "eth0", *new]),
            ):
                done = subprocess.run(
                    line, check=False, capture_output=True, text=True, timeout=START_S
                )
                if done.returncode != 0:
                    raise OSError(
                        f"the rate `{rate}` was refused for host `h{host}`: "
                        f"{clause(done.stderr.strip())}. Pass a rate that `tc` accepts."
                    )
        self.rate = rate

    def set_link(self, host: int, *, up: bool) -> None:
        """Disconnects a host from the switch, or reconnects it.

        While a host is disconnected, its connections stay open but no data gets through.

        Raises:
            ValueError: There is no such host.
            OSError: The kernel refused. The message comes from the kernel.
        """
        self._check_host(host)
        line = self.wrap(["ip", "link", "set", "dev", f"to-h{host}", "up" if up else "down"])
        done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=START_S)
        if done.returncode != 0:
            raise OSError(f"the link of host `h{host}` was not changed: {done.stderr.strip()}")

    def dropped_packets(self) -> int:
        """Returns how many packets the links have dropped so far.

        Counts both directions. Always 0 if the links aren't shaped.
        """
        lines = [
            self.wrap(["tc", "-s", "qdisc", "show", "dev", f"to-h{host}"])
            for host in range(self.hosts)
        ]
        lines += [
            self.wrap_host(host, ["tc", "-s", "qdisc", "show", "dev", "eth0"])
            for host in range(self.hosts)
        ]
        texts = [
            subprocess.run(x, check=True, capture_output=True, text=True, timeout=START_S).stdout
            for x in lines
        ]
        return sum(int(n) for text in texts for n in re.findall(r"dropped (\d+)", text))

    def _check_host(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(
                f"there is no host `{host}`: this lab has the hosts 0 to {self.hosts - 1}."
            )

    def measure_rate(self, seconds: float = 1.0) -> tuple[float, float]:
        """Measures the rate of a plain TCP transfer from host 0 to host 1 and back, in bit/s.

        Blocks for twice `seconds`, once per direction. On links slower than a few Mbit/s it takes
        longer, since at least a few packets have to arrive and everything still in flight needs to
        drain.

        Expect about 4% less than the link's nominal rate: we count bytes at the receiver's socket,
        which leaves out the headers.

        Raises:
            OSError: There is only one host, or the transfer failed.
        """
        if self.hosts < 2:
            raise OSError(
                "a rate is measured between two hosts, but this lab has only one. Create it with "
                "`Lab(hosts=2)`."
            )
        return self._transfer(0, 1, seconds), self._transfer(1, 0, seconds)

    def _transfer(self, source: int, target: int, seconds: float) -> float:
        try:
            done = measure_transfer(
                partial(self.wrap_host, source),
                partial(self.wrap_host, target),
                f"h{target}",
                python=sys.executable,
                seconds=seconds,
                burst_bytes=self.burst_kb << 10,
            )
        except OSError as error:
            raise OSError(f"no transfer from `h{source}` to `h{target}`: {error}") from error
        return done.bits_per_s

    def bytes_crossed(self) -> int:
        """Returns how many bytes (including headers) all hosts have sent so far."""
        lines = Path(f"/proc/{self._open['pid']}/net/dev").read_text().splitlines()
        counters = dict(line.split(":", 1) for line in lines if ":" in line)
        ports = [values for name, values in counters.items() if name.strip().startswith("to-h")]
        return sum(int(values.split()[0]) for values in ports)


def shape(rate: str, burst_kb: int) -> tuple[str, ...]:
    """Returns the `tc` arguments for a link of this rate.

    The holder can't import this function, so it keeps its own copy of these arguments.
    """
    return ("tbf", "rate", rate, "burst", f"{burst_kb}kb", "latency", "100ms")


def _check_rate(rate: str) -> None:
    if not re.fullmatch(r"\d+(\.\d+)?[kmgt]?(bit|bps)", rate):
        raise ValueError(f"`{rate}` is not a rate: write 500mbit, 1gbit, ... as tc does.")
    if not re.search("[1-9]", rate):
        raise ValueError(
            f"a link needs a rate above 0, not `{rate}`. To disconnect a host, call "
            "`Lab.set_link(host, up=False)`."
        )


def available() -> str | None:
    """Returns None if this machine can run a lab, or else the reason it can't.

    Finds out by actually creating a lab, which takes about 0.2 s.
    """
    try:
        with Lab(hosts=2):
            return None
    except OSError as error:
        return str(error)
