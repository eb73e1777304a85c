"""Exchange strategies, i.e. optax transformations built purely from named-axis collectives.

Constructing a strategy and calling its `init` are purely local; only `update` communicates. Since
an exchange involves every rank, all ranks must call `update` on the same steps, even for strategies
that only communicate on every k-th step.

Before its first exchange, every strategy validates its axes and raises a `ValueError` if an axis is
named twice, or if you pass several axes to a strategy that only supports a single axis. While
jaxcross is tracing a step, strategies also refuse any leaf that another strategy has already
exchanged over the same axis. `lars`, `lamb` and `scale_by_trust_ratio` are exempt from this last
check: they only exchange trust ratios, and have to follow an exchange of the gradients.

Most strategies take an `axes` argument that names the axes to exchange over, as a single name or
as a tuple. Several axes usually act as one big group of ranks. Some strategies, however, give two
axes different roles: the outer axis comes first and counts nodes, and the inner axis counts the
ranks within a node, as in `adasum(("node", "local"))`.

Strategies only decide *what* is exchanged; the `wire` package sends the messages, and the
`interleave` package decides when. Each strategy lives in a file of the same name, except that
`bounded_stale` and `asynchronous` share `staleness`, and `lars` and `lamb` share `parallel_norms`.
The remaining files are helpers:

collectives     sums over one axis, along a ring or a tree
layouts         flattens leaves into even blocks, vectors, fragments or chunks
select          finds the k largest elements without sorting
sparse          fixed-size (value, index) messages, for whole leaves or for chunks
bits            packs signs and small integers into bits; quantises vectors to 4 or 8 bits
local_rounds    local steps, and the merge that ends a round; `finish` returns the model of a job
                that ended in the middle of a round
per_rank        wraps an optimizer whose entire state is rank-local (other states declare their
                rank-local fields with `RankLocal` from checkpoint/rank_local.py)
exchange_once   raises an error if a leaf would be exchanged twice
elementwise     checks that an optimizer works element by element
arithmetic      tree means, weights, parameter moves, matrix products in full float32
validation      checks arguments, states and leaves
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use
from jaxcross.exchange.accumulate import accumulate
from jaxcross.exchange.adasum import adasum
from jaxcross.exchange.decoupled_momentum import decoupled_momentum
from jaxcross.exchange.delayed_mean import delayed_mean
from jaxcross.exchange.diloco import diloco
from jaxcross.exchange.elastic_average import elastic_average
from jaxcross.exchange.federated_average import federated_average
from jaxcross.exchange.gossip import gossip
from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.local_rounds import finish
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

if TYPE_CHECKING:  # not public, for jaxcross's other folders
    from jaxcross.exchange import collectives
    from jaxcross.exchange.elementwise import check_elementwise
    from jaxcross.exchange.validation import whole_number
else:
    __getattr__, *_ = on_first_use(__name__)

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


def __dir__() -> list[str]:
    return [*__all__]
