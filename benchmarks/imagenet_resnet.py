"""How fast do several ImageNet jobs train in crossover, compared with one after the other?

    python benchmarks/imagenet_resnet.py [--accuracy 0.8] [--rate 500mbit] [--json FILE] [--smoke]
        [...]
    jaxcross launch -n 2 benchmarks/imagenet_resnet.py --data-dir DATA [...]

We measure the images per second and the time to a given accuracy. The benchmark trains like
`examples/imagenet_resnet.py` and accepts the options of that example (`--model`, `--job`,
`--batch-size`, ...). The records are read from disk. `--data-dir` is the folder of TFDS's
imagenet2012 in ArrayRecord format. Without it, the benchmark writes a small synthetic data set with
classes that can be learned.

Throughput: runs in crossover and runs with one job after the other alternate. We do this with the
records out of the page cache (`cold`), and with the records in it as far as they fit into memory
(`warm`; `resident_share_before` is the share that was in it). We report images per second for each
job and in total, both in the steady state and over the wall time of a run without compilation.
`input_wait_s` is how long a job waited for its next batch, per step, on the slowest rank.
`input_lost_s` is how much longer a round took because of the input.

Accuracy: we report the seconds from the start of a run until all of its jobs have reached
`--accuracy` on the validation split, including evaluation and the reading of its images. The
reported run is the median one. With `--eval-steps 0`, accuracy isn't measured. In crossover, images
are decoded once for all jobs, whereas jobs that run one after the other each decode their own. So
part of the gain comes from decoding less.

If you run the script directly, it starts the ranks. They run on two hosts with a real link of
`--rate`, provided that the machine allows network namespaces. Otherwise the link is emulated, and
no speed-up is computed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import page_cache
import ranks
from ended import ends_on_signals, run
from hosts import bytes_crossed
from imagenet_table import CACHES, POLICIES, show, speedups, throughput_of
from workloads import parser, spread, write_json  # makes the examples importable

import jaxcross
from jaxcross.data import SharedDecode, eval_batches, synthesise, train_batches
from jaxcross.data.records import find_folder
from jaxcross.lab import emulated_link
from jaxcross.world.launch_env import read_launch

SMOKE = ["--model", "resnet8", "--image-size", "24", "--batch-size", "8", "--steps", "8"]
JOBS = ["--job", "lr=0.1,seed=0", "--job", "lr=0.2,seed=1"]
OTHER = {  # options of the example, and why they don't apply here
    "--policy": "runs both ways itself",
    "--output": "draws nothing",
    "--report": "draws nothing",
    "--checkpoints": "resumes none of its runs",
    "--checkpoint-every": "resumes none of its runs",
    "--epochs": "counts by `--steps`",
}


def options() -> tuple[argparse.Namespace, list[str]]:
    made = parser(__doc__)
    made.add_argument("--data-dir", help="default: a synthetic set is written")
    made.add_argument("--images", type=int, help="of the synthetic set (default: 1024)")
    made.add_argument(
        "--accuracy",
        type=float,
        default=0.8,
        help="to reach; 0: not measured (default %(default)s)",
    )
    made.add_argument(
        "--accuracy-steps",
        type=int,
        help="give up after so many steps a job (default: 5 times --steps)",
    )
    made.add_argument(
        "--evaluate-every", type=int, metavar="STEPS", help="default: a fifth of --steps"
    )
    made.add_argument("--repeats", type=int, help="of the throughput runs (default: 3)")
    made.add_argument("--ranks", type=int, default=2, help="to start (default %(default)s)")
    made.add_argument(
        "--rate",
        default="500mbit",
        help="of the link between them; none: no link (default %(default)s)",
    )
    args, rest = made.parse_known_args()
    for name in given(rest, OTHER):  # reports the first one
        made.error(f"`{name}` is for examples/imagenet_resnet.py: this benchmark {OTHER[name]}")
    args.repeats = args.repeats or (1 if args.smoke else 3)
    args.images = args.images or (128 if args.smoke else 1024)
    rest = [*(SMOKE if args.smoke else ["--steps", "20"]), *rest]
    return args, rest if given(rest, ["--job"]) else [*rest, *JOBS]


def given(arguments: list[str], names: Iterable[str]) -> list[str]:
    """Returns which of these options are among the arguments.

    Options also match as `--job=...` or abbreviated, because argparse accepts both.
    """
    begun = [word.split("=")[0] for word in arguments if word.startswith("--")]
    return [
        name for name in names if any(len(word) > 2 and name.startswith(word) for word in begun)
    ]


def main() -> None:
    args, rest = options()
    if read_launch(os.environ) is not None:
        if args.data_dir is None:
            raise SystemExit(
                "Ranks that were started by mpirun need --data-dir; `jaxcross data synth DIR` "
                "writes one."
            )
        result = Ranks.start(args, rest).measure()
        if result is not None:
            show(result)
            write_json(args.json, __doc__, result)
        return
    with ends_on_signals(), tempfile.TemporaryDirectory() as folder:
        if args.data_dir is None:
            size: dict[str, Any] = {"width": 64, "height": 48} if args.smoke else {}
            synthesise(f"{folder}/data", images=args.images, classes=4 if args.smoke else 8, **size)
        write_json(args.json, __doc__, launch(args, rest, Path(folder)))


def launch(args: argparse.Namespace, rest: list[str], folder: Path) -> dict[str, Any]:
    """Starts the ranks, which print the table, and returns their numbers."""
    from jaxcross.lab import Lab, available

    mpirun = ranks.mpirun_or_exit()
    out = folder / "result.json"
    arguments = [
        "--data-dir",
        args.data_dir or f"{folder}/data",
        "--json",
        str(out),
        "--accuracy",
        str(args.accuracy),
    ]
    arguments += ["--repeats", str(args.repeats), *(["--smoke"] if args.smoke else []), *rest]
    for name in ("accuracy_steps", "evaluate_every"):
        value = getattr(args, name)
        arguments += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []

    def line(*link: str) -> tuple[list[str], dict[str, str]]:
        # Ranks may share an accelerator, so none may preallocate most of its memory.
        environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        return ranks.command(mpirun, args.ranks, __file__, [*arguments, *link], environ=environ)

    linkless = (
        "--rate none"
        if args.rate == "none"
        else "one rank has nobody to speak to"
        if args.ranks == 1
        else None
    )
    reason = linkless or available()
    crossed = {}
    if reason is None:
        with Lab(hosts=args.ranks, rate=args.rate) as lab:
            command, environ = line()
            run(lab.wrap(command), lab.environment(environ))
            crossed = {"bytes_crossed": bytes_crossed(lab, least=1e6)}
    else:
        print(f"no real link: {reason}", flush=True)
        command, environ = line(*([] if linkless else ["--emulate-link", args.rate]))
        run(command, environ)
    measured = json.loads(out.read_text())
    for name in (
        "question",
        "command",
        "versions",
        "machine",
    ):  # keep those of this process: they're the user's
        del measured[name]
    return {**measured, **crossed, **({} if args.data_dir else {"data": "synthetic"})}


class Ranks(NamedTuple):
    """State shared by all runs on this rank, so that nothing is compiled twice."""

    args: Any
    example: Any
    world: Any
    step: Any
    evaluate: Any
    make_states: Callable[[], dict[str, Any]]
    train_data: Callable[[int], Any]
    validation: Callable[[], Iterator[Any]]
    files: list[Path]

    @classmethod
    def start(cls, own: argparse.Namespace, rest: list[str]) -> Ranks:
        """Joins the world and builds model, recipe and step from the example's own parts."""
        example = import_module("imagenet_resnet")
        args = example.imagenet_options.parse(__doc__, ["--data-dir", own.data_dir, *rest])
        args.__dict__.update({k: v for k, v in vars(own).items() if k != "data_dir"})
        args.evaluate_every = args.evaluate_every or max(1, args.steps // 5)
        args.accuracy_steps = args.accuracy_steps or 5 * args.steps
        args.accuracy = args.accuracy if args.eval_steps != 0 else 0.0
        world = jaxcross.initialize()
        share = {
            "batch_size": args.batch_size,
            "image_size": args.image_size,
            "rank": world.rank,
            "size": world.size,
        }
        train_data = partial(train_batches, args.data_dir, **share)
        model = example.MODELS[args.model](
            num_classes=train_data(steps=1).num_classes,
            dtype=args.precision,
            axis_name="batch" if args.sync_batch_norm else None,
        )
        # All runs use one schedule, as long as the longest run. So a job's steps are the same in
        # every run.
        warmup = args.accuracy_steps // 10 if args.warmup_steps is None else args.warmup_steps
        tx = example.recipe(args.accuracy_steps, warmup, args.weight_decay)
        init = jax.jit(
            lambda key: model.init(key, jnp.zeros((1, args.image_size, args.image_size, 3)))
        )
        inner = partial(example.train_step, smoothing=args.label_smoothing)
        inner.__name__ = "train_step"  # type: ignore[attr-defined]

        def make_states() -> dict[str, Any]:
            named = [(f"job{n} {text}", made) for n, (text, made) in enumerate(args.jobs)]
            return {
                name: example.create_state(args, model, tx, init, **made) for name, made in named
            }

        return cls(
            args=args,
            example=example,
            world=world,
            make_states=make_states,
            step=jaxcross.crossover(inner, axes="batch", donate_argnums=0, cut=args.cut),
            evaluate=jaxcross.crossover(example.eval_step, axes="batch"),
            train_data=lambda steps: train_data(steps=steps),
            validation=lambda: eval_batches(args.data_dir, **share, steps=args.eval_steps),
            files=page_cache.files_of(find_folder(args.data_dir)),
        )

    def measure(self) -> dict[str, Any] | None:
        """Makes all runs. Returns the numbers on rank 0 and None on all other ranks."""
        args, world = self.args, self.world
        self._train("crossover", 2)  # compiles
        if args.accuracy:
            self._accuracy_of(next(iter(self.make_states().values())))
        result: dict[str, Any] = {
            "model": args.model,
            "batch_size": args.batch_size,
            "image_size": args.image_size,
            "steps": args.steps,
            "precision": args.precision,
            "jobs": [text for text, _ in args.jobs],
            "ranks": world.size,
            "device": jax.devices()[0].device_kind,
            "data": "imagenet2012 records",
            "throughput": self._throughput(),
        }
        if args.accuracy:
            result["accuracy"] = {
                "goal": args.accuracy,
                "evaluate_every_steps": args.evaluate_every,
                "steps_at_most": args.accuracy_steps,
                **self._accuracy(),
            }
        link = result["throughput"]["link"]
        if not link.startswith("emulated"):
            result["speedup"] = speedups(result)
        return result if world.rank == 0 else None

    def _train(self, policy: str, steps: int) -> tuple[Any, Any]:
        data = self.train_data(steps)
        return self.example.train(
            self.args, self.world, policy, self.step, self.make_states(), data
        )

    def _throughput(self) -> dict[str, Any]:
        rows: dict[str, dict[str, list[Any]]] = {
            cache: {policy: [] for policy in POLICIES} for cache in CACHES
        }
        link = ""
        for repeat in range(self.args.repeats):
            for cache in CACHES:
                finals = []
                for policy in list(POLICIES)[
                    :: -1 if repeat % 2 else 1
                ]:  # alternate which one comes first
                    share = self._set_cache(cache)
                    report, final = self._train(policy, self.args.steps)
                    finals.append(final)
                    rows[cache][policy].append(
                        {"resident_share_before": share, **throughput_of(report)}
                    )
                    link = report.link
                if not self.example.same_bits(*finals):
                    raise SystemExit("sequential and crossover end in different states")
        facts = {
            c: {
                p: {"images_per_s": spread([r["images_per_s"] for r in runs]), "runs": runs}
                for p, runs in by.items()
            }
            for c, by in rows.items()
        }
        return {"link": link, "equal_to_the_bit": True, **facts}

    def _set_cache(self, cache: str) -> float | None:
        """Drops or fills the page cache.

        All ranks do this, because each may be on a different host. No rank reads before all ranks
        have finished.
        """
        self._barrier()  # another rank may still be reading
        (page_cache.drop if cache == "cold" else page_cache.fill)(self.files)
        self._barrier()
        return page_cache.resident_share(self.files)

    def _barrier(self) -> None:
        self.world.control.allreduce_min(np.zeros(1, np.int64))

    def _accuracy_of(self, state: Any) -> float:
        """Returns the accuracy on the validation split.

        It's identical across ranks bit for bit, so all ranks decide alike.
        """
        scores = [self.evaluate(state, batch)["accuracy"] for batch in self.validation()]
        return float(np.mean([np.asarray(score) for score in scores]))

    def _accuracy(self) -> dict[str, Any]:
        """Returns each way's median run by time, and the times of all runs."""
        runs: dict[str, list[Any]] = {policy: [] for policy in POLICIES}
        for repeat in range(self.args.repeats):
            for policy in list(POLICIES)[:: -1 if repeat % 2 else 1]:
                runs[policy].append(self._until(policy))
        found = {}
        for policy, each in runs.items():
            each.sort(key=lambda run: math.inf if run["s"] is None else run["s"])
            found[policy] = {**each[(len(each) - 1) // 2], "raw_s": [run["s"] for run in each]}
        return found

    def _until(self, policy: str) -> dict[str, Any]:
        """Trains until every job has reached the accuracy or used up its steps."""
        args = self.args
        self._set_cache("warm")
        shared = SharedDecode(self.train_data(args.accuracy_steps))
        states = self.make_states()
        # In the order of the jobs, whichever thread starts first.
        curves: dict[str, list[tuple[int, float, float]]] = {name: [] for name in states}

        def train(job: Any, state: Any, data: Any) -> Any:
            state, curve = job.restore(state), curves[job.name]
            for batch in job.batches(data, args.accuracy_steps):
                state, _ = self.step(state, batch)
                if job.step % args.evaluate_every == 0:
                    curve.append((job.step, time.perf_counter() - start, self._accuracy_of(state)))
                    if curve[-1][2] >= args.accuracy:
                        break
            return state

        with (
            emulated_link(args.emulated),
            jaxcross.Runner(self.world, POLICIES[policy]()) as runner,
        ):
            for name, state in states.items():
                runner.add(name, train, {"state": state, "data": shared.reader()})
            jax.block_until_ready(states)
            self._barrier()
            start = time.perf_counter()
            report = runner.run()
        ends = {
            name: curve[-1]
            for name, curve in curves.items()
            if curve and curve[-1][2] >= args.accuracy
        }
        missing = [name for name in curves if name not in ends]
        return {
            "s": None if missing else max(end[1] for end in ends.values()),
            "reason": f"not reached by {', '.join(missing)}" if missing else None,
            "jobs": {
                name: {"steps": curve[-1][0] if curve else 0, "step_s_accuracy": curve}
                for name, curve in curves.items()
            },
            "wall_s": report.rounds.wall_s,
        }


if __name__ == "__main__":
    sys.exit(main())
