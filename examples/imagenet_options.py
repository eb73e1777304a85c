"""The command line of imagenet_resnet.py."""

import argparse
import json
from pathlib import Path
from typing import Any

from resnet import MODELS

from jaxcross import Link


def job(text: str) -> tuple[str, dict[str, Any]]:
    """Parses `lr=0.1,seed=0` and keeps the text, which becomes the job's name."""
    values = dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    try:
        if not values or set(values) - {"lr", "seed"}:
            raise ValueError(text)
        return text, {"lr": float(values.get("lr", 0.1)), "seed": int(values.get("seed", 0))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"`{text}` is not of the form lr=0.1,seed=0") from error


def parse(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data-dir",
        required=True,
        help="TFDS imagenet2012 in ArrayRecord format; `jaxcross data synth DIR` writes one",
    )
    add(
        "--cache",
        metavar="DIR",
        help="keep records on this disk of the node; --data-dir may then be a URL",
    )
    add("--cache-gb", type=float, default=100, metavar="N", help="its size (default %(default)s)")
    add("--model", choices=MODELS, default="resnet50", metavar="NAME", help=", ".join(MODELS))
    add(
        "--job",
        action="append",
        type=job,
        metavar="lr=0.1,seed=0",
        dest="jobs",
        help="one job; repeat for more",
    )
    add("--batch-size", type=int, default=32, help="images a rank and step (default %(default)s)")
    add("--image-size", type=int, default=224, help="pixels (default %(default)s)")
    add("--steps", type=int, help="of each job, and way of a comparison (default: --epochs passes)")
    add("--epochs", type=int, default=90, help="passes over the data (default %(default)s)")
    add("--warmup-steps", type=int, help="default: 5 passes, at most a tenth of the steps")
    add("--weight-decay", type=float, default=1e-4, help="of kernels only (default %(default)s)")
    add("--label-smoothing", type=float, default=0.0, help="default %(default)s")
    add(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the layers",
    )
    add(
        "--sync-batch-norm",
        action="store_true",
        help="statistics over all ranks, not the average of each rank's own",
    )
    add(
        "--eval-steps",
        type=int,
        metavar="N",
        help="evaluation batches a job (default: one pass; 0: no evaluation)",
    )
    add(
        "--policy",
        choices=("crossover", "sequential", "compare"),
        default="crossover",
        help="how jobs share",
    )
    add(
        "--cut",
        default="whole",
        type=lambda text: int(text) if text.isdecimal() else text,
        help="whole, auto or parts",
    )
    add(
        "--emulate-link",
        metavar="RATE",
        help="hold exchanges as a link of this rate would, such as 500mbit",
    )
    add("--checkpoints", metavar="DIR", help="keep checkpoints there, and resume from them")
    add(
        "--checkpoint-every",
        type=int,
        default=1000,
        metavar="N",
        help="steps (default %(default)s)",
    )
    add(
        "--output",
        "--report",
        type=Path,
        metavar="DIR",
        help="write each run's report, trace and Gantt chart there",
    )
    add("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    if args.checkpoints and args.policy == "compare":
        parser.error(
            "--checkpoints: the second run of --policy compare would resume where the first one "
            "ended"
        )
    args.jobs = args.jobs or [job("lr=0.1,seed=0")]
    for folder in (
        args.output,
        args.json and args.json.parent,
    ):  # fail before hours of training rather than after them
        try:
            folder and folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"nothing can be written into {folder}: {error}")
    try:
        args.emulated = Link.parse(args.emulate_link) if args.emulate_link else None
    except ValueError as error:
        parser.error(f"argument --emulate-link: {error}")
    return args


def write_results(
    args: argparse.Namespace, rank: int, ways: dict[str, list[Any]], scores: dict[str, Any]
) -> None:
    """Writes the files of `--output` and `--json` on rank 0.

    The second run in crossover is called `crossover-2`, and so on.
    """
    reports = {
        f"{way}-{n}" if n > 1 else way: report
        for way, runs in ways.items()
        for n, report in enumerate(runs, 1)
    }
    if args.output and rank == 0:
        for name, report in reports.items():
            report.to_json(args.output / f"{name}.json")
            report.to_chrome_trace(args.output / f"{name}.trace.json")
            report.to_gantt(args.output / f"{name}.png")
    if args.json and rank == 0:
        runs = {name: report.summary() for name, report in reports.items()}
        content = {"options": vars(args), "runs": runs, "evaluation": scores}
        args.json.write_text(json.dumps(content, indent=2, default=str) + "\n")
