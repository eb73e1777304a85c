"""Whether jobs gain from sharing a device, measured on all ranks before they train.

step_estimate    `jaxcross.estimate`: what several jobs of one step would gain; `script_estimate`
                 does it for the first step that a script calls
fusion           `jaxcross.fuse`: which tiny jobs become one program; measures both ways
solo_cost        the seconds and bytes of one step alone, measured on all ranks or on none

The predictions themselves are in `plan`, which needs no ranks.
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.gains.fusion import fuse
    from jaxcross.gains.script_estimate import estimate_in_script
    from jaxcross.gains.step_estimate import estimate
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
