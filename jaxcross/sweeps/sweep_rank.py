"""One rank of `jaxcross sweep`: `python -m jaxcross.sweeps.sweep_rank train.py TASK`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxcross.errors import require_extra
from jaxcross.sweeps.search import Draws, Grid
from jaxcross.world import World, current_world, initialize


def main(arguments: list[str]) -> int:
    """Runs the sweep described by the command line, and returns 0. Waits for all ranks."""
    from jaxcross.sweeps.run_sweep import sweep

    script = Path(arguments[0])
    task = json.loads(arguments[1])
    search = search_of(task)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.absolute().parent))
    # Run the script under a name other than `__main__`. All we need is its `train` function, so
    # don't execute the code below `if __name__ == "__main__":`, which is for starting the script
    # directly.
    train = runpy.run_path(str(script), run_name=script.stem).get("train")
    if train is None:
        raise ValueError(
            f"`{script}` has no function `train(job, ...)`. Define it at the top level of the "
            "script."
        )
    world = _world()
    result = sweep(
        train,
        search,
        metric=task["metric"],
        mode=task["mode"],
        trials=task["trials"],
        concurrent=task["concurrent"],
        folder=task["folder"],
        world=world,
    )
    if world.rank == 0:
        print(result)
        print(f"Kept in `{task['folder']}`: sweep.json, metrics, and the best trial's checkpoint.")
    return 0


def search_of(task: Mapping[str, Any]) -> Grid | Draws:
    """Returns the search described by the command line: a whole grid, or random draws from it."""
    pruner = None if task["prune"] is None else _pruner(task["prune"])
    if task["trials"] is None:
        return Grid(task["grid"], pruner=pruner)
    return Draws(task["grid"], seed=task["seed"], pruner=pruner)


def _world() -> World:
    """Returns the world. Calls `initialize` if the script hasn't."""
    try:
        return current_world()
    except RuntimeError:
        return initialize()


def _pruner(name: str) -> Any:
    require_extra("sweep", "`--prune`", "optuna")
    from optuna import pruners

    kinds = {
        "median": pruners.MedianPruner,
        "halving": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
    }
    return kinds[name]()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
