"""`jaxcross doctor --hosts a,b`: checks whether ranks on these hosts can start and communicate.

To run into the same problems as a real run, we run commands on the hosts in the same way `mpirun`
would: through the same agent (`ssh`), with the same Python and in the same folder. The code has to
work even on hosts without jaxcross, since that's one of the problems we want to report, so we pipe
it into Python's stdin.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxcross.commands.doctor import Check, ask, exit_code, show
from jaxcross.commands.hosts import agent_of, is_here, missing_hosts, parse_hosts
from jaxcross.errors import first_line, quoted
from jaxcross.lab import Transfer, measure_transfer
from jaxcross.world import probe

_FACTS_S = 60.0
_RATE_S = 1.0
_BACK_S = 0.2  # shorter, since this machine only receives a few messages from the launcher
_PASSED_ON = ("LD_LIBRARY_PATH", "PYTHONPATH")
_OPTIONAL = "mpi4jax"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What we found on a host that answered.

    Attributes:
        python: Whether the host has Python at the same path as this machine.
        folder: Whether the working folder exists on the host.
        versions: The JSON output of `jaxcross.world.probe versions`, or empty if there wasn't any.
        error: The reason if there wasn't any.
    """

    python: bool
    folder: bool
    versions: Mapping[str, str | None]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What we found on all hosts, before judging it.

    Attributes:
        hosts: The hosts, in the order of `--hosts`.
        agent: The command we use to run things on a host.
        python: The path of this Python.
        folder: The working folder.
        missing: The hosts that don't answer.
        facts: What we found on each host that does.
        links: For each pair of sender and receiver, the transfer between them, or why it failed.
        vendor: The vendor of `mpirun`; None if there's no `mpirun` on this machine.
        exchange: The JSON output of an all-reduce with one rank per host; None if we didn't try.
    """

    hosts: Sequence[str]
    agent: Sequence[str]
    python: str
    folder: str
    missing: Sequence[str]
    facts: Mapping[str, HostFacts]
    links: Mapping[tuple[str, str], Transfer | str]
    vendor: str | None
    exchange: Mapping[str, Any] | None = None


def run(text: str) -> int:
    """Examines the hosts, then prints a table and the command to start a run.

    Runs commands on the hosts and waits for them. This takes ten to thirty seconds, or longer with
    more than two hosts. Every command has a timeout, so this returns even if a host hangs.

    Returns:
        1 if a run can't work, 2 if the names are invalid, otherwise 0.
    """
    try:
        hosts = parse_hosts(text)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    checks = judge(look(hosts))
    show(f"jaxcross doctor --hosts {text}", checks)
    code = exit_code(checks)
    if code == 0:
        print(f"Start a run: jaxcross launch -n {len(hosts)} --hosts {text} train.py")
    return code


def look(hosts: Sequence[str]) -> Survey:
    """Examines the hosts and the network between them.

    If nothing is wrong so far, also starts a rank on each host and has them perform an exchange.
    """
    from jaxcross.commands.launch import find_mpirun, mpirun_command
    from jaxcross.world import xla_pool

    agent = agent_of(os.environ)
    on = {host: list if is_here(host) else partial(_over, agent, host) for host in hosts}
    missing = missing_hosts([host for host in hosts if on[host] is not list], agent)
    there = [host for host in hosts if host not in missing]
    with ThreadPoolExecutor(max(len(there), 1)) as pool:
        facts = dict(zip(there, pool.map(lambda host: _ask_host(on[host]), there), strict=True))
    able = [host for host in there if facts[host].python]
    here = platform.node()
    mpirun = find_mpirun()
    # MPICH's helper process on each host connects back to this machine by name, so that name has to
    # be resolvable there. The ranks themselves don't need this, since MPI tells them each other's
    # addresses.
    named = None if mpirun is not None and mpirun.vendor == "openmpi" else here
    links = {
        (source, target): _link(
            on[source],
            on.get(target, list),
            target,
            seconds=_RATE_S if target in hosts else _BACK_S,
            by_name=target == named,
        )
        for source, target in pairs(hosts, here, [host for host in hosts if on[host] is list])
        if source in able and (target in able or target not in hosts)
    }
    found = Survey(
        hosts=hosts,
        agent=agent,
        python=sys.executable,
        folder=str(Path.cwd()),
        missing=missing,
        facts=facts,
        links=links,
        vendor=None if mpirun is None else mpirun.vendor,
    )
    if mpirun is None or exit_code(judge(found)):
        return found
    line, extra = mpirun_command(
        mpirun=mpirun,
        ranks=len(hosts),
        program=[sys.executable, "-m", "jaxcross.world.probe", "exchange"],
        root=os.geteuid() == 0,
        cores=xla_pool.cores(),
        environ=os.environ,
        hosts=hosts,
    )
    return replace(found, exchange=ask(line, extra).get("exchange", {"error": "no answer"}))


def pairs(hosts: Sequence[str], here: str, local: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the pairs of sender and receiver to use in the network test. Pure.

    Testing every pair would scale quadratically, so each host only exchanges data with the next in
    the list, in both directions. In addition, all hosts send to this machine, because `mpirun`
    starts a helper process on each of them that has to be able to connect back to the machine on
    which `mpirun` runs.

    Args:
        hosts: The hosts.
        here: The name of this machine.
        local: Those of the `hosts` that are really this machine.
    """
    ring = [(a, b) for a, b in zip(hosts, [*hosts[1:], *hosts[:1]], strict=True) if a != b]
    back = [(host, here) for host in hosts if host not in local and host != here]
    return list(dict.fromkeys([*(both for a, b in ring for both in ((a, b), (b, a))), *back]))


def _over(agent: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    return [*agent, host, shlex.join(command)]


def _ask_host(on: Callable[[Sequence[str]], Sequence[str]]) -> HostFacts:
    """Runs a command that examines a host. Its output tells us how far it got."""
    variables = [f"{name}={os.environ[name]}" for name in _PASSED_ON if name in os.environ]
    python = shlex.join(["env", *variables, sys.executable, "-", "versions"])
    script = (
        # Keep it all on one line: the user's shell over there might be csh, which can't quote line
        # breaks.
        f"cd {shlex.quote(str(Path.cwd()))} && echo folder; "
        f"test -x {shlex.quote(sys.executable)} && echo python && exec {python}"
    )
    try:
        done = subprocess.run(
            on(["sh", "-c", script]),
            input=Path(probe.__file__).read_bytes(),
            capture_output=True,
            timeout=_FACTS_S,
            check=False,
            start_new_session=True,  # keeps the terminal's Ctrl-C away from this command
        )
        output = done.stdout
        errors = done.stderr
        end = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        errors = late.stderr or b""
        end = f"no answer within {_FACTS_S:.0f} s"
    said = output.decode(errors="replace").splitlines()
    answer = next((line for line in reversed(said) if line.startswith("{")), None)
    complaint = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
    return HostFacts(
        python="python" in said,
        folder="folder" in said,
        versions={} if answer is None else json.loads(answer)["versions"],
        error="" if answer is not None else f"{end}: {complaint}",
    )


def _link(
    on_source: Callable[[Sequence[str]], Sequence[str]],
    on_target: Callable[[Sequence[str]], Sequence[str]],
    target: str,
    *,
    seconds: float,
    by_name: bool,
) -> Transfer | str:
    try:
        return measure_transfer(
            on_source, on_target, target, python=sys.executable, seconds=seconds, by_name=by_name
        )
    except OSError as error:
        return str(error)


def judge(found: Survey) -> list[Check]:
    """Turns the findings into checks. Pure.

    If another problem kept us from trying something, its check names whatever has to be fixed
    first.
    """
    checks = [
        _judge_ssh(found),
        _judge_there(
            found,
            "Python",
            found.python,
            [host for host, facts in found.facts.items() if not facts.python],
        ),
        _judge_there(
            found,
            "folder",
            found.folder,
            [host for host, facts in found.facts.items() if not facts.folder],
        ),
        *_judge_versions(found),
        *(
            _judge_link(*ends, link, timed=ends[1] in found.hosts)
            for ends, link in found.links.items()
        ),
    ]
    if found.vendor is None:
        remedy = "Run `jaxcross doctor` without `--hosts`: it says what this machine lacks."
        checks.append(Check(name="mpirun", found="none", remedy=remedy, fatal=True))
    cause = next((check.name for check in checks if check.fatal), None)
    name = f"all-reduce of {len(found.hosts)} ranks"
    if found.exchange is not None:
        return [*checks, *_judge_exchange(name, found, found.exchange)]
    if cause is not None:
        checks.append(Check(name=name, found=f"cannot be checked before {cause}", cause=cause))
    return checks


def _judge_ssh(found: Survey) -> Check:
    if not found.missing:
        return Check(name="ssh", found=f"{quoted(found.hosts)} answer")
    line = " ".join([*found.agent, found.missing[0], "true"])
    return Check(
        name="ssh",
        found=f"{quoted(found.missing)} did not answer `{line}`",
        remedy=(
            "That command must work here, and without a password. Log in once by `ssh "
            f"{found.missing[0]}`, which shows what is wrong with the name or the network and "
            f"confirms the host's key; then `ssh-copy-id {found.missing[0]}` copies your own key "
            "there."
        ),
        fatal=True,
    )


def _judge_there(found: Survey, name: str, path: str, without: Sequence[str]) -> Check:
    if not found.facts:
        return Check(name=name, found="cannot be checked before ssh", cause="ssh")
    if not without:
        return Check(name=name, found=f"{path} on {quoted(tuple(found.facts))}")
    remedies = {
        "Python": (
            f"Install the same environment at the same path on {quoted(without)}: in a folder that "
            "all hosts mount, or as a copy. A virtual environment cannot be moved to another path."
        ),
        "folder": (
            f"Make it on {quoted(without)}, with the script and its data: ranks start in the "
            "folder in which `jaxcross launch` is called."
        ),
    }
    return Check(
        name=name, found=f"no `{path}` on {quoted(without)}", remedy=remedies[name], fatal=True
    )


def _judge_versions(found: Survey) -> list[Check]:
    able = {host: facts for host, facts in found.facts.items() if facts.python}
    if not able:
        cause = "Python" if found.facts else "ssh"
        return [Check(name="versions", found=f"cannot be checked before {cause}", cause=cause)]
    silent = [host for host, facts in able.items() if not facts.versions]
    if silent:
        why = "; ".join(f"`{host}`: {first_line(able[host].error)}" for host in silent)
        remedy = f"`{found.python}` must run on {quoted(silent)}; try it there by hand."
        return [Check(name="versions", found=why, remedy=remedy, fatal=True)]
    return [
        _judge_version(name, {host: facts.versions for host, facts in able.items()})
        for name in (*probe.PACKAGES, "MPI")
        if name != _OPTIONAL or any(facts.versions.get(name) for facts in able.values())
    ]


def _judge_version(name: str, versions: Mapping[str, Mapping[str, str | None]]) -> Check:
    by_value: dict[str | None, list[str]] = {}
    for host, each in versions.items():
        value = each.get(name)
        if name == "MPI" and value is not None:
            value = value.partition(",")[0]  # Open MPI appends the host it was built on
        by_value.setdefault(value, []).append(host)
    (first, _), *others = by_value.items()
    if first is not None and not others:
        return Check(name=name, found=first)
    parts = [
        f"{'none' if value is None else value} on {quoted(hosts)}"
        for value, hosts in by_value.items()
    ]
    parts += [
        f"{error} (`{host}`)"
        for host in by_value.get(None, ())
        if (error := versions[host].get("error"))
    ]
    if name == "MPI":
        remedy = (
            "All ranks need one MPI. If it comes from a module, load that before `jaxcross "
            "doctor`, which passes `LD_LIBRARY_PATH` on to the hosts; `ssh` does not load modules."
        )
    else:
        remedy = (
            f"Install the same version of {name} on all hosts: ranks that differ compile different "
            "programs."
        )
    return Check(name=name, found="; ".join(parts), remedy=remedy, fatal=True)


def _judge_link(source: str, target: str, link: Transfer | str, *, timed: bool) -> Check:
    name = f"{source} to {target}"
    if isinstance(link, str):
        return Check(
            name=name,
            found=f"no TCP transfer: {link}",
            remedy=_link_remedy(source, target, link),
            fatal=True,
        )
    delay = f"{link.round_trip_us} us"
    if link.round_trip_us >= 1000:
        delay = f"{link.round_trip_us / 1000:.1f} ms"
    found = (
        f"{link.interface or 'unknown interface'} ({link.source}) to {link.target}: round trip "
        f"{delay}"
    )
    if timed:
        rate = link.bits_per_s / 1e6
        found += f", {rate:.{0 if rate >= 10 else 1}f} Mbit/s"
    return Check(name=name, found=found)


def _link_remedy(source: str, target: str, error: str) -> str:
    if "timed out" in error or "route" in error or "unreachable" in error:
        return (
            "MPI connects to any TCP port, and something between the hosts drops that; usually it "
            f"is the firewall of `{target}`. Let it accept everything from `{source}`: `ufw allow "
            "from ADDRESS`, or `firewall-cmd --zone=trusted --add-source=ADDRESS`. In a cloud, "
            "allow all TCP within the security group."
        )
    if "bytes" in error or "nothing could be sent" in error:
        return (
            "They connect, but little or nothing arrives. If only large packets get lost, the MTU "
            "differs between the hosts: compare it in `ip link`."
        )
    return (
        f"`{target}` must mean the same address on `{source}` as here: compare what `getent hosts "
        f"{target}` prints on both, and put the same lines into `/etc/hosts`."
    )


def _judge_exchange(name: str, found: Survey, exchange: Mapping[str, Any]) -> list[Check]:
    between = [
        link
        for (_, b), link in found.links.items()
        if b in found.hosts and isinstance(link, Transfer)
    ]
    places = {link.source: link.interface for link in between}
    settings = settings_for(found.vendor, sorted({name for name in places.values() if name}))
    if not (exchange.get("correct") and exchange.get("ranks") == len(found.hosts)):
        line = (
            f"jaxcross launch -n {len(found.hosts)} --hosts {','.join(found.hosts)} -m "
            "jaxcross.world.probe exchange"
        )
        remedy = f"Run `{line}`, which shows MPI's own messages."
        if settings:
            remedy += (
                " If it says that they wait in the start of MPI, name the interface of these "
                f"transfers: {settings}."
            )
        wrong = first_line(str(exchange.get("error", f"wrong: {dict(exchange)}")))
        return [Check(name=name, found=wrong, remedy=remedy, fatal=True)]
    reached = [
        f"{places.get(a, '?')} ({a}) to {places.get(b, '?')} ({b})"
        for a, b in exchange.get("connections", ())
    ]
    strange = [x for pair in exchange.get("connections", ()) for x in pair if x not in places]
    remedy = ""
    if strange and settings:
        remedy = (
            "The names of the hosts mean other addresses than MPI has chosen. To have it use "
            f"theirs: {settings}."
        )
    none = (
        "MPI has no TCP connection between these ranks: it uses another network, or shared memory"
    )
    return [
        Check(name=name, found=f"correct, over {exchange['over']}"),
        Check(name="MPI's interface", found="; ".join(reached) or none, remedy=remedy),
    ]


def settings_for(vendor: str | None, interfaces: Sequence[str]) -> str:
    """Returns the command that makes MPI use these interfaces, or "" if we don't know any. Pure.

    Interface names can differ between hosts, and neither Open MPI nor libfabric can start a rank on
    a host that lacks an interface we've named. So if there's more than one name, we recommend the
    network's address for Open MPI, and nothing at all for libfabric. UCX merely prints a warning,
    so we give it all the names.
    """
    names = ",".join(interfaces)
    if not interfaces:
        return ""
    if vendor == "openmpi":
        value = names if len(interfaces) == 1 else "NETWORK/BITS"
        return f"`export OMPI_MCA_btl_tcp_if_include={value}`"
    libfabric = f" FI_TCP_IFACE={names}" if len(interfaces) == 1 else ""
    return f"`export UCX_NET_DEVICES={names}{libfabric}`"
