"""Does training from slow storage reach full speed with the cache, reading each record only once?

    python benchmarks/data_cache.py [--rate 200mbit] [--turns N] [--json FILE] [--png FILE]
        [--smoke]

On one host of a lab, an HTTP server with byte ranges serves ImageNet-like records. On the other
host, a job trains on them over a link of 200 Mbit/s. We compare the following, each in a separate
process, and in turn:

- the cache with 1, 2 and 4 jobs of different seeds, when the whole data set fits on the disk and
  when only half of it does
- the same records read from a local folder
- other libraries that users could take instead; if such a library can't read byte ranges, it uses
  jaxcross's reader

`predicted` is what `jaxcross.data.cache.simulate` predicts for the cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from data_cache_show import draw, show
from machine import machine

from jaxcross.data import synth, synthesise
from jaxcross.lab import Lab

HERE = Path(__file__).parent
SERVER = HERE.parent / "tests" / "support" / "range_server.py"
WAYS: dict[str, dict[str, Any]] = {
    "local folder": {"way": "local"},
    "cache, fits, 1 job": {"way": "cache", "share": 1.2, "jobs": 1},
    "cache, fits, 2 jobs": {"way": "cache", "share": 1.2, "jobs": 2},
    "cache, fits, 4 jobs": {"way": "cache", "share": 1.2, "jobs": 4},
    "cache, fits, images in memory": {"way": "cache", "share": 1.2, "jobs": 1, "images_share": 1.2},
    "cache, half fits, 1 job": {"way": "cache", "share": 0.5, "jobs": 1},
    "cache, half fits, 2 jobs": {"way": "cache", "share": 0.5, "jobs": 2},
    "cache, half fits, 4 jobs": {"way": "cache", "share": 0.5, "jobs": 4},
    "Grain alone": {"way": "grain"},
    "Grain over a folder copied first": {"way": "copy"},
    "fsspec filecache": {"way": "fsspec", "protocol": "filecache"},
    "fsspec blockcache": {"way": "fsspec", "protocol": "blockcache"},
    "Grain over a dictionary of records": {"way": "dictionary"},
    "PyTorch's loader, a dictionary of records": {"way": "torch"},
}
SHOWN = ("cache, fits, 1 job", "cache, half fits, 1 job")  # drawn, from the first turn
QUALITY = 99  # 101 kB per 500x375 JPEG; ImageNet's average is 110 kB
AGAIN = "cache, fits, 1 job"  # run a second time over the same folder


@contextmanager
def origin(lab: Lab, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs the server on the second host."""
    line = lab.wrap_host(1, [sys.executable, str(SERVER), str(folder), "0.0.0.0"])
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            port = server.stdout.readline().strip().rpartition(":")[2]
            yield f"http://h1:{port}", server
        finally:
            server.stdin.close()


def bytes_sent(server: subprocess.Popen[str]) -> int:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def measure(lab: Lab, server: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Runs one way, and asks the server after each pass how many bytes it has sent."""
    line = lab.wrap_host(
        0, [sys.executable, str(HERE / "data_cache_worker.py"), json.dumps(request)]
    )
    before, passes, last = bytes_sent(server), [], {}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        for answer in worker.stdout:
            found = json.loads(answer)
            after = bytes_sent(server)
            if "pass" in found:
                passes.append({**found, "origin_bytes": after - before})
                before = after
                worker.stdin.write("\n")
                worker.stdin.flush()
            else:
                last = found
    if worker.returncode != 0:
        raise RuntimeError(f"{request} ended with {worker.returncode}")
    return {"passes": passes, **last} if passes else last


def summary(runs: list[dict[str, Any]], set_bytes: int) -> dict[str, Any]:
    """Returns medians over the turns."""
    if "missing" in runs[0]:
        return runs[0]
    passes = [
        {
            "images_per_s": statistics.median(
                run["passes"][n]["images"] / run["passes"][n]["seconds"] for run in runs
            ),
            "cpu_ms_an_image": statistics.median(
                1e3 * run["passes"][n]["cpu_s"] / run["passes"][n]["images"] for run in runs
            ),
            "origin_sets": statistics.median(run["passes"][n]["origin_bytes"] for run in runs)
            / set_bytes,
        }
        for n in range(len(runs[0]["passes"]))
    ]
    origin_bytes = statistics.median(
        sum(each["origin_bytes"] for each in run["passes"]) for run in runs
    )
    over = [
        sum(each["origin_bytes"] for each in run["passes"]) / run["predicted_bytes"]
        for run in runs
        if run.get("predicted_bytes")
    ]
    return {
        "passes": passes,
        "origin_bytes": origin_bytes,
        "over_predicted": {"median": statistics.median(over), "min": min(over), "max": max(over)}
        if over
        else None,
        "first_batch_s": statistics.median(run["first_batch_s"] for run in runs),
    }


def undisturbed(
    lab: Lab, server: subprocess.Popen[str], request: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures a way, and again if the machine stalled meanwhile. Makes at most four attempts.

    Returns the result and the request that led to it.
    """
    for attempt in range(4):
        own = {**request, "work": f"{request['work']}{attempt}"}
        found = measure(lab, server, own)
        if found.get("gap_s", 0) < 2:
            break
    return found, own


def result_of(
    raw: dict[str, list[dict[str, Any]]], args: argparse.Namespace, known: dict[str, Any]
) -> dict[str, Any]:
    summaries = {name: summary(runs, known["set_bytes"]) for name, runs in raw.items()}
    local = summaries["local folder"]["passes"][1]
    fits = summaries.get(AGAIN, summaries["local folder"])["passes"][1]
    return {
        "question": (__doc__ or "").splitlines()[0],
        "command": sys.argv,
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
                for name in ("grain", "array-record", "fsspec", "aiohttp")
            },
        },
        "machine": machine(),
        "rate": args.rate,
        **known,
        "second_pass_over_local": fits["images_per_s"] / local["images_per_s"],
        "second_pass_cpu_over_local": fits["cpu_ms_an_image"] / local["cpu_ms_an_image"],
        "ways": summaries,
        "raw": raw,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of the link (default %(default)s)")
    parser.add_argument(
        "--ways", help="only those that begin with one of these words, separated by semicolons"
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="how often each way is measured (default %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write medians and raw numbers")
    parser.add_argument(
        "--png", metavar="FILE", type=Path, help="draw the bytes by level over time"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few records only, to see that it runs"
    )
    args = parser.parse_args()
    images, turns, epochs, batch = (64, 1, 2, 8) if args.smoke else (512, args.turns, 3, 32)
    wanted = tuple(args.ways.split(";")) if args.ways else ("",)
    ways = {
        name: way for name, way in WAYS.items() if name.startswith(wanted) or name == "local folder"
    }
    raw: dict[str, list[dict[str, Any]]] = {}

    with tempfile.TemporaryDirectory() as root:
        width, height = (64, 48) if args.smoke else (500, 375)
        with mock.patch.object(synth, "QUALITY", QUALITY):
            folder = synthesise(Path(root) / "data", images=images, width=width, height=height)
        set_bytes = sum(path.stat().st_size for path in folder.glob("*-train.array_record*"))
        with Lab(rate=args.rate) as lab, origin(lab, folder) as (url, server):
            link = lab.description
            for turn in range(turns):
                for number, (name, way) in enumerate(ways.items()):
                    request = {
                        **way,
                        "url": url,
                        "folder": str(folder),
                        "epochs": epochs,
                        "batch": batch,
                        "seed": turn,
                        "image_size": 32 if args.smoke else 224,
                        "work": f"{root}/{turn}-{number}-",
                        "samples": name in SHOWN and turn == 0,
                    }
                    found, place = undisturbed(lab, server, request)
                    raw.setdefault(name, []).append(found)
                    if name == AGAIN:
                        again = measure(lab, server, {**place, "samples": False, "predict": False})
                        raw.setdefault(f"{name}, second run", []).append(again)
                    print(f"turn {turn + 1}: {name}", file=sys.stderr)
                result = result_of(
                    raw, args, {"link": link, "images": images, "set_bytes": set_bytes}
                )
                if args.json:  # after each turn, because a run of an hour may be killed
                    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")

    show(result)
    if args.png:
        draw(result, args.png)


if __name__ == "__main__":
    main()
