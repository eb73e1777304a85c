"""Writes files that start the groups of a plan on a cluster, based on the recipes in deploy/."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from jaxcross.errors import InternalError
from jaxcross.plan import Plan, PlannedGroup

KINDS = ("slurm", "mpijob")
MAX_ARRAY = 1000
"""Maximum number of tasks in a Slurm array with Slurm's default settings."""


def write_launch_files(
    plan: Plan,
    kind: str,
    folder: Path,
    *,
    script: str,
    queue: str = "jaxcross",
    accelerators: bool = True,
) -> list[Path]:
    """Writes the plan and files that run `script PLAN GROUP` for each group. Returns all paths.

    For Slurm, groups with the same number of ranks share a file, which starts them as tasks of a
    job array. The MPI operator (Kubernetes) gets one file per group, because each group is an
    `MPIJob` of its own.

    Args:
        plan: The plan.
        kind: `slurm` or `mpijob`.
        folder: The folder to write to. If it's relative to the working directory, so are the paths
            in the files. Slurm's tasks run in the working directory.
        script: The script to start. It receives the path of the plan and the number of a group, and
            runs the jobs of that group.
        queue: The Kueue queue to submit each `MPIJob` to.
        accelerators: Whether each rank needs an accelerator.

    Raises:
        ValueError: `kind` or `queue` is invalid, or there's no script.
        OSError: A file can't be written.
    """
    check_cluster(kind, queue)
    check_script(script)
    folder.mkdir(parents=True, exist_ok=True)
    written = [plan.to_json(folder / "plan.json")]
    if kind == "slurm":
        texts = _arrays(plan, script, written[0], accelerators)
    else:
        texts = _manifests(plan, script, written[0], queue)
    for name, text in texts:
        (folder / name).write_text(text)
        written.append(folder / name)
    return written


def check_cluster(kind: str, queue: str) -> None:
    """Checks that we can write files for this kind of cluster and for this queue.

    Raises:
        ValueError: The kind is unknown, or the queue's name is invalid.
    """
    if kind not in KINDS:
        raise ValueError(
            f"`--launch` writes files for {' or '.join(KINDS)}, got `{kind:.60}`. Name one of "
            "these."
        )
    if len(queue) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", queue):
        raise ValueError(
            "`--queue` must be the name of a queue in Kubernetes, i.e. at most 63 lower-case "
            "letters, digits and hyphens, the first and last of them not a hyphen, got "
            f"`{queue:.80}`."
        )


def check_script(script: str) -> None:
    """Checks that there's a script to start. Raises ValueError if there isn't."""
    if not script or not script.isprintable():
        raise ValueError(
            f"`--launch` needs the script that runs a group, but `script` is {script!r:.60}. Add "
            '`script = "train.py"` at the top of the file of jobs.'
        )


def _arrays(plan: Plan, script: str, file: Path, accelerators: bool) -> Iterator[tuple[str, str]]:
    """Yields the file name and contents for each Slurm array."""
    buckets: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(plan.groups):
        buckets[group.ranks].append(number)
    for ranks, numbers in sorted(buckets.items()):
        for part, start in enumerate(range(0, len(numbers), MAX_ARRAY)):
            some = numbers[start : start + MAX_ARRAY]
            name = f"ranks-{ranks}{f'-{part}' if len(numbers) > MAX_ARRAY else ''}.sbatch"
            text = _array(ranks, some, script, file, name)
            yield (
                name,
                text if accelerators else _replaced(text, {"#SBATCH --gpus-per-task=1\n": ""}),
            )


def _array(ranks: int, numbers: list[int], script: str, file: Path, name: str) -> str:
    command = f'python -m mpi4py {shlex.quote(script)} {shlex.quote(str(file))} "$group"'
    return _replaced(
        _recipe("slurm/job.sbatch"),
        {
            "# Two nodes with four accelerators each:  sbatch job.sbatch train.py --lr 0.1": (
                f"# Groups of {file.name} on {ranks} ranks each, one an array task:  sbatch "
                f"{file.with_name(name)}"
            ),
            "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n": (
                f"#SBATCH --chdir={shlex.quote(str(Path.cwd()))}\n"
                f"#SBATCH --array=0-{len(numbers) - 1}\n#SBATCH --ntasks={ranks}\n"
            ),
            "#SBATCH --output=jaxcross-%j.log": "#SBATCH --output=jaxcross-%A-%a.log",
            "# The environment with jaxcross": (
                f"groups=({' '.join(map(str, numbers))})\n"
                "group=${groups[$SLURM_ARRAY_TASK_ID]}\n\n"
                "# The environment with jaxcross"
            ),
            'python -m mpi4py "$@"': command,
        },
    )


def _manifests(plan: Plan, script: str, file: Path, queue: str) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(plan.groups):
        yield f"group-{number}.yaml", _manifest(group, number, script, file, queue)


def _manifest(group: PlannedGroup, number: int, script: str, file: Path, queue: str) -> str:
    words = f"{shlex.quote(script)} {shlex.quote(str(file))} {number}"
    return _replaced(
        _recipe("kubernetes/mpijob.yaml"),
        {
            "# Two workers with one rank each, started": (
                f"# Group {number} of {file.name}, {group.ranks} workers with one rank each, "
                "started"
            ),
            "metadata:\n  name: jaxcross\n": (
                f"metadata:\n  name: jaxcross-group-{number}\n  labels:\n    "
                f"kueue.x-k8s.io/queue-name: {queue}\n"
            ),
            "      replicas: 2\n": f"      replicas: {group.ranks}\n",
            "launch -n 2 ": f"launch -n {group.ranks} ",
            '-sd ,)" train.py\n': f'-sd ,)" {words}\n',
            "--events /shared/events\n": f"--events /shared/events-{number}\n",
        },
    )


def _recipe(name: str) -> str:
    """Returns the text of a recipe, which ships with both the checkout and the wheel."""
    package = Path(__file__).parents[1]
    places = [package.parent / "deploy" / name, package / "_deploy" / name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise InternalError(
            f"The recipe `{name}` is in none of {', '.join(map(str, places))}. Install jaxcross "
            "again. If it's still missing, this is a bug in jaxcross, please report it."
        )
    return found.read_text()


def _replaced(text: str, changes: dict[str, str]) -> str:
    """Applies changes to a recipe. Each text to replace must occur exactly once.

    If it doesn't, somebody has edited the recipe without updating this module, and the result would
    be wrong.
    """
    for old, new in changes.items():
        if text.count(old) != 1:
            raise InternalError(
                f"A recipe must contain the text {old!r:.100} once, but contains it "
                f"{text.count(old)} times. This is a bug in jaxcross, please report it."
            )
        text = text.replace(old, new)
    return text
