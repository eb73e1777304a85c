"""Measures whether jobs benefit from sharing a device, on all ranks and before training.

step_estimate    predicts how much faster several jobs with the same step would run together
                 (`jaxcross.estimate`)
script_estimate  does the same for the first step that a script calls, then terminates the script
                 (`jaxcross estimate`)
fusion           fuses tiny jobs with the same step into a job with a single program, if that turns
                 out to be faster (`jaxcross.fuse`)
solo_cost        measures a single step's time and bytes, on all ranks or on none

This package only takes measurements. The predictions are computed in the `plan` package, which
doesn't need any ranks.
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.gains.fusion import fuse
    from jaxcross.gains.script_estimate import estimate_in_script
    from jaxcross.gains.step_estimate import estimate
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
