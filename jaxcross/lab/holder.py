"""The process that keeps a lab's namespaces alive.

Namespaces vanish along with the last process in them. The user's own process can't hold them open,
because everything else it does would then happen inside the namespaces too. So we create the lab in
a separate process, the holder, and that's what keeps it alive.

The holder writes a single line of JSON to stdout (`pid`, `folder` and `user`, or `error`), then
blocks until its stdin is closed, which happens at the latest when the user's process exits.

The holder's child is PID 1 of the lab's process namespace. When PID 1 exits, the kernel kills
everything else in the namespace, so the lab can't leave any processes behind.

The holder runs as a script in Python's isolated mode, so it only imports the standard library. It's
also single-threaded, because the kernel doesn't let a multithreaded process enter a new user
namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

NEWNS = 0x20000
NEWUTS = 0x4000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
SUBNET = "10.77.0"
HEAD = f"{SUBNET}.254"
FOLDERS = ("/boot", "/srv", "/media", "/mnt")
"""The lab needs somewhere to put a few files, so it mounts a private tmpfs over the first of these
folders that exists. This hides the folder's real contents from everything inside the lab, which is
why we only list folders that training has no use for.
"""

ENTER = """#!/bin/sh
# called like ssh: [options] host command...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
read -r pid cores < "$(dirname "$0")/$host"
if [ -n "$cores" ]; then set -- taskset -c "$cores" sh -c "$*"; else set -- sh -c "$*"; fi
exec nsenter --target="$pid" --net --uts -- "$@"
"""


def main() -> None:
    """Creates the lab described by the argument, reports it, and keeps it alive until closed."""
    request = json.loads(sys.argv[1])
    try:
        user = _leave()
    except OSError as error:
        _report(error=f"the kernel refused new namespaces ({error.strerror}).")
        return
    ready, notify = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        _first_process(request, notify)
    os.close(notify)
    # PID 1 notices when stdin is closed. All we do here is wait for PID 1 to exit.
    with os.fdopen(ready) as stream:
        answer = json.loads(
            stream.readline() or '{"error": "the first process of the namespace died."}'
        )
    _report(**answer, **({} if "error" in answer else {"pid": pid, "user": user}))
    os.waitpid(pid, 0)


def _report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(flags: int) -> None:
    if _libc().unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _leave() -> bool:
    """Moves this process into new namespaces. Returns whether they include a user namespace.

    Unprivileged users can only create the other namespaces inside a new user namespace. Root can do
    without, so labs still work for root on machines where user namespaces are disabled.
    """
    flags = NEWNS | NEWUTS | NEWPID | NEWNET
    uid = os.getuid()
    gid = os.getgid()
    try:
        _unshare(flags | NEWUSER)
    except OSError:
        if uid != 0:
            raise
        _unshare(flags)
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return True


def _first_process(request: dict[str, Any], notify: int) -> NoReturn:
    """Runs PID 1 of the namespace: creates the hosts, then sleeps until the lab is closed."""
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        answer: dict[str, Any] = {"folder": str(_build(request))}
    except (OSError, subprocess.SubprocessError) as error:
        answer = {"error": _reason(error)}
    with os.fdopen(notify, "w") as stream:
        stream.write(json.dumps(answer) + "\n")
    if "error" in answer:
        os._exit(1)
    # Orphaned processes in the lab get reparented to PID 1. Since it doesn't wait for its children,
    # they'd linger as zombies after exiting. Ignoring SIGCHLD makes the kernel reap them for us.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    os._exit(0)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        return f"`{' '.join(error.cmd)}` failed: {lines[-1] if lines else error.returncode}"
    return str(error)


def _do(*command: str) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10
    )


def _build(request: dict[str, Any]) -> Path:
    _do("mount", "--make-rprivate", "/")
    _do("mount", "-t", "proc", "proc", "/proc")
    folder = next((Path(name) for name in FOLDERS if Path(name).is_dir()), None)
    if folder is None:
        raise OSError(
            f"none of the folders {', '.join(FOLDERS)} exists, and the lab needs one to mount a "
            "private file system on. Create one of them."
        )
    _do("mount", "-t", "tmpfs", "-o", "mode=755", "jaxcross-lab", str(folder))
    socket.sethostname("head")
    names = [f"h{i}" for i in range(request["hosts"])]
    addresses = {name: f"{SUBNET}.{i + 1}" for i, name in enumerate(names)}
    table = "".join(f"{address} {name}\n" for name, address in (*addresses.items(), ("head", HEAD)))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{table}")
    _do("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    (folder / "hostfile").write_text("".join(f"{name}\n" for name in names))
    (folder / "enter").write_text(ENTER)
    (folder / "enter").chmod(0o755)

    _do("ip", "link", "set", "lo", "up")
    _do("ip", "link", "add", "name", "switch", "type", "bridge")
    _do("ip", "address", "add", f"{HEAD}/24", "dev", "switch")
    _do("ip", "link", "set", "switch", "up")
    shares = _shares(sorted(os.sched_getaffinity(0)), len(names))
    for name, cores in zip(names, shares, strict=True):
        pid = _host(name)
        _connect(name, pid, addresses[name], request)
        (folder / name).write_text(f"{pid} {','.join(map(str, cores))}\n")
    for address in addresses.values():
        _await(address)
    return folder


def _shares(cores: list[int], hosts: int) -> list[list[int]]:
    """Divides the cores among the hosts as evenly as possible.

    With more hosts than cores, all lists are empty, meaning that the hosts aren't pinned.
    """
    if hosts > len(cores):
        return [[]] * hosts
    return [cores[i * len(cores) // hosts : (i + 1) * len(cores) // hosts] for i in range(hosts)]


def _host(name: str) -> int:
    """Forks a process that keeps a host's namespaces alive. Returns once they exist."""
    ready, notify = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        _unshare(NEWNET | NEWUTS)
        socket.sethostname(name)
        os.write(notify, b".")
        os.close(notify)
        while True:
            signal.pause()
    os.close(notify)
    with os.fdopen(ready, "rb") as stream:
        if not stream.read(1):
            raise OSError(
                f"host `{name}` could not be created. The kernel may limit the number of "
                "namespaces: see `sysctl user.max_net_namespaces`."
            )
    return pid


def _connect(name: str, pid: int, address: str, request: dict[str, Any]) -> None:
    port = f"to-{name}"
    inside = ("nsenter", f"--target={pid}", "--net", "--")
    _do(
        "ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid)
    )
    _do("ip", "link", "set", port, "master", "switch", "up")
    _do(*inside, "ip", "link", "set", "lo", "up")
    _do(*inside, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _do(*inside, "ip", "link", "set", "eth0", "up")
    burst = f"{request['burst_kb']}kb"
    shape = ()
    if request["rate"]:
        shape = ("tbf", "rate", request["rate"], "burst", burst, "latency", "100ms")
    if shape:
        _do("tc", "qdisc", "add", "dev", port, "root", "handle", "1:", *shape)
        _do(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", *shape)
    if request["latency"]:
        where = ("parent", "1:1") if shape else ("root",)
        _do(
            *inside,
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            *where,
            "handle",
            "10:",
            "netem",
            "delay",
            request["latency"],
        )


def _await(address: str, patience_s: float = 10.0) -> None:
    """Waits until a host answers.

    A new link takes a moment to come up, and runs launched before that have been known to fail.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((address, 9), timeout=0.5).close()
            return
        except ConnectionRefusedError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"the host at {address} did not answer within {patience_s:.0f} s ({error}). "
                    "Try again, with less load on this machine."
                ) from error
            time.sleep(0.05)


if __name__ == "__main__":
    main()
