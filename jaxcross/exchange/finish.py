"""Extracts the model from a finished job whose parameters still differ between ranks."""

from __future__ import annotations

import jax
import optax

from jaxcross.exchange.diloco import DiLoCoState
from jaxcross.exchange.sparse_loco import SparseLoCoState
from jaxcross.exchange.streaming_diloco import StreamingDiLoCoState


def finish(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Returns the model that all ranks agree on, for a job that ended, stopped or was pruned.

    The job may have ended at any step. For `diloco`, `streaming_diloco` and `sparse_loco`, the
    model is the anchor: local steps since the last exchange, and anything pending, are dropped. For
    all other optimizers, it's the parameters; the last gradient, which `delayed_mean` has pending,
    is dropped as well. With `no_loco`, `gossip` and `elastic_average`, and within a round of
    `local_sgd`, ranks haven't agreed on a model: the result is rank-local, and the model to
    evaluate is the mean over ranks. If you resume the job, you don't need `finish`, since its state
    simply continues.

    ```python
    model = jaxcross.exchange.finish(state.params, state.opt_state)
    ```

    Args:
        params: Parameters of the job's latest state.
        opt_state: Optimizer state of the same job state. The strategy's state may be nested in
            others, as in `optax.chain`.

    Returns:
        A tree like `params`. With the three strategies named first, its floating-point leaves are
            bitwise identical on every rank. All other leaves are those of `params`.

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
