"""`jaxcross estimate script.py`: measures the first step that a script calls.

We measure the step instead of running it, and then terminate the script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from jaxcross.gains.solo_cost import Settings, Subject, measure_on_all_ranks
from jaxcross.jobs import JobEngine, memory_limit
from jaxcross.plan import MachineContention
from jaxcross.runtime import Stopped
from jaxcross.step import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The contents of the environment variable `JAXCROSS_ESTIMATE`, a JSON object.

    Attributes:
        jobs, steps, mbps, memory: As for `jaxcross.estimate`.
        step: Name of the step to measure. Defaults to the first step that's called.
        json: File to which rank 0 also writes the estimate, if any.
        contention: The contents of a file that `jaxcross contention` wrote, if any.

    Raises:
        TypeError, ValueError: The variable contains anything else.
    """

    jobs: int = 2
    steps: int = 3
    mbps: float | None = None
    memory: int | str | None = None
    step: str | None = None
    json: str | None = None
    contention: Any = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the variable's text."""
        names = [f.name for f in fields(cls)]
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not set(found) <= set(names):
            raise ValueError(
                "The environment variable `JAXCROSS_ESTIMATE` must be a JSON object without any "
                f"other keys than {', '.join(names)}, for example {{}}, got {text!r}. It is set by "
                "`jaxcross estimate`; to train, unset it."
            )
        return cls(**found)

    @property
    def settings(self) -> Settings:
        """Settings of the measurement."""
        return Settings(
            jobs=self.jobs,
            steps=self.steps,
            mbps=self.mbps,
            memory_bytes=memory_limit(self.memory),
            contention=None
            if self.contention is None
            else MachineContention.from_json(self.contention),
        )


def estimate_in_script(variant: Variant, leaves: Sequence[Any], job: JobEngine | None) -> None:
    """Measures a step that a script is about to call, and terminates the script on all ranks.

    Rank 0 prints the estimate. Waits for all ranks.

    There are two cases in which this returns without waiting or measuring, so that the step runs as
    usual: the user has asked for a different step, or this particular call doesn't exchange
    anything (some steps only exchange in some of their calls).

    Raises:
        SystemExit: The measurement is done, and no run is in progress.
        Stopped: The measurement is done, and the step belongs to a job.
        ValueError, CutError, ExchangeError: The step can't be measured.
    """
    world = variant.world
    program = variant.default
    request = Request.parse(world.estimate_request)
    if program.local_step or request.step not in (None, program.name):
        return
    found = measure_on_all_ranks(
        lambda: Subject(
            traced=variant.traced,
            leaves=leaves,
            bucket_bytes=variant.record.bucket_bytes,
            settings=request.settings,
        ),
        program.name,
        world=world,
        job=job,
    )
    if world.rank == 0:
        print(found, flush=True)
        if request.json is not None:
            Path(request.json).write_text(json.dumps(found.as_dict(), indent=1) + "\n")
    raise SystemExit(0) if job is None else Stopped
