"""What the table to choose an exchange by says of each that no benchmark measures."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """Attributes: `measured`, its name in the results; `received`, by a rank in a step; `same`, on every rank;
    `trained`, its name among what was trained, if that is another.
    """

    exchange: str
    measured: str
    received: str
    same: str
    use: str
    costs: str
    source: str
    trained: str = ""


FAMILY = (
    Member("`mean`", "mean", "2(P-1)/P n", "yes",
           "the network is fast enough, or another job hides the exchange", "nothing", "2007.03970"),
    Member("`mean(wire_dtype=bfloat16)`", "mean, bfloat16", "(P-1)/P n", "yes",
           "nearly always, when it is not", "one rounding a rank", "ours"),
    Member('`mean(pattern="hierarchical")`', "mean, hierarchical", "2(N-1)/N n/L between N nodes of L ranks", "yes",
           "several ranks a node", "a copy of the tree", "Horovod"),
    Member('`mean(pattern="ring")`', "mean, ring", "2(P-1)/P n", "yes",
           "to fix the order of the sum, whatever the MPI", "2(P-1) hops", "Thakur et al., 2005"),
    Member('`mean(pattern="tree")`', "mean, tree", "n log2 P", "yes",
           "few bytes, many ranks", "all bytes at every hop", "Thakur et al., 2005"),
    Member("`top_k(density)`", "top_k 1%, as chosen", "(P-1) k (4 + bytes of a value)", "yes",
           "P is small, the network slow", "selection; a residual as large as the model", "1809.07599",
           trained="top_k 1%, threshold"),
    Member("`top_k(density, values_dtype=bfloat16)`", "top_k 1%, bfloat16 values", "6 (P-1) k", "yes",
           "as above", "as above; rounding goes to the residual", "ours"),
    Member('`top_k(pattern="hierarchical")`', "top_k 1%, hierarchical", "the same between nodes, k/L", "yes",
           "several ranks a node", "dense inside nodes", "2010.10458"),
    Member("`gtop_k(density)`", "gtop_k 1%", "8 k log2 P", "yes",
           "P is large, a power of two", "as `top_k`; drops more", "1901.04359"),
    Member("`power_sgd(rank)`", "power_sgd, rank 2", "2(P-1)/P of the factors", "yes",
           "matrices are large", "two small products, orthogonalisation", "1905.13727"),
    Member("`demo(density)`", "demo 1%", "5.5 (P-1) k", "yes",
           "as `top_k`, with SGD or signs", "a transform of each tile; a momentum as large as the model", "2411.19870"),
    Member("`qsgd(levels)`", "qsgd, 127 levels", "(P-1)/4 n", "yes",
           "unbiased steps matter", "noise", "1610.02132"),
    Member("`sign_sgd`", "sign_sgd", "2(P-1)/P n/32", "yes",
           "a vote is enough", "needs a lower learning rate", "1802.04434"),
    Member("`one_bit_adam`", "one_bit_adam", "2(P-1)/P n/32 after the warm-up", "yes",
           "Adam, long runs", "a frozen variance, two residuals", "2102.02888"),
    Member("`adasum`", "adasum of deltas", "about 2(P-1)/P n", "yes",
           "the batch grows faster than the learning rate is tuned", "dot products at log2 P levels", "2006.02924"),
    Member("`adasum(inner_axis=...)`", "adasum of gradients, hierarchical", "about 2(N-1)/N n/L between nodes", "yes",
           "as above, several ranks a node", "a mean inside nodes", "2006.02924"),
    Member("`lars`, `lamb`", "shared norms", "4 bytes a layer beside the mean", "yes",
           "many layers, many ranks", "one small all-gather", "2010.10458"),
    Member("`local_sgd(every=H)`", "local_sgd, every 8", "2(P-1)/P n / H", "every H steps, to rounding",
           "a larger batch is welcome anyway", "ranks drift apart between", "1805.09767"),
    Member("`diloco(every=H)`", "diloco, every 8", "2(P-1)/P n / H", "every H steps, to rounding",
           "H is to be large, 50 and more", "an anchor and the outer state, each as large as the model", "2311.08105"),
    Member("`streaming_diloco(every=H, bits=b)`", "streaming_diloco, every 8, 4 bits",
           "2(P-1)/P n / H, at 8 and 4 bits (P-1) n b/32 / H", "no", "as above, and no step is to wait for it",
           "as above; a fragment that is pending", "2501.18512"),
    Member("`federated_average`", "federated_average, half, every 8", "2(P-1)/P n / H", "every H steps, to rounding",
           "ranks hold unequal data", "as above, sampling noise", "1602.05629"),
    Member("`elastic_average`", "elastic_average, every 8", "2(P-1)/P n / H", "no",
           "ranks may explore", "a centre, as large as the model", "1412.6651"),
    Member("`gossip`", "gossip, exponential", "n a neighbour", "no",
           "P is large", "consensus takes rounds", "1705.09056"),
    Member("`sparse_loco(every=H, density=d)`", "sparse_loco 1/64, every 8", "1.75 (P-1) k / H",
           "every H steps, to rounding", "links are far slower than `diloco` can hide",
           "an anchor and a residual, each as large as the model", "2508.15706"),
    Member("`no_loco(every=H)`", "no_loco, every 8", "n / H", "no",
           "P is large, links are far", "an anchor and a velocity, each as large as the model", "2506.10911"),
    Member("`sharded_optimizer`", "sharded_optimizer", "2(P-1)/P n", "yes",
           "the optimizer's state is too large: 1/P a rank", "element-wise optimizers only", "1910.02054"),
    Member("`delayed_mean`", "delayed_mean", "2(P-1)/P n", "yes",
           "the exchange is about as long as the computation", "one stale step; one set of gradients", "1104.5525"),
    Member("`bounded_stale`", "bounded_stale, 2 steps", "2(P-1)/P n", "no",
           "to study staleness: a simulator", "stale steps", "Ho et al., 2013"),
    Member("`asynchronous`", "asynchronous, 0 to 2 steps", "2(P-1)/P n", "yes",
           "to study staleness: a simulator with a schedule", "stale steps", "1104.5525"),
    Member("`ParameterServer`", "ParameterServer, asynchronous", "2(P-1)/P n", "at the end",
           "ranks are of unlike speed", "stale steps; no two runs are equal", "Ho et al., 2013"),
)  # fmt: skip
