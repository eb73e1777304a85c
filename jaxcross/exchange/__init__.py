"""Exchange strategies: optax transformations written only with named-axis collectives.

Creating a strategy and calling its `init` never communicate; only `update` does. An exchange needs
all ranks, so all of them must call `update` on the same steps. This includes the strategies that
communicate only on every k-th step.

Every strategy checks its axes before the first exchange. It raises a `ValueError` if an axis is
named twice, or if you name several axes for a strategy that works over a single one. While jaxcross
traces a step, a strategy also raises if it's given a leaf that another strategy has already
exchanged over the same axis. `lars`, `lamb` and `scale_by_trust_ratio` are exempt from that last
check: they only exchange trust ratios, and have to come after an exchange of the gradients.

The first argument of most strategies names the axes whose ranks take part in the exchange, as a
single name or as a tuple of names. Usually, the ranks of several axes are treated as one group. In
some strategies, two axes have different roles: the outer one, which comes first, counts the nodes,
and the inner one counts the ranks within a node, as in `adasum(("node", "local"))`.

The strategies only decide what is exchanged. The messages themselves are sent by the `wire`
package, and the `interleave` package decides when. Most strategies have a file of the same name.
The exceptions are `bounded_stale` and `asynchronous`, which share the file `staleness`, and `lars`
and `lamb`, which share `parallel_norms`. The remaining files are helpers:

collectives     sums, rings and trees of hops over one axis
layouts         leaves as even blocks, vectors, fragments or chunks
select          the k largest elements without sorting
sparse          (value, index) messages of a fixed size, of leaves or of their chunks
bits            signs and small integers as bits; vectors as 4- or 8-bit integers
local_rounds    local steps and the merge at the end of a round; the model of a job that ended in
                the middle of one (`finish`)
per_rank        an optimizer whose whole state is rank-local; other states declare their rank-local
                fields by `RankLocal` of checkpoint/rank_local.py
exchange_once   the error if a leaf would be exchanged twice
elementwise     whether an optimizer works element by element
arithmetic      means over trees, weights, moves of parameters, products in full float32
validation      checks of arguments, states and leaves
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
