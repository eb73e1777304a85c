"""The model of a job that has ended, where the parameters are not yet what its ranks have agreed
on.
"""

from __future__ import annotations

import jax
import optax

from jaxcross.exchange.diloco import DiLoCoState
from jaxcross.exchange.sparse_loco import SparseLoCoState
from jaxcross.exchange.streaming_diloco import StreamingDiLoCoState


def finish(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Returns the model that all ranks have agreed on, of a job that ended, stopped or was pruned
    at any step.

    For `diloco`, `streaming_diloco` and `sparse_loco` that is the anchor: local steps since the
    last exchange, and what is pending, are dropped. For all other optimizers these are the
    parameters; what `delayed_mean` has pending, the last gradient, is dropped as well. Under
    `no_loco`, `gossip`, `elastic_average` and within a round of `local_sgd` ranks have not agreed:
    the result is this rank's own, and the model to evaluate is the mean over ranks. A job that is
    resumed needs none of this: its state goes on as it is.

    ```python
    model = jaxcross.exchange.finish(state.params, state.opt_state)
    ```

    Args:
        params: Of the job's latest state.
        opt_state: Of the same state; the strategy's state may be inside of others, as in
            `optax.chain`.

    Returns:
        A tree like `params`. Its floating-point leaves are the same bits on every rank for the
        three strategies named first; all other leaves are those of `params`.

    Raises:
        ValueError: Two strategies in `opt_state` keep an anchor.

    Does not communicate and does not wait.
    """
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_anchored) if _anchored(node)]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} strategies in the optimizer's state keep an anchor each, and `finish` "
            "cannot know which one the model is. Call it with the state of one."
        )
    return found[0].model(params) if found else params


def _anchored(node: object) -> bool:
    return isinstance(node, DiLoCoState | StreamingDiLoCoState | SparseLoCoState)
