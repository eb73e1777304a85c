"""Exchange strategies: optax transformations written with named-axis collectives and nothing else.

Making one and its `init` do not communicate; its `update` does, of some in every so many steps
only, and every rank calls it in the same step. All of them raise a `ValueError` before the first
exchange where an axis is named twice, where several are named for a strategy that goes over one, or
where a leaf would be exchanged twice over one axis.

`axes` is the name of an axis or a tuple of names. A strategy whose axes have two roles (nodes, and
the ranks of a node) takes the outer one first: `adasum(("node", "local"))`.

A strategy says what to exchange; `wire` makes the exchange, `interleave` says when. Each strategy
has a file of its name (`bounded_stale` and `asynchronous` are in `staleness`, `lars` and `lamb` in
`parallel_norms`). The other files help them:

collectives     sums, rings and trees of hops over one axis
select          the k largest elements without sorting; `sparse`: (value, index) messages of a fixed
                size
chunks          leaves as equal chunks, and messages of the largest elements of each
bits            signs and small numbers as bits; `integers`: vectors in 4 or 8 bits
blocks          trees as even parts; `fragments`: even parts in turn; `flat`: trees as one vector
rounds          local steps, and the merge at a round's end
finish          the model of a job that ended within a round
per_rank        state that differs between ranks, declared by its type
exchange_once   an error where a leaf would be exchanged twice
elementwise     whether an optimizer works element by element
validation      checks of arguments
"""

from jaxcross.exchange.accumulate import accumulate
from jaxcross.exchange.adasum import adasum
from jaxcross.exchange.decoupled_momentum import decoupled_momentum
from jaxcross.exchange.delayed_mean import delayed_mean
from jaxcross.exchange.diloco import diloco
from jaxcross.exchange.elastic_average import elastic_average
from jaxcross.exchange.federated_average import federated_average
from jaxcross.exchange.finish import finish
from jaxcross.exchange.gossip import gossip
from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.exchange.mean import mean
from jaxcross.exchange.no_loco import no_loco
from jaxcross.exchange.one_bit_adam import one_bit_adam
from jaxcross.exchange.parallel_norms import lamb, lars, scale_by_trust_ratio
from jaxcross.exchange.power_sgd import power_sgd
from jaxcross.exchange.qsgd import qsgd
from jaxcross.exchange.sharded_optimizer import sharded_optimizer
from jaxcross.exchange.sign_sgd import sign_sgd
from jaxcross.exchange.sparse_loco import sparse_loco
from jaxcross.exchange.staleness import asynchronous, bounded_stale
from jaxcross.exchange.streaming_diloco import streaming_diloco
from jaxcross.exchange.top_k import top_k

__all__ = [
    "accumulate",
    "adasum",
    "asynchronous",
    "bounded_stale",
    "decoupled_momentum",
    "delayed_mean",
    "diloco",
    "elastic_average",
    "federated_average",
    "finish",
    "gossip",
    "gtop_k",
    "lamb",
    "lars",
    "local_sgd",
    "mean",
    "no_loco",
    "one_bit_adam",
    "power_sgd",
    "qsgd",
    "scale_by_trust_ratio",
    "sharded_optimizer",
    "sign_sgd",
    "sparse_loco",
    "streaming_diloco",
    "top_k",
]
