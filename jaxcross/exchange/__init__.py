"""Exchange strategies: optax transformations written with named-axis collectives and nothing else."""

from jaxcross.exchange.mean import mean

__all__ = ["mean"]
